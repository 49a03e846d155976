"""Signatures of the ops, as those of ``compiled_llm_ops.contracts``, and constants shared with their kernels."""

# Shapes: B rows.

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class StridedAttention(NamedTuple):
    query: Tensor
    keys: Tensor
    values: Tensor
    out: Tensor
    lse: Tensor | None
    qo_indptr: Tensor | None
    indptr: Tensor | None
    indices: Tensor | None
    last_page_len: Tensor | None
    scale: float
    causal: bool = False
    window_left: int = -1
    logits_soft_cap: float = 0.0
    value_scale: float = 1.0
    logit_factors: Tensor | None = None
    value_factors: Tensor | None = None
    mask: Tensor | None = None
    mask_indptr: Tensor | None = None
    slopes: Tensor | None = None
    rope_scale: float = 0.0
    rope_theta: float = 0.0
    one_order: bool = False

    @property
    def rows(self) -> int:
        """B."""
        return 1 if self.indptr is None else self.indptr.shape[0] - 1


class StridedLatentAttention(NamedTuple):
    query_latent: Tensor
    query_rope: Tensor
    latents: Tensor
    ropes: Tensor
    out: Tensor
    lse: Tensor | None
    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    lengths: Tensor
    scale: float
    causal: bool = False

    @property
    def rows(self) -> int:
        """B."""
        return self.lengths.shape[0]


class StridedAppend(NamedTuple):
    key: Tensor
    value: Tensor
    keys: Tensor
    values: Tensor
    token_rows: Tensor
    token_positions: Tensor
    indptr: Tensor
    indices: Tensor


def check_columns(op: str, args: StridedAttention | StridedLatentAttention, sizes: dict[str, int | None]) -> None:
    """Raise ValueError unless each column that is given has one axis of its size, if it has one, and is of integers."""
    for name, size in sizes.items():
        column = getattr(args, name)
        if column is None:
            continue
        if column.dim() != 1 or (size is not None and column.shape[0] != size):
            raise ValueError(
                f"{op}: {name} must be [{'N' if size is None else size}] for {args.rows} rows; got "
                f"{tuple(column.shape)}"
            )
        if column.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{op}: {name} must be int32 or int64; got {column.dtype}")


class SparseItem(NamedTuple):
    """A work item of block-sparse attention: some queries of a row of blocks, with all of its keys or a share."""

    kv_head: int  # of an item of ``variable_block_sparse_attention``; 0 where all kv heads read the same
    first_query: int  # the first of its queries
    queries: int  # how many they are; 0 if there is no item
    first_piece: int  # where its keys begin in the lists of the op
    pieces: int  # how many entries they are; 0 for queries that see no key
    first_part: int  # the first of the partial results of these queries
    part: int  # the item's own, counted from there
    parts: int  # how many they are; 1 if there is nothing to merge


SPARSE_PIECE = 64  # keys of a piece of ``variable_block_sparse_attention``, at most


class BlockSparseAttention(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    indptr: Tensor
    indices: Tensor
    work_items: Tensor
    block_rows: int
    block_columns: int
    max_parts: int
    scale: float
    logits_soft_cap: float = 0.0
    mask: Tensor | None = None


class VariableBlockSparseAttention(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    block_mask_map: Tensor
    block_row_sz: Tensor
    block_col_sz: Tensor
    work_items: Tensor
    pieces: Tensor
    max_parts: int
    scale: float
    logits_soft_cap: float = 0.0
