"""Layers that keep keys and values, and read blocks of tokens that an indexer chooses for each kv head (MiniMax-M3)."""

# Shapes as in ``kinds/indexers/index_keys.py``.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.kinds.full import append, attend
from compiled_llm.kinds.indexers.index_keys import Indexed, IndexedRows, with_index_sizes
from compiled_llm.kinds.kind import Attended, AttentionCall, ForwardCache, Layer, LayerKind, SeenCall, Trial
from compiled_llm.kinds.refusals import UnsupportedModelError
from compiled_llm.kinds.rows import NewestTokens, PackedTokens, Rows
from compiled_llm.kinds.spec import PageScales
from compiled_llm_ops.protocol import own_decode_ops

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_OPS = own_decode_ops()


class BlockChoices:
    """A stand-in for HuggingFace's cache in a forward whose layers keep keys and values, and some index keys."""

    # Layers with an indexer have pages ``[P, S, I]``.

    def __init__(self, rows: IndexedRows, layers: int, index_pages: Mapping[int, Tensor]) -> None:
        self.rows = rows
        self.layers = [_KeptIndex(rows, index_pages.get(layer)) for layer in range(layers)]

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of new tokens, which attention writes into pages."""
        return keys, values


class _KeptIndex:
    def __init__(self, rows: IndexedRows, pages: Tensor | None) -> None:
        self._rows, self._pages = rows, pages

    def update_index(self, keys: Tensor) -> Tensor:
        """Take ``[B, 1, q, I]`` of new tokens; return ``[B, 1, L, I]``, or for packed ones ``[1, 1, L, I]``."""
        assert self._pages is not None, "only layers with indexers call it"
        return self._rows.extended(keys[:, 0], self._pages)[:, None]


@dataclass(frozen=True)
class Blocks(Indexed):
    """Attention in which each query reads blocks of tokens that an indexer has chosen for each kv head."""

    name = "blocks"
    block_size: int = 1  # tokens of a block

    @classmethod
    def of(cls, seen: SeenCall, kind: LayerKind) -> LayerKind:
        blocks = seen.arguments.get("block_indices")
        if blocks is None:
            return kind
        config: Any = seen.module.config
        if blocks.shape[1] != seen.key.shape[1] or config.index_local_blocks < 1:
            raise UnsupportedModelError(
                f"{type(seen.module).__name__} chooses {blocks.shape[1]} lists of blocks for {seen.key.shape[1]} kv "
                f"heads, with index_local_blocks={config.index_local_blocks}; there must be a list for each kv head, "
                "with the block of the query's own token"
            )
        return cls(kind, block_size=int(config.index_block_size))

    @classmethod
    def compared(cls, model: PreTrainedModel, trial: Trial, layers: Sequence[Layer]) -> Sequence[Layer]:
        kinds = cls.layers_of(layers)
        found = with_index_sizes(model, trial, layers, kinds) if kinds else layers
        for number, kind in cls.layers_of(found).items():
            if kind.index_size is None:
                raise UnsupportedModelError(
                    f"{type(model).__name__}: attention layer {number} reads blocks of tokens, and HuggingFace's "
                    "cache keeps no keys by which they are chosen; it stays usable unwrapped"
                )
        return found

    @classmethod
    def forward_cache(cls, layers: Sequence[Layer]) -> Callable[[PreTrainedModel, Any], ForwardCache] | None:
        if not cls.layers_of(layers):
            return None

        def made(model: PreTrainedModel, batch: object) -> ForwardCache:
            rows, pages = cls.rows_of(model, batch, layers)
            # Without a mask one would be made by the lengths of this cache.
            return ForwardCache(BlockChoices(rows, len(layers), pages), {"attention_mask": {"full_attention": None}})

        return made

    @property
    def arguments(self) -> frozenset[str]:
        return self.memory.arguments | {"block_indices"}

    @property
    def together(self) -> int:
        return self.block_size

    def chosen(self, config: PretrainedConfig) -> int:
        return int(config.index_topk_blocks) * self.block_size

    def attend(self, rows: Rows, call: AttentionCall, pages: Tensor, scales: PageScales) -> Attended:
        blocks = call.arguments.get("block_indices")
        visible = None if blocks is None else visible_pages(blocks, call.cache.rows)
        if visible is not None and isinstance(rows, PackedTokens):
            append(rows, call, pages, scales)
            # Each token attends as the newest one of a row, to be written again.
            starts, lengths = rows.indptr[rows.token_rows], rows.token_positions + 1
            rows, scales = NewestTokens(starts, lengths, rows.indices, _OPS), scales._replace(saturated=None)
        return attend(rows, call, pages, scales, visible)


def visible_pages(blocks: Tensor, rows: IndexedRows) -> Tensor:
    """Return ``[T, K, m]`` int32, pages of each token's row, of blocks ``[1, K, T, n]`` or ``[B, K, q, n]``."""
    # Both have -1 for none. Some pages may be ones that the row does not have.
    of_block = torch.arange(rows.block_size // rows.page_size, dtype=torch.int32, device=blocks.device)
    chosen = blocks.transpose(1, 2).flatten(0, 1).int()[..., None]
    return torch.where(chosen < 0, chosen, chosen * len(of_block) + of_block).flatten(2)
