"""Latent attention of packed queries by a plan, as a backend's kernels divide it."""

# Shapes: T packed tokens, B rows, H query heads, R latent size, E size of the rotated part, P pages, S page size, N
# entries of the page table.

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from compiled_llm_ops.attention.latent.plain import attend_in_pages, check_latent_queries
from compiled_llm_ops.attention.lse import kernel_of_both, new_lse, with_lse
from compiled_llm_ops.contracts import PageTable, check_rows
from compiled_llm_ops.contracts.latent import PlannedLatentAttention
from compiled_llm_ops.library import define_op
from compiled_llm_ops.protocol import launch_of, owner_of


@define_op(PlannedLatentAttention, writes=("workspace",))
def planned_latent_attention(args: PlannedLatentAttention) -> Tensor:
    """``latent_attention`` by a plan that was made for the batch: causal, over latents that lie in pages already.

    Row b's queries are tokens ``qo_indptr[b]:qo_indptr[b + 1]``; they are the last tokens of the row. The plan holds
    their lengths, so that decode steps are planned again for each token.

    Args:
        query_latent: ``[T, H, R]``, any strides: the part of each query that is not rotated, multiplied with the
            up-projection of the keys.
        query_rope: ``[T, H, E]``, any strides, of the same dtype: the rotated part.
        pages: ``[P, S, R + E]``, as ``append_latent`` writes them.
        qo_indptr: ``[B + 1]`` int32, where each row's queries begin.
        indptr: ``[B + 1]`` int32, where each row's pages begin in ``indices``.
        indices: ``[N]`` int32, page numbers.
        last_page_len: ``[B]`` int32, tokens in each row's last page, 1 to S.
        plan: ``[bytes]`` uint8, written by ``plan_paged_attention`` for this batch, and no copy of it. On a CPU any
            tensor: plain PyTorch attends.
        workspace: ``[bytes]`` uint8, written: partial results, not read afterwards. On a CPU any tensor.
        scale: factor on the logits before the softmax.

    Returns:
        ``[T, H, R]``, contiguous, of the queries' dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together.
        RuntimeError: on CUDA, ``plan`` holds no plan.

    Source:
        On CUDA FlashInfer ``BatchMLAPagedAttentionWrapper`` (https://arxiv.org/abs/2501.01005).
    """
    return args.query_latent.new_empty(args.query_latent.shape)


planned_latent_attention_lse = with_lse(planned_latent_attention)


def _check(args: PlannedLatentAttention) -> None:
    check_latent_queries("planned_latent_attention", args)
    check_rows("planned_latent_attention", PageTable(args.qo_indptr, args.indptr, args.indices, args.last_page_len))


@kernel_of_both(planned_latent_attention, "CPU")
def _cpu(args: PlannedLatentAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    _check(args)
    rows, page_size = [], args.pages.shape[1]
    both = zip(pairwise(args.qo_indptr.tolist()), pairwise(args.indptr.tolist()), strict=True)
    for ((begin, end), (first, last)), full in zip(both, args.last_page_len.tolist(), strict=True):
        length = (last - first - 1) * page_size + full
        if begin < end:
            positions = torch.arange(length - (end - begin), length, device=args.pages.device)
            rows.append((slice(begin, end), positions, args.indices[first:last]))
    return attend_in_pages(args, rows)


@kernel_of_both(planned_latent_attention, "CUDA")
def _cuda(args: PlannedLatentAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    _check(args)
    out, lse = args.query_latent.new_empty(args.query_latent.shape), new_lse(args.query_latent) if wants_lse else None
    plan = owner_of(args.plan)
    launch_of("planned_latent_attention", plan, "latents")(plan, args, out, lse)
    return out, lse
