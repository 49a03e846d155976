"""Attention in which a query's bits depend on the tokens of its own row alone, whatever else is in the batch."""

# Prefill and decode share one order of sums: keys in blocks that begin at fixed positions, one after the other. The
# backend ``invariant`` computes prefills so, and the op here decode steps.
# Shapes: B rows, T packed tokens, q new tokens of each row, H query heads, K kv heads, G query heads of one kv head, D
# head dimension, P pages, S page size, N page numbers of all rows.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_llm_ops.attention.decode import check
from compiled_llm_ops.attention.lse import kernel_of_both, over_pages, with_lse
from compiled_llm_ops.attention.preparation import prepared
from compiled_llm_ops.contracts import (
    DecodeAttention,
    RopeAppendPagedKv,
    check_capability,
    check_even_heads,
    common_fields,
    value_size,
)
from compiled_llm_ops.library import define_op
from compiled_llm_ops.plain_attention import store
from compiled_llm_ops.triton.plain import attend_row


@define_op(DecodeAttention, writes=("pages", "saturated"))
def invariant_attention(args: DecodeAttention) -> Tensor:
    """``decode_attention`` in which the bits of a row do not depend on the rest of the batch, or on how it came to be.

    A row's result is that of the row alone, in a batch of any size, with any number of new tokens at a time; and that
    of ``paged_attention`` with a plan of the backend ``invariant``, over the same pages. Other dtypes, head sizes or
    options may give other bits, and so may another device or, on a CPU, another number of threads.

    Args: those of ``decode_attention``.

    Returns:
        ``[T, H, D]``, contiguous, of the query's dtype; ``[T, H, E]`` for values of another size.

    Raises:
        ValueError: shapes or dtypes do not fit together, or ``visible`` is given.

    Source:
        On CUDA a Triton kernel of our own, with the loop of FlashAttention-2 (https://arxiv.org/abs/2307.08691); why
        and how: https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/.
    """
    return over_pages(args.query, args.pages)


invariant_attention_lse = with_lse(invariant_attention)


def _check(args: DecodeAttention) -> None:
    check("invariant_attention", args)
    if args.visible is not None:
        raise ValueError("invariant_attention: visible must be None; lists of pages take decode_attention")


# ---- CPU


@kernel_of_both(invariant_attention, "CPU")
def _cpu(args: DecodeAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    _check(args)
    new, page_size = args.new_tokens, args.pages.shape[-2]
    positions = (args.lengths[:, None] - new + torch.arange(new, dtype=torch.int32, device="cpu")).flatten()
    page = args.indices[args.starts.repeat_interleave(new) + positions // page_size]
    store(args, page, positions % page_size, prepared(args.key, args.key_norm, args))
    query = prepared(args.query, args.query_norm, args)
    shape = (*query.shape[:2], value_size(query, args.pages))
    out = torch.empty(shape, dtype=query.dtype, device="cpu")
    lse = torch.empty(shape[:2], dtype=torch.float32, device="cpu") if wants_lse else None
    for row, (start, length) in enumerate(zip(args.starts.tolist(), args.lengths.tolist(), strict=True)):
        numbers = args.indices[start : start - (-length // page_size)]
        tokens = slice(row * new, (row + 1) * new)
        attend_row(args, query[tokens], numbers, length, out[tokens], None if lse is None else lse[tokens])
    return out, lse


# ---- CUDA: the tokens are written by one kernel, and read by another


@kernel_of_both(invariant_attention, "CUDA")
def _cuda(args: DecodeAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    from compiled_llm_ops.kernels.attention.invariant_tiling import invariant_decode_tiling, invariant_tiling
    from compiled_llm_ops.kernels.attention.packed import PackedQueries, attend
    from compiled_llm_ops.kernels.attention.rope_append import rope_append
    from compiled_llm_ops.kernels.linear.invariant_tiling import linear_device_of
    from compiled_llm_ops.kernels.pdl import has_pdl, is_hopper

    _check(args)
    check_even_heads("invariant_attention", args.pages)
    check_capability("invariant_attention", args.pages)
    device = args.query.device
    # The kernel finds a token's place by the rows' lengths.
    unread: dict[str, Any] = {"token_rows": args.lengths, "token_positions": args.lengths}
    out = torch.empty(args.query.shape, dtype=args.query.dtype, device=device)
    lse = torch.empty(out.shape[:2], dtype=torch.float32, device=device) if wants_lse else None
    with torch.cuda.device(device):  # Triton launches on the current one
        pdl = args.overlap and has_pdl(device)
        written = RopeAppendPagedKv(**common_fields(args, RopeAppendPagedKv), **unread, indptr=args.starts)
        query = rope_append(written, pdl=pdl, lengths=args.lengths)
        queries = PackedQueries(
            query, args.pages, None, args.starts, args.lengths, args.indices, args.scale, args.window_left,
            args.logits_soft_cap, args.key_scale, args.value_scale,
        )  # fmt: skip
        (_, _, kv_heads, _, stored), rows = args.pages.shape, len(args.lengths)
        tiling = invariant_tiling(stored)
        if is_hopper(device) and args.pages.element_size() == query.element_size() == 2:
            row_queries = args.new_tokens * query.shape[1] // kv_heads
            processors = linear_device_of(device).processors
            tiling = invariant_decode_tiling(stored, row_queries, rows * kv_heads, processors)
        attend(queries, out, lse, tiling, pdl=pdl)
    return out, lse
