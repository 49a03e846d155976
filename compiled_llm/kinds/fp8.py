"""Pages with scales, as of fp8: keys and values of one size, each divided by the scale of its kv head."""

# Scales lie on the device at addresses that graphs may rely on, with counts of what had to be clamped. They are inputs
# of programs, so that new scales need neither compiling nor capturing.

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from compiled_llm.kinds.full import FullAttentionSpec
from compiled_llm.kinds.kind import Codec
from compiled_llm.kinds.spec import PageScales, TokenPlaces
from compiled_llm_ops import Geometry
from compiled_llm_ops.contracts import FP8, FP8_CAPABILITY, FP8_LARGEST
from compiled_llm_ops.plain_attention import as_bytes, divided, scaled

if TYPE_CHECKING:
    from compiled_llm.kinds import fp8 as this
    from compiled_llm.kinds.registry import CodecsPart

    checked: CodecsPart = this


class ScaledAttentionSpec(NamedTuple):
    """Keys and values of one size, divided by scales; memory as ``FullAttentionSpec``."""

    unscaled: FullAttentionSpec  # the spec of such a layer with pages of the model's dtype
    scales: PageScales  # on the device, at addresses that graphs may rely on
    dtype: torch.dtype  # one of the ops' ``SCALED_DTYPES``

    def shape(self, pages: int) -> tuple[int, ...]:
        return self.unscaled.shape(pages)

    @property
    def page_size(self) -> int:
        return self.unscaled.page_size

    def planned(self, geometry: Geometry) -> Geometry:
        return self.unscaled.planned(geometry)._replace(kv_dtype=self.dtype)

    def write(self, memory: Tensor, places: TokenPlaces, keys: Tensor, values: Tensor) -> None:
        both = places.taken(torch.stack([keys, values]))
        written = divided(both, self.dtype, *self.scales)
        as_bytes(memory)[places.pages, :, :, places.slots, : self.unscaled.head_dim] = as_bytes(written)

    def read(self, memory: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        stored = self.unscaled.read(as_bytes(memory), pages, length)
        of_heads = zip(stored, self.scales[:2], strict=True)
        keys, values = (scaled(states.view(self.dtype), scale).to(self.unscaled.dtype) for states, scale in of_heads)
        return keys, values


CODECS: Sequence[tuple[str | None, Codec]] = [
    ("fp8_e4m3", Codec(FP8, FP8_LARGEST, FP8_CAPABILITY, ScaledAttentionSpec))
]
