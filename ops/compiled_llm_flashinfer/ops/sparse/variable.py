"""Attention over blocks of any sizes, which each kv head has of its own."""

# Shapes: M queries, N keys, H query heads, K kv heads, D head dimension, MB rows and NB columns of blocks, X pieces of
# keys, W work items.

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_flashinfer.ops.contracts import VariableBlockSparseAttention
from compiled_llm_flashinfer.ops.library import LIBRARY
from compiled_llm_flashinfer.ops.sparse.plain import Results, attend_on_cuda, check_states
from compiled_llm_ops.attention.lse import kernel_of_both, with_lse
from compiled_llm_ops.contracts import check_int32
from compiled_llm_ops.library import define_op

OP = "variable_block_sparse_attention"


@define_op(VariableBlockSparseAttention, library=LIBRARY)
def variable_block_sparse_attention(args: VariableBlockSparseAttention) -> Tensor:
    """Attention in which each kv head divides queries and keys into blocks of its own sizes, and sees some of them.

    A captured launch may be replayed with other blocks, as many: ``work_items`` and ``pieces`` are read as they are
    then.

    Args:
        query: ``[M, H, D]``, any strides, H a multiple of K.
        key: ``[N, K, D]``, any strides, of the query's dtype.
        value: ``[N, K, D]``, like ``key``.
        block_mask_map: ``[K, MB, NB]`` of dtype bool: whether the queries of a row of blocks see the keys of a column.
            On CUDA its shape alone is read.
        block_row_sz: ``[K, MB]`` int32, queries of each row, M in all; not read on CUDA.
        block_col_sz: ``[K, NB]`` int32, keys of each column, N in all; not read on CUDA.
        work_items: ``[W, 8]`` int32, from ``variable_block_sparse_tables`` for the same blocks; not read on a CPU.
        pieces: ``[X, 2]`` int32, likewise.
        max_parts: partial results that work items may have at most, as given to ``variable_block_sparse_tables``.
        scale: factor on the logits before the softmax.
        logits_soft_cap: ``cap * tanh(logits / cap)`` after scaling; 0.0 for none.

    Returns:
        ``[M, H, D]``, contiguous, of the query's dtype; zeros for a query that sees no key.

    Raises:
        ValueError: shapes or dtypes do not fit together, or on CUDA there is no kernel for the sizes.

    Source:
        FlashInfer's ``VariableBlockSparseAttentionWrapper``, https://docs.flashinfer.ai/api/sparse.html. On CUDA the
        Triton kernel of ``block_sparse_attention``.
    """
    return args.query.new_empty(args.query.shape)


variable_block_sparse_attention_lse = with_lse(variable_block_sparse_attention)


def _check(args: VariableBlockSparseAttention) -> None:
    check_states(OP, args)
    shape, rows, columns = args.block_mask_map.shape, args.block_row_sz, args.block_col_sz
    fits = len(shape) == 3 and shape[0] == args.key.shape[1] and args.block_mask_map.dtype == torch.bool
    if not fits or rows.shape != shape[:2] or columns.shape != (shape[0], *shape[2:]):
        raise ValueError(
            f"{OP}: block_mask_map must be [{args.key.shape[1]}, MB, NB] bool, block_row_sz [K, MB] and block_col_sz "
            f"[K, NB]; got {tuple(shape)} {args.block_mask_map.dtype}, {tuple(rows.shape)} and {tuple(columns.shape)}"
        )
    if args.pieces.dim() != 2 or args.pieces.shape[1] != 2:
        raise ValueError(f"{OP}: pieces must be [X, 2]; got {tuple(args.pieces.shape)}")
    check_int32(OP, block_row_sz=rows, block_col_sz=columns, pieces=args.pieces)


@kernel_of_both(variable_block_sparse_attention, "CPU")
def _cpu(args: VariableBlockSparseAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    _check(args)
    for name, sizes, total in (("row", args.block_row_sz, len(args.query)), ("col", args.block_col_sz, len(args.key))):
        if (sizes.sum(1) != total).any():
            raise ValueError(f"{OP}: block_{name}_sz must sum to {total} for each kv head; got {sizes.sum(1).tolist()}")
    found = Results(args)
    for head, (mask, rows, columns) in enumerate(
        zip(args.block_mask_map, args.block_row_sz.tolist(), args.block_col_sz, strict=True)
    ):
        begin = 0
        for row, size in enumerate(rows):
            seen = mask[row].repeat_interleave(columns).nonzero()[:, 0]
            if size and len(seen):
                found.attend(slice(begin, begin + size), slice(head, head + 1), seen)
            begin += size
    return found.out, found.lse if wants_lse else None


@kernel_of_both(variable_block_sparse_attention, "CUDA")
def _cuda(args: VariableBlockSparseAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    _check(args)
    return attend_on_cuda(OP, args, wants_lse)
