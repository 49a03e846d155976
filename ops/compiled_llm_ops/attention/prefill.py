"""Attention over paged keys and values: ragged causal prefill and extend. Decode has ops of its own, in ``decode``."""

# Shapes: T packed tokens, B rows, H query heads, K kv heads, D head dimension, P pages, S page size, N entries of the
# page table, L tokens of one row in the cache, Q queries of one row.

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from compiled_llm_ops.attention.lse import kernel_of_both, over_pages, with_lse
from compiled_llm_ops.contracts import PagedAttention, check_fp8, check_int32, check_pages, has_uneven_heads, value_size
from compiled_llm_ops.contracts.variants import PagedAttentionVariant, PlannedAttentionVariant
from compiled_llm_ops.library import define_op
from compiled_llm_ops.plain_attention import attend_row_by_row
from compiled_llm_ops.protocol import owner_of, plan_of

_Arguments = TypeVar("_Arguments", PagedAttention, PlannedAttentionVariant)


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


def check(op: str, args: PagedAttention | PagedAttentionVariant | PlannedAttentionVariant) -> None:
    """Raise ValueError, in the name of ``op``, if shapes or dtypes do not fit together."""
    table = args.table
    check_pages(op, args.query, args.pages)
    rows = table.last_page_len.shape[0]
    if table.qo_indptr.shape[0] != rows + 1 or table.indptr.shape[0] != rows + 1:
        raise ValueError(
            f"{op}: qo_indptr and indptr must be [{rows + 1}] for {rows} rows; got "
            f"[{table.qo_indptr.shape[0]}] and [{table.indptr.shape[0]}]"
        )
    check_int32(op, **table._asdict())
    check_fp8(op, args.pages, args.key_scale, args.value_scale)


# ---- CPU: as the backend does it that the plan is of, or in plain PyTorch, one row after the other


@kernel_of_both(paged_attention, "CPU")
def _cpu(args: PagedAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Return what the kernel of ``paged_attention`` does."""
    check("paged_attention", args)
    plan = plan_of(args.plan)
    if plan is not None:
        return launch(plan.launch, args, wants_lse)
    how = (args.scale, args.window_left, args.logits_soft_cap, wants_lse, args.key_scale, args.value_scale)
    return attend_row_by_row(args.query, args.pages, args.table, *how)


# ---- CUDA: the kernels of the backend that the plan is of


@kernel_of_both(paged_attention, "CUDA")
def _cuda(args: PagedAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Return what the kernel of ``paged_attention`` does, as planned."""
    check("paged_attention", args)
    return launch(owner_of(args.plan).launch, args, wants_lse)


def launch(
    planned: Callable[[_Arguments, Tensor, Tensor | None], None], args: _Arguments, wants_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return what a plan's launch gives for queries ``[T, H, D]``, whose heads may be stored larger, and its lse."""
    query, (tokens, heads, head_dim) = args.query, args.query.shape
    stored = head_dim if has_uneven_heads(args.pages) else args.pages.shape[4]
    query = torch.nn.functional.pad(query, (0, stored - head_dim)) if stored != head_dim else query.contiguous()
    out = torch.empty((tokens, heads, value_size(query, args.pages)), dtype=query.dtype, device=query.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=query.device) if wants_lse else None
    planned(args._replace(query=query), out, lse)
    return out if stored == head_dim else out[..., :head_dim].contiguous(), lse
