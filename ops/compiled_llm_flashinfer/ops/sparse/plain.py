"""Block-sparse attention in plain PyTorch, from its blocks alone, and what both ops share."""

# Shapes: M queries, N keys, H query heads, K kv heads, D head dimension, R queries of a block, C keys of a block, MB
# rows and NB columns of blocks.

from __future__ import annotations

import math

import torch
from torch import Tensor

from compiled_llm_flashinfer.ops.contracts import BlockSparseAttention, SparseItem, VariableBlockSparseAttention
from compiled_llm_ops.contracts import check_int32
from compiled_llm_ops.contracts.devices import device_of
from compiled_llm_ops.plain_attention import attend_lse

AnySparse = BlockSparseAttention | VariableBlockSparseAttention


def check_states(op: str, args: AnySparse) -> None:
    """Raise ValueError if queries, keys and values do not fit together, or the work items are none."""
    query, key, value = args.query, args.key, args.value
    fits = query.dim() == 3 and key.dim() == 3 and key.shape == value.shape and key.shape[2] == query.shape[2]
    if not fits or query.dtype != key.dtype or key.dtype != value.dtype:
        raise ValueError(
            f"{op}: query must be [M, H, D], key and value [N, K, D] of its dtype; got {tuple(query.shape)} "
            f"{query.dtype}, {tuple(key.shape)} {key.dtype} and {tuple(value.shape)} {value.dtype}"
        )
    if query.shape[1] % max(1, key.shape[1]):
        raise ValueError(f"{op}: {query.shape[1]} query heads are not as many for each of {key.shape[1]} kv heads")
    if args.work_items.dim() != 2 or args.work_items.shape[1] != len(SparseItem._fields) or args.max_parts < 0:
        raise ValueError(
            f"{op}: work_items must be [W, {len(SparseItem._fields)}], and max_parts not negative; got "
            f"{tuple(args.work_items.shape)} and {args.max_parts}"
        )
    check_int32(op, work_items=args.work_items)


def attend_on_cuda(op: str, args: AnySparse, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Launch the kernel of both ops, whose arguments are checked."""
    from compiled_llm_flashinfer.ops.kernels.sparse.block_sparse import attend

    with torch.cuda.device(args.query.device):  # Triton launches on the current one
        return attend(op, args, wants_lse, device_of(args.query.device).processors)


class Results:
    """The results of some queries and heads after others: zeros, and minus infinity, until they are there."""

    def __init__(self, args: AnySparse) -> None:
        self._args = args
        self._group = args.query.shape[1] // args.key.shape[1]
        self.out = torch.zeros(args.query.shape, dtype=args.query.dtype, device=args.query.device)
        self.lse = torch.full(args.query.shape[:2], -math.inf, dtype=torch.float32, device=args.query.device)

    def attend(self, rows: slice, kv_heads: slice, columns: Tensor, seen: Tensor | None = None) -> None:
        """Attend with the queries ``rows`` of ``kv_heads`` to the keys ``columns`` ``[L]``, by ``seen`` ``[Q, L]``."""
        args = self._args
        heads = slice(kv_heads.start * self._group, kv_heads.stop * self._group)
        keys, values = (states[columns, kv_heads].transpose(0, 1) for states in (args.key, args.value))
        query = args.query[rows, heads]
        out, lse = attend_lse(query, keys, values, args.scale, seen, args.logits_soft_cap)
        self.out[rows, heads], self.lse[rows, heads] = out.to(self.out.dtype), lse
