"""Indexers of sparse attention: layers that keep a further key of each token, by which they choose what to read."""

# They choose single tokens (DSA, in DeepSeek-V3.2), or blocks of them for each kv head (MiniMax-M3).
# Choosing is HuggingFace's code: its indexer hands the keys of new tokens to the cache, scores all of a row's keys
# under a causal mask, and takes the best. Here the cache is pages, a memory of their own for each layer with an
# indexer, and what it returns has a width that follows from no length: with packed tokens all pages of the table, else
# as many as a row may have. The mask shows each query the keys of its own row alone. Indexers of blocks count keys from
# the row's first one, and take no mask; so packed tokens are those of one row, and of null tokens.
# Shapes: B rows, T packed tokens, q new tokens of each row in decode, I size of an index key, N page numbers, S page
# size, L keys that are scored, n tokens or blocks that are chosen, K kv heads.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from compiled_llm.compat.huggingface import index_keys, indexed_layers
from compiled_llm.kinds.kind import KindOver, Layer, ScoreSizes, Trial, places_beside
from compiled_llm.kinds.rows import NewestTokens, PagedRows
from compiled_llm_ops import Geometry, append_latent
from compiled_llm_ops.backends import ChosenBackend

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def scored_pages(pages: int, page_size: int, block_size: int, padding: int) -> int:
    """Return how many pages are scored where rows have ``pages``, and an indexer takes ``padding`` tokens at least."""
    # Null pages fill up the last block, and follow. One quotient, not a sum of two: Inductor takes products of a sum
    # for other sizes than the same multiplied out (its analysis of tilings in torch 2.11 asserts that their hints are
    # equal).
    block = max(1, block_size // page_size)
    null = -(-padding // (block * page_size)) * block
    return (pages + null + block - 1) // block * block


class IndexScores(NamedTuple):
    """The memory that choosing takes in a layer: most are scores of each query, index head and key, in float32."""

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
        """Return the bytes of ``queries`` that are scored with ``keys`` each; each row has keys of its own."""
        # Scores of all heads exist twice at a time, those that are summed over heads twice, and masks. Keys are
        # gathered from their pages, and copied to float32; where blocks are chosen, for each head.
        a_score = 8 * self.heads + 12
        a_key = self.size * (self.dtype.itemsize + 4 + (4 * self.heads if self.block_size > 1 else 0))
        return keys * (queries * a_score + rows * a_key)


class IndexedRows(NamedTuple):
    """The places where the index keys of a batch lie."""

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

    @classmethod
    def of(cls, rows: PagedRows, page_size: int, row_pages: int, padding: int, block_size: int = 1) -> IndexedRows:
        """Return where the index keys of ``rows`` lie; each may have ``row_pages``."""
        if isinstance(rows, NewestTokens):
            return cls(*rows.places, page_size, row_pages, padding, block_size)
        if not rows.new_tokens:
            return cls(*rows.places, page_size, 0, padding, block_size)
        places = (rows.token_rows, rows.token_positions, rows.indptr[:-1], rows.indices)
        return cls(*places, page_size, row_pages, padding, block_size)

    def extended(self, keys: Tensor, memory: Tensor) -> Tensor:
        """Write keys ``[1, T, I]`` or ``[B, q, I]`` to pages ``[P, S, I]``; return ``[1, L, I]`` or ``[B, L, I]``."""
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
        own = place - self.first[:, None]
        seen = (own >= 0) & (own <= self.token_positions[:, None]) & (place < slots)
        rows = self.starts.shape[0] if self.row_pages else 1
        return seen.view(rows, 1, -1, width)

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
    def first(self) -> Tensor:
        """Where each token's row begins among the keys."""
        if self.row_pages:
            return torch.zeros_like(self.token_rows)
        return self.starts[self.token_rows] * self.page_size


@dataclass(frozen=True)
class Indexed(KindOver):
    """A kind whose queries read what an indexer chooses, of this layer or one before."""

    own_cache_layers = True
    index_size: int | None = None  # I; None if the layer has no indexer of its own

    def is_cached_in(self, layer: object) -> bool:
        return isinstance(layer, indexed_layers())

    def is_whole_in(self, layer: CacheLayerMixin) -> bool:
        if type(layer) not in indexed_layers():
            return False
        if self.index_size is None or layer.keys is None or not layer.keys.numel():
            return True
        kept = index_keys(layer)
        return kept is not None and kept.shape[1] == layer.keys.shape[2]

    def missing_kernel(self, chosen: ChosenBackend, layer: Layer, geometry: Geometry, device: str) -> str | None:
        if device == "cuda" and not chosen.decodes_by_our_own:
            return "no plan knows what an indexer chooses"
        return super().missing_kernel(chosen, layer, geometry, device)

    @property
    def beside(self) -> int | None:
        return self.index_size

    def scores(self, config: PretrainedConfig, dtype: torch.dtype) -> ScoreSizes | None:
        if self.index_size is None:
            return None
        return IndexScores(config.index_n_heads, self.chosen(config), self.index_size, dtype, self.together)

    @property
    def together(self) -> int:
        """How many tokens are chosen together."""
        return 1

    def chosen(self, config: PretrainedConfig) -> int:
        """Return how many tokens an indexer chooses for a query, by the text config."""
        return int(config.index_topk)

    @classmethod
    def layers_of(cls, layers: Sequence[Layer]) -> dict[int, Indexed]:
        return {number: layer.kind for number, layer in enumerate(layers) if isinstance(layer.kind, cls)}

    @classmethod
    def rows_of(
        cls, model: PreTrainedModel, batch: Any, layers: Sequence[Layer]
    ) -> tuple[IndexedRows, dict[int, Tensor]]:
        """Return where the index keys of a ``PagedBatch`` lie, and the pages of each layer that has some."""
        pages = {number: batch.pages[place] for number, place in places_beside(layers).items()}
        config = model.config.get_text_config(decoder=True)
        kind = next(iter(cls.layers_of(layers).values()))
        total, size, _ = next(iter(pages.values())).shape
        positions = getattr(config, "max_position_embeddings", 2**17)
        most = cast(int, torch.sym_min(-(-positions // size), total))
        return IndexedRows.of(batch.rows, size, most, kind.chosen(config), kind.together), pages


def with_index_sizes(
    model: PreTrainedModel, trial: Trial, layers: Sequence[Layer], kinds: Mapping[int, Indexed]
) -> list[Layer]:
    """Return the layers, some of ``kinds``, with the sizes of the index keys that HuggingFace's cache then has."""
    cache, found = DynamicCache(config=model.config), [*layers]
    trial(cache)
    for number, kind in kinds.items():
        keys = index_keys(cache.layers[number])
        size = None if keys is None else keys.shape[-1]
        found[number] = layers[number]._replace(kind=replace(kind, index_size=size))
    return found
