"""Indexers of sparse attention: layers that keep a further key of each token, by which they choose what to read.

They choose single tokens (DSA, in DeepSeek-V3.2), or blocks of them for each kv head (MiniMax-M3).

Choosing is HuggingFace's code: its indexer hands the keys of new tokens to the cache, scores all of a row's keys under
a causal mask, and takes the best. Here the cache is pages, a memory of their own for each layer with an indexer, and
what it returns has a width that follows from no length: with packed tokens all pages of the table, else as many as a
row may have. The mask shows each query the keys of its own row alone. Indexers of blocks count keys from the row's
first one, and take no mask; so packed tokens are those of one row, and of null tokens.

Shapes: B rows, T packed tokens, q new tokens of each row in decode, I size of an index key, N page numbers, S page
size, L keys that are scored, n tokens or blocks that are chosen, K kv heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compiled_llm.model.refusals import UnsupportedModelError
from compiled_llm_ops import append_latent

INDEXED = "indexed_attention"
"""HuggingFace's type of a layer that takes a causal mask, for an indexer, and caches index keys."""


INDEXED_BEFORE = ("deepseek_sparse_attention", "qwen_sparse_attention")
"""The same type before transformers 5.18, where such layers cache expanded keys and values instead of latents."""


def scored_pages(pages: int, page_size: int, block_size: int, padding: int) -> int:
    """Return how many pages are scored where rows have ``pages``, and an indexer takes ``padding`` tokens at least.

    Null pages fill up the last block, and follow.

    One quotient, not a sum of two: Inductor takes products of a sum for other sizes than the same multiplied out (its
    analysis of tilings in torch 2.11 asserts that their hints are equal).
    """
    block = max(1, block_size // page_size)
    null = -(-padding // (block * page_size)) * block
    return (pages + null + block - 1) // block * block


def takes_masks(model: nn.Module) -> bool:
    """Whether a model's layers have indexers, which read a causal mask that attention functions need not have."""
    return INDEXED in _layer_types(model)


def check_latents_are_cached(model: nn.Module) -> None:
    """Raise UnsupportedModelError if this version of transformers hands expanded keys and values to the cache."""
    if before := set(INDEXED_BEFORE).intersection(_layer_types(model)):
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers of the type {before.pop()!r}, whose keys and values transformers "
            "caches expanded before 5.18, and pages hold latents: install transformers 5.18 or later"
        )


def _layer_types(model: nn.Module) -> Sequence[str]:
    config: Any = model.config
    return getattr(config.get_text_config(decoder=True), "layer_types", None) or ()


def causal_mask(tokens: int, device: torch.device) -> Tensor:
    """Return ``[1, 1, T, T]`` bool for one row without a cache."""
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()[None, None]


class IndexScores(NamedTuple):
    """How much memory choosing takes in a layer: most are scores of each query, index head and key, in float32."""

    heads: int  # of the indexer
    chosen: int  # how many tokens it chooses for a query
    size: int  # I
    dtype: torch.dtype  # of the model
    block_size: int = 1  # tokens that it chooses together; 1 for single ones

    @property
    def of_one_row(self) -> bool:
        """Whether packed tokens must be those of one row."""
        return self.block_size > 1

    def keys(self, pages: int, page_size: int) -> int:
        """Return L where rows have so many pages."""
        return scored_pages(pages, page_size, self.block_size, self.chosen) * page_size

    def nbytes(self, queries: int, keys: int, rows: int = 1) -> int:
        """Return the bytes of ``queries`` that are scored with ``keys`` each; each row has keys of its own.

        Scores of all heads exist twice at a time, those that are summed over heads twice, and masks. Keys are gathered
        from their pages, and copied to float32; where blocks are chosen, for each head.
        """
        a_score = 8 * self.heads + 12
        a_key = self.size * (self.dtype.itemsize + 4 + (4 * self.heads if self.block_size > 1 else 0))
        return keys * (queries * a_score + rows * a_key)


class IndexedRows(NamedTuple):
    """Where the index keys of a batch lie."""

    token_rows: Tensor  # ``[T]`` int32, the row of each new token
    token_positions: Tensor  # ``[T]`` int32, its index in its row
    starts: Tensor  # ``[B]`` or ``[B + 1]`` int32, where each row's pages begin in ``indices``
    indices: Tensor  # ``[N]`` int32, page numbers
    page_size: int  # S
    # pages that each of B rows may have, for ``[B, q]`` new tokens; 0 for packed tokens, which all score the keys of
    # all rows
    row_pages: int
    # at least so many keys follow all others, of null pages, that no query may see. An indexer chooses as many for each
    # query, and takes these where a row has fewer tokens
    padding: int
    block_size: int = 1  # keys are a multiple of so many tokens, which an indexer chooses together; 1 for single ones

    def extended(self, keys: Tensor, memory: Tensor) -> Tensor:
        """Write the keys ``[1, T, I]`` or ``[B, q, I]`` of new tokens to pages ``[P, S, I]``.

        Returns ``[1, L, I]`` or ``[B, L, I]``.
        """
        flat, half = keys.flatten(0, 1).to(memory.dtype), keys.shape[2] // 2
        places = (self.token_rows, self.token_positions, self.starts, self.indices)
        append_latent(flat[:, :half], flat[:, half:], memory, *places)
        numbers = self.indices[None]
        if self.row_pages:
            entries = self.starts[:, None] + torch.arange(self.row_pages, dtype=torch.int32, device=keys.device)
            numbers = self.indices[entries.clamp(max=self.indices.shape[0] - 1)]
        return memory[torch.nn.functional.pad(numbers, (0, self._null_pages))].flatten(1, 2)

    def mask(self) -> Tensor:
        """Return ``[1, 1, T, L]`` or ``[B, 1, q, L]`` bool: which keys each query may choose."""
        slots, width = self._pages * self.page_size, self.keys
        place = torch.arange(width, dtype=torch.int32, device=self.starts.device)
        own = place - self._first[:, None]
        seen = (own >= 0) & (own <= self.token_positions[:, None]) & (place < slots)
        rows = self.starts.shape[0] if self.row_pages else 1
        return seen.view(rows, 1, -1, width)

    def chosen(self, indices: Tensor) -> Tensor:
        """Return ``[T, n]`` int32, positions in each token's row, of places ``[1, T, n]`` or ``[B, q, n]`` among keys.

        Places that the mask hides become positions that the row does not have, or that come after the token.
        """
        return indices.flatten(0, 1) - self._first[:, None]

    def visible(self, blocks: Tensor) -> Tensor:
        """Return ``[T, K, m]`` int32, pages of each token's row, of blocks ``[1, K, T, n]`` or ``[B, K, q, n]``.

        Both have -1 for none. Some pages may be ones that the row does not have.
        """
        of_block = torch.arange(self.block_size // self.page_size, dtype=torch.int32, device=blocks.device)
        chosen = blocks.transpose(1, 2).flatten(0, 1).int()[..., None]
        return torch.where(chosen < 0, chosen, chosen * len(of_block) + of_block).flatten(2)

    @property
    def keys(self) -> int:
        """L."""
        return (self._pages + self._null_pages) * self.page_size

    @property
    def _pages(self) -> int:
        return self.row_pages or self.indices.shape[0]

    @property
    def _null_pages(self) -> int:
        return scored_pages(self._pages, self.page_size, self.block_size, self.padding) - self._pages

    @property
    def _first(self) -> Tensor:
        """Where each token's row begins among the keys."""
        if self.row_pages:
            return torch.zeros_like(self.token_rows)
        return self.starts[self.token_rows] * self.page_size


class BlockChoices:
    """In place of HuggingFace's cache while a forward runs whose layers keep keys and values, and some index keys."""

    def __init__(self, rows: IndexedRows, layers: int, index_pages: Mapping[int, Tensor]) -> None:
        """Make it for a forward; ``index_pages`` are the pages ``[P, S, I]`` of each layer that has an indexer."""
        self.rows = rows  # where these lie
        # take them, one for each layer
        self.layers = [_KeptIndex(rows, index_pages.get(layer)) for layer in range(layers)]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values of new tokens, which attention writes into pages."""
        return keys, values


class _KeptIndex:
    def __init__(self, rows: IndexedRows, pages: Tensor | None) -> None:
        self._rows, self._pages = rows, pages

    def update_index(self, keys: Tensor) -> Tensor:
        """Take ``[B, 1, q, I]`` of new tokens; return ``[B, 1, L, I]``, or for packed ones ``[1, 1, L, I]``."""
        assert self._pages is not None, "only layers with indexers call it"
        return self._rows.extended(keys[:, 0], self._pages)[:, None]
