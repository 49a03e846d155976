"""Attention of queries over the keys of a sparse matrix of blocks, the same for all heads."""

# Shapes: M queries, N keys, H query heads, K kv heads, D head dimension, R queries of a block, C keys of a block, MB =
# M / R rows of blocks, X blocks, W work items.

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from compiled_llm_flashinfer.ops.contracts import BlockSparseAttention
from compiled_llm_flashinfer.ops.library import LIBRARY
from compiled_llm_flashinfer.ops.sparse.plain import Results, attend_on_cuda, check_states
from compiled_llm_flashinfer.ops.sparse.work_items import check_division
from compiled_llm_ops.attention.lse import kernel_of_both, with_lse
from compiled_llm_ops.contracts import check_int32
from compiled_llm_ops.library import define_op

OP = "block_sparse_attention"


@define_op(BlockSparseAttention, library=LIBRARY)
def block_sparse_attention(args: BlockSparseAttention) -> Tensor:
    """Attention in which each row of R queries sees the blocks of C keys that a sparse matrix lists.

    The matrix is SciPy's ``bsr_matrix``: row r of blocks, the queries ``r * R`` to ``r * R + R - 1``, sees the columns
    ``indices[indptr[r]:indptr[r + 1]]`` of blocks, each once and in any order; column c has the keys ``c * C`` to
    ``c * C + C - 1``. With C = 1 it lists single keys. A captured launch may be replayed with other blocks: ``indptr``,
    ``indices``, ``work_items`` and ``mask`` are read as they are then.

    Args:
        query: ``[M, H, D]``, any strides, M a multiple of R, H one of K.
        key: ``[N, K, D]``, any strides, of the query's dtype; N a multiple of C.
        value: ``[N, K, D]``, like ``key``.
        indptr: ``[MB + 1]`` int32, where each row of blocks begins in ``indices``.
        indices: ``[X]`` int32, columns of blocks; X may be larger than needed.
        work_items: ``[W, 8]`` int32, from ``block_sparse_items`` for the same matrix; not read on a CPU.
        block_rows: R.
        block_columns: C.
        max_parts: partial results that work items may have at most, as given to ``block_sparse_items``.
        scale: factor on the logits before the softmax.
        logits_soft_cap: ``cap * tanh(logits / cap)`` after scaling; 0.0 for none.
        mask: ``[X, R, C]`` of dtype bool, contiguous: which keys of each block its queries see. None if they see all.

    Returns:
        ``[M, H, D]``, contiguous, of the query's dtype; zeros for a query that sees no key.

    Raises:
        ValueError: shapes or dtypes do not fit together, or on CUDA there is no kernel for the sizes.

    Source:
        FlashInfer's ``BlockSparseAttentionWrapper``, https://docs.flashinfer.ai/api/sparse.html. On CUDA a Triton
        kernel of our own, after FlashAttention-2 (https://arxiv.org/abs/2307.08691).
    """
    return args.query.new_empty(args.query.shape)


block_sparse_attention_lse = with_lse(block_sparse_attention)


def _check(args: BlockSparseAttention) -> None:
    check_states(OP, args)
    queries, keys, mask = args.query.shape[0], args.key.shape[0], args.mask
    try:
        check_division(queries, keys, args.block_rows, args.block_columns)
    except ValueError as error:
        raise ValueError(f"{OP}: {error}") from None
    rows = queries // args.block_rows
    if args.indptr.shape != (rows + 1,) or args.indices.dim() != 1:
        raise ValueError(
            f"{OP}: indptr must be [{rows + 1}] for {queries} queries in blocks of {args.block_rows}, and indices [X]; "
            f"got {tuple(args.indptr.shape)} and {tuple(args.indices.shape)}"
        )
    check_int32(OP, indptr=args.indptr, indices=args.indices)
    if mask is not None:
        shape = (args.indices.shape[0], args.block_rows, args.block_columns)
        if mask.shape != shape or mask.dtype != torch.bool or not mask.is_contiguous():
            raise ValueError(f"{OP}: mask must be {shape} bool, contiguous; got {tuple(mask.shape)} {mask.dtype}")


@kernel_of_both(block_sparse_attention, "CPU")
def _cpu(args: BlockSparseAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    _check(args)
    found, heads = Results(args), slice(0, args.key.shape[1])
    within, ends = torch.arange(args.block_columns, device=args.query.device), args.indptr.tolist()
    for row, (begin, end) in enumerate(pairwise(ends)):
        if begin == end:
            continue
        columns = (args.indices[begin:end, None] * args.block_columns + within).flatten()
        seen = None if args.mask is None else args.mask[begin:end].transpose(0, 1).flatten(1)
        found.attend(slice(row * args.block_rows, (row + 1) * args.block_rows), heads, columns, seen)
    return found.out, found.lse if wants_lse else None


@kernel_of_both(block_sparse_attention, "CUDA")
def _cuda(args: BlockSparseAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    _check(args)
    return attend_on_cuda(OP, args, wants_lse)
