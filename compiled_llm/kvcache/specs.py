"""KV specs: what a layer keeps of each token, how that lies in pages, and how it is written, read and attended over.

Nothing else knows how a layer's memory is laid out: the pool counts pages, a page table names them.

Shapes: P pages, K kv heads, S page size, D head dimension as stored, B rows, C columns, L tokens of one row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from compiled_llm.kvcache.memory import mark_static
from compiled_llm.kvcache.releasable_memory import ReleasableMemory
from compiled_llm.model.attention import (
    AttentionSpec,
    LayerSpec,
    NewestTokens,
    Options,
    PackedTokens,
    PageScales,
    States,
)
from compiled_llm.model.layer_probe import Layer
from compiled_llm_ops import Geometry
from compiled_llm_ops.contracts import FP8
from compiled_llm_ops.plain_attention import as_bytes, as_fp8, scaled
from compiled_llm_ops.protocol import Backend


class TokenPlaces(NamedTuple):
    """Where tokens that were computed elsewhere go, and where they come from; each ``[N]`` int64 on the device.

    Attributes:
        width: C.
        pages: page numbers.
        slots: places in those pages.
        rows: rows of the given states.
        columns: their columns, of the last C.
    """

    width: int
    pages: Tensor
    slots: Tensor
    rows: Tensor
    columns: Tensor


class KVCacheSpec(LayerSpec, Protocol):
    """One layer's part of the KV cache: what it keeps. Its memory is one tensor, whose first dimension are the pages.

    That of a layer that attends is a ``PagedAttentionSpec``.
    """

    def shape(self, pages: int) -> tuple[int, ...]:
        """Return the shape of a memory of ``pages`` pages."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of the memory."""
        ...

    def planned(self, geometry: Geometry) -> Geometry | None:
        """Return a layer's geometry with the head sizes that its pages have; None if it attends without a plan."""
        ...

    def write(self, memory: Tensor, places: TokenPlaces, keys: Tensor, values: Tensor) -> None:
        """Write keys and values of HuggingFace's caches, ``[B, K, C', D]``, whose last column is the last of C.

        Zeros are written for columns that they lack.
        """
        ...

    def read(self, memory: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values ``[K, L, D]`` of the ``length`` tokens in ``pages`` ``[N]``."""
        ...


class PagedAttentionSpec(KVCacheSpec, AttentionSpec, Protocol):
    """The KV cache of a layer with attention: its pages, and the ops that write and read them."""


class FullAttentionSpec(NamedTuple):
    """Keys and values of one size, ``[P, 2, K, S, D]``; all tokens are kept, with a window, too.

    Attributes:
        kv_heads: K.
        head_dim: of the model.
        stored_head_dim: D; the part that the model does not need stays zero.
        page_size: S.
        dtype: of the model.
    """

    kv_heads: int
    head_dim: int
    stored_head_dim: int
    page_size: int
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def shape(self, pages: int) -> tuple[int, ...]:
        return pages, 2, self.kv_heads, self.page_size, self.stored_head_dim

    def planned(self, geometry: Geometry) -> Geometry:
        return geometry._replace(head_dim=self.stored_head_dim)

    def attend(
        self,
        rows: PackedTokens | NewestTokens,
        layer: int,
        states: States,
        memory: Tensor,
        options: Options,
        wants_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        return rows.attend(layer, states, memory, options, wants_lse)

    def write(self, memory: Tensor, places: TokenPlaces, keys: Tensor, values: Tensor) -> None:
        both = _columns(torch.stack([keys, values]), places.width)
        memory[places.pages, :, :, places.slots, : self.head_dim] = both[:, places.rows, :, places.columns]

    def read(self, memory: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        both = memory.index_select(0, pages).permute(1, 2, 0, 3, 4).flatten(2, 3)
        keys, values = both[:, :, :length, : self.head_dim]
        return keys, values


class Fp8AttentionSpec(NamedTuple):
    """Keys and values of one size in fp8, each divided by the scale of its kv head; memory as ``FullAttentionSpec``.

    Attributes:
        unscaled: the spec of such a layer with pages of the model's dtype.
        scales: on the device, at addresses that graphs may rely on.
    """

    unscaled: FullAttentionSpec
    scales: PageScales

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in self.scales if tensor is not None)

    def shape(self, pages: int) -> tuple[int, ...]:
        return self.unscaled.shape(pages)

    @property
    def page_size(self) -> int:
        return self.unscaled.page_size

    @property
    def dtype(self) -> torch.dtype:
        return FP8

    def planned(self, geometry: Geometry) -> Geometry:
        return self.unscaled.planned(geometry)._replace(kv_dtype=FP8)

    def attend(
        self,
        rows: PackedTokens | NewestTokens,
        layer: int,
        states: States,
        memory: Tensor,
        options: Options,
        wants_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        return rows.attend(layer, states, memory, options, wants_lse, self.scales)

    def write(self, memory: Tensor, places: TokenPlaces, keys: Tensor, values: Tensor) -> None:
        both = _columns(torch.stack([keys, values]), places.width)[:, places.rows, :, places.columns]
        written = as_fp8(both, *self.scales)
        as_bytes(memory)[places.pages, :, :, places.slots, : self.unscaled.head_dim] = as_bytes(written)

    def read(self, memory: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        stored = self.unscaled.read(as_bytes(memory), pages, length)
        of_heads = zip(stored, self.scales[:2], strict=True)
        keys, values = (scaled(states.view(FP8), scale).to(self.unscaled.dtype) for states, scale in of_heads)
        return keys, values


class UnevenAttentionSpec(NamedTuple):
    """Values of another size than the keys, ``[P, K, S, D + E]``: each key is followed by its value.

    Attributes:
        kv_heads: K.
        head_dim: D, of keys.
        value_head_dim: E.
        page_size: S.
        dtype: of the model.
    """

    kv_heads: int
    head_dim: int
    value_head_dim: int
    page_size: int
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def shape(self, pages: int) -> tuple[int, ...]:
        return pages, self.kv_heads, self.page_size, self.head_dim + self.value_head_dim

    def planned(self, geometry: Geometry) -> Geometry:
        return geometry

    def attend(
        self,
        rows: PackedTokens | NewestTokens,
        layer: int,
        states: States,
        memory: Tensor,
        options: Options,
        wants_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        return rows.attend(layer, states, memory, options, wants_lse)

    def write(self, memory: Tensor, places: TokenPlaces, keys: Tensor, values: Tensor) -> None:
        both = _columns(torch.cat([keys, values], dim=-1), places.width)
        memory[places.pages, :, places.slots] = both[places.rows, :, places.columns]

    def read(self, memory: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        both = memory.index_select(0, pages).transpose(0, 1).flatten(1, 2)[:, :length]
        keys, values = both.split([self.head_dim, self.value_head_dim], dim=-1)
        return keys, values


class LatentAttentionSpec(NamedTuple):
    """Latents, each followed by its rotated part, ``[P, S, R + E]``: one for all heads, as in HuggingFace's cache.

    Attributes:
        rank: R, of latents; keys of HuggingFace's caches.
        rope_size: E, of rotated parts; values of HuggingFace's caches.
        page_size: S.
        dtype: of the model.
        planned_by_backend: whether a backend's plan attends; else ops of our own that need none.
    """

    rank: int
    rope_size: int
    page_size: int
    dtype: torch.dtype
    planned_by_backend: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def shape(self, pages: int) -> tuple[int, ...]:
        return pages, self.page_size, self.rank + self.rope_size

    def planned(self, geometry: Geometry) -> Geometry | None:
        return geometry._replace(rope_size=self.rope_size) if self.planned_by_backend else None

    def attend(
        self,
        rows: PackedTokens | NewestTokens,
        layer: int,
        states: States,
        memory: Tensor,
        options: Options,
        wants_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        scale, _, _ = options  # a window or a cap was refused
        return rows.attend_to_latents(layer, states, memory, scale, wants_lse)

    def write(self, memory: Tensor, places: TokenPlaces, keys: Tensor, values: Tensor) -> None:
        both = _columns(torch.cat([keys, values], dim=-1), places.width)
        memory[places.pages, places.slots] = both[places.rows, 0, places.columns]

    def read(self, memory: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        both = memory.index_select(0, pages).flatten(0, 1)[None, :length]
        latents, rotated = both.split([self.rank, self.rope_size], dim=-1)
        return latents, rotated


class IndexKeysSpec(NamedTuple):
    """Keys by which a layer's indexer chooses what is read, ``[P, S, I]``; HuggingFace's caches hold them beside.

    The layer's attention writes and reads them.

    Attributes:
        size: I.
        page_size: S.
        dtype: of the model.
        layer: whose indexer it is.
    """

    size: int
    page_size: int
    dtype: torch.dtype
    layer: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def shape(self, pages: int) -> tuple[int, ...]:
        return pages, self.page_size, self.size

    def planned(self, geometry: Geometry) -> Geometry | None:
        return None

    def write(self, memory: Tensor, places: TokenPlaces, keys: Tensor, values: Tensor) -> None:
        memory[places.pages, places.slots] = _columns(keys, places.width)[places.rows, 0, places.columns]

    def read(self, memory: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        keys = memory.index_select(0, pages).flatten(0, 1)[None, :length]
        return keys, keys[..., :0]


class NoKeysSpec(NamedTuple):
    """Nothing of any token: a layer without attention.

    Attributes:
        page_size: S.
        dtype: of the model.
    """

    page_size: int
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def shape(self, pages: int) -> tuple[int, ...]:
        return pages, 0

    def planned(self, geometry: Geometry) -> Geometry | None:
        return None

    def write(self, memory: Tensor, places: TokenPlaces, keys: Tensor, values: Tensor) -> None: ...

    def read(self, memory: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        nothing = memory.new_zeros((0, length, 0))
        return nothing, nothing


def _columns(states: Tensor, width: int) -> Tensor:
    """Return the last ``width`` columns of ``[..., C', D]``, with zeros before them if there are fewer."""
    states = states[..., -width:, :]
    return torch.nn.functional.pad(states, (0, 0, width - states.shape[-2], 0))


def kv_cache_specs(
    layers: Sequence[Layer],
    page_size: int,
    dtype: torch.dtype,
    backend: Backend,
    scales: Sequence[PageScales] = (),
    plans_decode: bool = False,
) -> tuple[KVCacheSpec, ...]:
    """Return each layer's spec, and then those of the index keys of layers with an indexer (``index_places``).

    Args:
        layers: of the model.
        page_size: S.
        dtype: of the model.
        backend: attends, and says which head sizes pages must have.
        scales: of each layer, if pages are of fp8; all layers can be then. Empty if they are of the model's dtype.
        plans_decode: whether it plans decode steps; it then attends to latents, too.
    """
    specs: list[KVCacheSpec] = [_spec_of(layer, page_size, dtype, backend, plans_decode) for layer in layers]
    if scales:
        specs = [_in_fp8(spec, own) for spec, own in zip(specs, scales, strict=True)]
    indexers = [(number, layer.index_size) for number, layer in enumerate(layers) if layer.index_size is not None]
    return *specs, *(IndexKeysSpec(size, page_size, dtype, number) for number, size in indexers)


def _spec_of(layer: Layer, page_size: int, dtype: torch.dtype, backend: Backend, plans_decode: bool) -> KVCacheSpec:
    if not layer.attends:
        return NoKeysSpec(page_size, dtype)
    return _attention_spec(layer, page_size, dtype, backend, plans_decode)


def _attention_spec(
    layer: Layer, page_size: int, dtype: torch.dtype, backend: Backend, plans_decode: bool
) -> PagedAttentionSpec:
    if layer.expansion is not None:
        assert layer.value_head_dim is not None, "latents have a rotated part"
        sizes = layer.head_dim, layer.value_head_dim, page_size
        by_plan = plans_decode and not layer.chooses  # no plan knows what an indexer will choose
        return LatentAttentionSpec(*sizes, dtype, planned_by_backend=by_plan)
    if layer.value_head_dim is not None:
        return UnevenAttentionSpec(layer.kv_heads, layer.head_dim, layer.value_head_dim, page_size, dtype)
    stored = backend.stored_head_dim(layer.head_dim)
    return FullAttentionSpec(layer.kv_heads, layer.head_dim, stored, page_size, dtype)


def _in_fp8(spec: KVCacheSpec, scales: PageScales) -> KVCacheSpec:
    if isinstance(spec, NoKeysSpec):
        return spec
    assert isinstance(spec, FullAttentionSpec), "wrap has refused other layers"
    return Fp8AttentionSpec(spec, scales)


def page_size_bytes(spec: KVCacheSpec) -> int:
    """Return the bytes of a page in a layer."""
    return math.prod(spec.shape(1)) * spec.dtype.itemsize


def token_numbers(spec: KVCacheSpec) -> int:
    """Return how many numbers a token takes in a layer."""
    return math.prod(spec.shape(1)) // spec.page_size


def token_bytes(spec: KVCacheSpec) -> int:
    """Return the bytes that a token takes in a layer."""
    return page_size_bytes(spec) // spec.page_size


def page_bytes(specs: Sequence[KVCacheSpec]) -> int:
    """Return what one page takes over all layers, in bytes."""
    return sum(map(page_size_bytes, specs))


def allocate_pages(specs: Sequence[KVCacheSpec], pages: int, memory: ReleasableMemory) -> list[Tensor]:
    """Return each layer's memory, zeros at addresses that graphs may rely on.

    On a CPU the operating system backs memory with pages only once it is written, so a large pool costs what is used.
    """
    memories = [memory.zeros(spec.shape(pages), spec.dtype) for spec in specs]
    for tensor in memories:
        mark_static(tensor)
        # P depends on what memory is free; built into the code, it would make every start a cold one.
        torch._dynamo.mark_dynamic(tensor, 0)
    return memories
