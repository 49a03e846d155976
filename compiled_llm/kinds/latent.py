"""Multi-head latent attention (MLA): layers that hand latents to HuggingFace's cache, and expand what it returns."""

# Pages hold the latents. New tokens are expanded by the layer itself; rows that have no others attend to those keys and
# values. Of tokens in pages nothing is expanded: one half of the layer's up-projection is multiplied into the queries,
# the other one into the results (DeepSeek-V2, https://arxiv.org/abs/2405.04434, calls that absorbed). Both halves are
# views of the layer's own weight.
# Shapes: B rows, T packed tokens, H query heads, N size of a key's part that is not rotated, E size of the rotated
# part, V size of a value, R latent size.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import compiled_llm_ops as ops
from compiled_llm.kinds.kind import Attended, AttentionCall, Expands, ForwardCache, Layer, LayerKind, Paging, Trial
from compiled_llm.kinds.latent_probe import Expansion, with_latents
from compiled_llm.kinds.rows import NewestTokens, PackedTokens, PagedRows, Rows, UnpagedRows, packed
from compiled_llm.kinds.spec import JoinedSpec, KVCacheSpec, PageScales
from compiled_llm_ops import Geometry
from compiled_llm_ops.backends import INVARIANT, ChosenBackend
from compiled_llm_ops.kernels.latent.latent_tiling import OWN_HEADS, missing_expanded, missing_kernel, worth_expanding

if TYPE_CHECKING:
    from compiled_llm.kinds import latent as this
    from compiled_llm.kinds.registry import KindsPart

    checked: KindsPart = this


class Latents:
    """A stand-in for HuggingFace's cache in a forward: takes each layer's new latents, and hands out no others."""

    def __init__(self) -> None:
        self._new: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, latent: Tensor, rope: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Take ``[B, 1, q, R]`` and ``[B, 1, q, E]`` of a layer's new tokens; the layer may expand these alone."""
        self._new[layer_idx] = latent, rope
        return latent, rope

    def taken(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return what ``update`` was given by a layer."""
        return self._new.pop(layer)


@dataclass(frozen=True)
class Latent(LayerKind):
    """Multi-head latent attention."""

    name = "latent"
    reads_shared_pages = False
    reads_chosen = True
    expansion: Expansion  # how keys and values are made of latents
    rope_size: int  # E

    @classmethod
    def compared(cls, model: PreTrainedModel, trial: Trial, layers: Sequence[Layer]) -> Sequence[Layer]:
        return with_latents(model, trial, layers, cls)

    @classmethod
    def forward_cache(cls, layers: Sequence[Layer]) -> Callable[[PreTrainedModel, Any], ForwardCache] | None:
        kept = [layer.kind for layer in layers if isinstance(layer.kind, cls)]
        return (lambda model, batch: ForwardCache(Latents())) if kept else None

    @property
    def value_head_dim(self) -> int:
        return self.rope_size

    def spec(self, layer: Layer, paging: Paging) -> KVCacheSpec:
        return JoinedSpec(layer.head_dim, self.rope_size, paging.page_size, paging.dtype)

    def has_plan(self, chosen: ChosenBackend) -> bool:
        return chosen.decode_ops is None

    def is_faster_by_plan(self, layer: Layer) -> bool:
        return layer.query_heads > OWN_HEADS

    def missing_kernel(self, chosen: ChosenBackend, layer: Layer, geometry: Geometry, device: str) -> str | None:
        own = missing_kernel(layer.head_dim, self.rope_size, geometry.dtype) if device == "cuda" else None
        if own is not None or device != "cuda" or chosen.decodes_by_our_own or chosen.name == INVARIANT:
            return own
        if "latents" not in chosen.backend.kernels:
            return "it has no kernels for latents (multi-head latent attention)"
        return chosen.backend.missing_kernel(geometry._replace(rope_size=self.rope_size))

    def expands(self, layer: Layer, on_cpu: bool) -> Expands | None:
        missing = None if on_cpu else missing_expanded(self.expansion.key + self.rope_size, self.expansion.value)
        return worth_expanding if missing is None else None

    def attend(self, rows: Rows, call: AttentionCall, pages: Tensor, scales: PageScales) -> Attended:
        assert not isinstance(rows, UnpagedRows)
        latent, rope = (packed(part, rows.new_tokens) for part in call.cache.taken(call.layer))
        if isinstance(rows, PackedTokens) and rows.alone:
            ops.append_latent(latent[:, 0], rope[:, 0], pages, *rows.places)
            arguments = (*call.states, rows.qo_indptr, call.options[0])
            return call.by(ops.ragged_attention, ops.ragged_attention_lse, arguments)
        key, value = self.expansion.halves(call.module)
        call = call._replace(states=(_absorbed(call.states[0], key), latent, rope))
        if isinstance(rows, NewestTokens) and rows.new_tokens == 1:
            out, lse = _of_newest(rows, call, pages)
        else:
            out, lse = _of_packed(rows, call, pages)
        return torch.bmm(out.transpose(0, 1), value.transpose(1, 2)).transpose(0, 1), lse


def _absorbed(query: Tensor, weight: Tensor) -> Tensor:
    """Return ``[T, H, R + E]`` of queries ``[T, H, N + E]``, to be multiplied with latents."""
    plain, rope = query.split([weight.shape[1], query.shape[2] - weight.shape[1]], dim=-1)
    latent = torch.bmm(plain.transpose(0, 1), weight).transpose(0, 1)
    return torch.cat([latent, rope], dim=-1)


def _of_newest(rows: NewestTokens, call: AttentionCall, pages: Tensor) -> Attended:
    query, latent, rope = call.states
    rank, table = latent.shape[2], (rows.starts, rows.lengths, rows.indices)
    new = (query[..., :rank], query[..., rank:], latent[:, 0], rope[:, 0])
    arguments = (*new, pages, *table, call.options[0], False, call.chosen)
    return call.by(ops.latent_decode, ops.latent_decode_lse, arguments)


def _of_packed(rows: PagedRows, call: AttentionCall, pages: Tensor) -> Attended:
    """Attend by the layer's plan, if it has one."""
    query, latent, rope = call.states
    rank, scale = latent.shape[2], call.options[0]
    places = rows.places
    ops.append_latent(latent[:, 0], rope[:, 0], pages, *places)
    parts = (query[..., :rank], query[..., rank:], pages)
    if isinstance(rows, PackedTokens) and (plan := rows.plans.of(call.layer)) is not None:
        assert call.chosen is None, "layers with indexers have no plan"
        planned = (*parts, rows.qo_indptr, *rows.table, *plan, scale)
        return call.by(ops.planned_latent_attention, ops.planned_latent_attention_lse, planned)
    arguments = (*parts, *places, scale, call.chosen)
    return call.by(ops.latent_attention, ops.latent_attention_lse, arguments)


KINDS: Sequence[type[LayerKind]] = (Latent,)
