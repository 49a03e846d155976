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


def last_columns(states: Tensor, width: int) -> Tensor:
    """Return the last ``width`` columns of ``[..., C', D]``, with zeros before them if there are fewer."""
    states = states[..., -width:, :]
    return torch.nn.functional.pad(states, (0, 0, width - states.shape[-2], 0))


class VectorSpec(NamedTuple):
    """One vector of each token, ``[P, S, I]``: keys of one head; of no size if nothing is kept."""

    size: int  # I
    page_size: int  # S
    dtype: torch.dtype  # of the model

    @property
    def scales(self) -> PageScales:
        return UNSCALED

    def shape(self, pages: int) -> tuple[int, ...]:
        return pages, self.page_size, self.size

    def planned(self, geometry: Geometry) -> None:
        return None

    def write(self, memory: Tensor, places: TokenPlaces, keys: Tensor, values: Tensor) -> None:
        memory[places.pages, places.slots] = last_columns(keys, places.width)[places.rows, 0, places.columns]

    def read(self, memory: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        keys = memory.index_select(0, pages).flatten(0, 1)[None, :length]
        return keys, keys[..., :0]
