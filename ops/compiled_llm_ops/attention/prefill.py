"""Attention over paged keys and values: ragged causal prefill and extend. Decode has ops of its own, in ``decode``."""

# Shapes: T packed tokens, B rows, H query heads, K kv heads, D head dimension, P pages, S page size, N entries of the
# page table, L tokens of one row in the cache, Q queries of one row.

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from compiled_llm_ops.attention.lse import kernel_of_both, over_pages, with_lse
from compiled_llm_ops.contracts import (
    PagedAttention,
    PageTable,
    check_pages,
    check_rows,
    check_scales,
    has_uneven_heads,
    table_of,
    value_size,
)
from compiled_llm_ops.library import define_op
from compiled_llm_ops.plain_attention import attend_row_by_row
from compiled_llm_ops.protocol import owner_of, plan_of


@define_op(PagedAttention, writes=("workspace",))
def paged_attention(args: PagedAttention) -> Tensor:
    """Causal attention of packed queries over the pages of their rows.

    Row b's queries are ``query[qo_indptr[b]:qo_indptr[b + 1]]``; they are the last tokens of the row, whose keys and
    values already lie in the pages.

    Args:
        query: ``[T, H, D]``, any strides; H a multiple of K.
        pages: ``[P, 2, K, S, D']`` with D' >= D; columns past D are zero. For values of another size E
            ``[P, K, S, D + E]``, each key followed by its value, in plain PyTorch only.
        qo_indptr: ``[B + 1]`` int32, where each row's queries begin.
        indptr: ``[B + 1]`` int32, where each row's pages begin in ``indices``.
        indices: ``[N]`` int32, page numbers.
        last_page_len: ``[B]`` int32, tokens in each row's last page, 1 to S.
        plan: ``[bytes]`` uint8, written by ``plan_paged_attention`` for this batch, and no copy of it. On a CPU any
            tensor, too: without a plan, plain PyTorch attends.
        workspace: ``[bytes]`` uint8, written: partial results, not read afterwards. On a CPU any tensor.
        scale: factor on the logits before the softmax.
        window_left: tokens visible to the left of each query; -1 for all.
        logits_soft_cap: ``cap * tanh(logits / cap)`` after scaling; 0.0 for none.
        key_scale: ``[K]`` float32, by kv head, for pages of ``torch.float8_e4m3fn`` only: what keys in the pages are to
            be multiplied with. None for 1. FlashInfer's kernels have no scales by head: queries are multiplied by them
            before, and rounded once more, which changes nothing if scales are powers of two.
        value_scale: ``[K]`` float32, the same for values; FlashInfer's results are multiplied by them.

    Returns:
        ``[T, H, D]``, contiguous, of the query's dtype; ``[T, H, E]`` for values of another size.

    Raises:
        ValueError: shapes do not fit together.
        RuntimeError: on CUDA, ``plan`` holds no plan.

    Source:
        On CUDA FlashInfer ``BatchPrefillWithPagedKVCacheWrapper`` (https://arxiv.org/abs/2501.01005).
    """
    return over_pages(args.query, args.pages)


paged_attention_lse = with_lse(paged_attention)


def check(
    op: str, query: Tensor, pages: Tensor, table: PageTable, key_scale: Tensor | None, value_scale: Tensor | None
) -> None:
    """Raise ValueError, in the name of ``op``, if shapes or dtypes do not fit together."""
    check_pages(op, query, pages)
    check_rows(op, table)
    check_scales(op, pages, key_scale, value_scale)


def _check(args: PagedAttention) -> None:
    check("paged_attention", args.query, args.pages, table_of(args), args.key_scale, args.value_scale)


# ---- CPU: as the backend does it that the plan is of, or in plain PyTorch, one row after the other


@kernel_of_both(paged_attention, "CPU")
def _cpu(args: PagedAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Return what the kernel of ``paged_attention`` does."""
    if plan_of(args.plan) is not None:
        return _as_planned(args, wants_lse)
    _check(args)
    how = (args.scale, args.window_left, args.logits_soft_cap, wants_lse, args.key_scale, args.value_scale)
    return attend_row_by_row(args.query, args.pages, table_of(args), *how)


# ---- CUDA: the kernels of the backend that the plan is of


@kernel_of_both(paged_attention, "CUDA")
def _as_planned(args: PagedAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    _check(args)
    plan = owner_of(args.plan)

    def planned(query: Tensor, out: Tensor, lse: Tensor | None) -> None:
        plan.launch(args._replace(query=query), out, lse)

    return launch(planned, args.query, args.pages, wants_lse)


def launch(
    planned: Callable[[Tensor, Tensor, Tensor | None], None], query: Tensor, pages: Tensor, wants_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return what a plan's launch gives for queries ``[T, H, D]``, whose heads may be stored larger, and its lse."""
    tokens, heads, head_dim = query.shape
    stored = head_dim if has_uneven_heads(pages) else pages.shape[4]
    query = torch.nn.functional.pad(query, (0, stored - head_dim)) if stored != head_dim else query.contiguous()
    out = torch.empty((tokens, heads, value_size(query, pages)), dtype=query.dtype, device=query.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=query.device) if wants_lse else None
    planned(query, out, lse)
    return out if stored == head_dim else out[..., :head_dim].contiguous(), lse
