"""A layer's part of the KV cache: what it keeps of each token, and how that lies in pages, is written and is read."""

# Shapes: P pages, K kv heads, S page size, D head dimension as stored, B rows, C columns, L tokens of one row.

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from compiled_llm_ops import Geometry


class PageScales(NamedTuple):
    """Scales of a layer's pages; None in all places for pages of the model's dtype."""

    key: Tensor | None = None  # ``[K]`` float32, by kv head
    value: Tensor | None = None  # likewise
    saturated: Tensor | None = None  # ``[1]`` int64, how many numbers were clamped


UNSCALED = PageScales()


class TokenPlaces(NamedTuple):
    """Places of tokens that were computed elsewhere, and of where they come from; each ``[N]`` int64 on the device."""

    width: int  # C
    pages: Tensor  # page numbers
    slots: Tensor  # places in those pages
    rows: Tensor  # rows of the given states
    columns: Tensor  # their columns, of the last C
    whole: bool = False  # whether these are all columns of all rows, one row after the other

    def taken(self, states: Tensor) -> Tensor:
        """Return what these tokens have of ``[..., B, K, C', D]``, ``[N, ..., K, D]``; zeros where columns lack."""
        states = states[..., -self.width :, :]
        if missing := self.width - states.shape[-2]:
            states = torch.nn.functional.pad(states, (0, 0, missing, 0))
        if self.whole:  # of one row a view: in each layer a kernel less
            return states.movedim((-4, -2), (0, 1)).flatten(0, 1)
        return states[..., self.rows, :, self.columns, :]


class StateSpec(NamedTuple):
    """A tensor that a layer keeps of each row besides pages, of one size, however long the row is."""

    key: tuple[Any, ...]  # tells it from the layer's others
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class KVCacheSpec(Protocol):
    """One layer's part of the KV cache: its memory is one tensor, whose first dimension are the pages."""

    def shape(self, pages: int) -> tuple[int, ...]: ...

    @property
    def page_size(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of the memory."""
        ...

    @property
    def scales(self) -> PageScales:
        """By which numbers in pages are multiplied; the layer's own tensors besides its memory."""
        ...

    def planned(self, geometry: Geometry) -> Geometry | None:
        """Return a layer's geometry with the sizes that its pages have; None if no plan reads them."""
        ...

    def write(self, memory: Tensor, places: TokenPlaces, keys: Tensor, values: Tensor) -> None:
        """Write ``[B, K, C', D]`` of HuggingFace's caches, zeros where they lack columns, up to the last of C."""
        ...

    def read(self, memory: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values ``[K, L, D]`` of the ``length`` tokens in ``pages`` ``[N]``."""
        ...


class JoinedSpec(NamedTuple):
    """Keys, each followed by its value of another size, ``[P, K, S, D + E]``; ``[P, S, D + E]`` if heads share them."""

    key_size: int  # D
    value_size: int  # E; 0 if there are keys alone
    page_size: int  # S
    dtype: torch.dtype  # of the model
    kv_heads: int | None = None  # K; None if all heads share one

    @property
    def scales(self) -> PageScales:
        return UNSCALED

    def shape(self, pages: int) -> tuple[int, ...]:
        heads = () if self.kv_heads is None else (self.kv_heads,)
        return pages, *heads, self.page_size, self.key_size + self.value_size

    def planned(self, geometry: Geometry) -> Geometry:
        return geometry if self.kv_heads is not None else geometry._replace(rope_size=self.value_size)

    def write(self, memory: Tensor, places: TokenPlaces, keys: Tensor, values: Tensor) -> None:
        both = torch.cat([keys, values], dim=-1)
        self._by_head(memory)[places.pages, :, places.slots] = places.taken(both)

    def read(self, memory: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        both = self._by_head(memory.index_select(0, pages)).transpose(0, 1).flatten(1, 2)[:, :length]
        keys, values = both.split([self.key_size, self.value_size], dim=-1)
        return keys, values

    def _by_head(self, memory: Tensor) -> Tensor:
        return memory[:, None] if self.kv_heads is None else memory
