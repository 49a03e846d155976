"""Cascade attention by plans: the levels of FlashInfer's multi-level cascade, in two launches of a backend's kernels.

FlashInfer's ``MultiLevelCascadeAttentionWrapper`` launches once for each level, and wants the rows of a run next to
each other. Here the runs of all levels are rows of one launch without a causal mask: a row's runs are different keys,
so its query stands once in each of them. A second launch is for what a row has alone, and one kernel merges.

Shapes: B rows, H query heads, K kv heads, D head dimension, P pages, S page size, N page numbers, R runs, M members of
all runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_llm_ops.attention.cascade.attention import merge_on_cpu
from compiled_llm_ops.attention.lse import define_with_lse
from compiled_llm_ops.attention.prefill import attend_on_cpu, attend_on_cuda
from compiled_llm_ops.contracts import CASCADE_LEVELS, PlannedCascadeAttention, check_int32
from compiled_llm_ops.library import same_arguments_as


def planned_cascade_attention(
    query: Tensor,
    pages: Tensor,
    qo_indptr: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    plan: Tensor,
    members: Tensor,
    run_qo_indptr: Tensor,
    run_indptr: Tensor,
    run_indices: Tensor,
    run_last_page_len: Tensor,
    run_plan: Tensor,
    merge_parts: Tensor,
    workspace: Tensor,
    scale: float,
    logits_soft_cap: float = 0.0,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """``paged_attention`` of one new token a row, which reads pages that rows share once for all of them.

    The newest keys and values lie in the pages already. ``planned_cascade_tables`` makes ``members``,
    ``run_qo_indptr`` and ``merge_parts``. Both plans are made by ``plan_paged_attention``: that of rows as for
    ``paged_attention``, that of runs with ``causal=False``.

    Args:
        query: ``[B, H, D]``, any strides; H a multiple of K.
        pages: ``[P, 2, K, S, D']``, as of ``paged_attention``.
        qo_indptr: ``[B + 1]`` int32, where each row's query stands: 0, 1, 2, ...
        indptr: ``[B + 1]`` int32, where the pages that a row has alone begin in ``indices``; one at least.
        indices: ``[N]`` int32, page numbers.
        last_page_len: ``[B]`` int32, tokens in each row's last page, 1 to S.
        plan: ``[bytes]`` uint8, that of rows, and no copy of it. On a CPU any tensor, like ``run_plan``, too: without a
            plan, plain PyTorch attends.
        members: ``[M]`` int32, the rows of each run, those of a run next to each other.
        run_qo_indptr: ``[R + 1]`` int32, where each run's members begin. A run may be empty, or have members that
            nothing is merged of.
        run_indptr: ``[R + 1]`` int32, where each run's pages begin in ``run_indices``; one at least.
        run_indices: ``[N]`` int32, page numbers.
        run_last_page_len: ``[R]`` int32, tokens in each run's last page: S.
        run_plan: ``[bytes]`` uint8, that of runs, made for M tokens.
        merge_parts: ``[B, 3, 3]`` int32: for each of up to three runs that a row begins with, its place in ``members``,
            and twice 1; zeros if there is none.
        workspace: ``[bytes]`` uint8, written: partial results, not read afterwards. On a CPU any tensor.
        scale: factor on the logits before the softmax.
        logits_soft_cap: ``cap * tanh(logits / cap)`` after scaling; 0.0 for none.
        key_scale: ``[K]`` float32, for pages of ``torch.float8_e4m3fn`` only, as of ``paged_attention``.
        value_scale: ``[K]`` float32, the same for values.

    Returns:
        ``[B, H, D]``, contiguous, of the query's dtype; ``[B, H, E]`` for values of another size.

    Raises:
        ValueError: shapes do not fit together, or rows have several new tokens.
        RuntimeError: on CUDA, a plan is missing.

    Source:
        FlashInfer's cascade inference (https://flashinfer.ai/2024/02/02/cascade-inference.html). On CUDA
        ``BatchPrefillWithPagedKVCacheWrapper`` twice (https://arxiv.org/abs/2501.01005), whose results are of the
        query's dtype, and a Triton kernel of our own for the merge, in float32.
    """
    table = (qo_indptr, indptr, indices, last_page_len, plan)
    runs = (members, run_qo_indptr, run_indptr, run_indices, run_last_page_len, run_plan, merge_parts)
    how = (workspace, scale, logits_soft_cap, key_scale, value_scale)
    out: Tensor = _planned_cascade_attention(query, pages, *table, *runs, *how)
    return out


@same_arguments_as(planned_cascade_attention)
def planned_cascade_attention_lse(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """``planned_cascade_attention`` that also returns the log-sum-exp of each query's logits.

    Args: those of ``planned_cascade_attention``.

    Returns:
        ``[B, H, D]`` of the query's dtype, and ``[B, H]`` float32: the log-sum-exp in base 2 over all keys of the row,
        as of ``paged_attention_lse``. Both contiguous.

    Raises:
        ValueError: shapes do not fit together, or rows have several new tokens.
        RuntimeError: on CUDA, a plan is missing.

    Source:
        The kernels of ``planned_cascade_attention`` (https://arxiv.org/abs/2501.01005).
    """
    out, lse = _planned_cascade_attention_lse(*args, **kwargs)
    return out, lse


def _check(args: PlannedCascadeAttention) -> None:
    op, rows, runs = "planned_cascade_attention", len(args.last_page_len), len(args.run_last_page_len)
    if len(args.query) != rows:
        raise ValueError(
            f"{op}: each row must have exactly one new token; got {len(args.query)} tokens for {rows} rows"
        )
    shapes = {"merge_parts": (rows, CASCADE_LEVELS, 3), "members": (args.members.numel(),)}
    shapes |= {"run_qo_indptr": (runs + 1,), "run_indptr": (runs + 1,)}
    for name, shape in shapes.items():
        found = getattr(args, name).shape
        if found != shape:
            raise ValueError(f"{op}: {name} must be {shape} for {rows} rows and {runs} runs; got {tuple(found)}")
    check_int32(op, merge_parts=args.merge_parts, members=args.members)


def _cpu(args: PlannedCascadeAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    _check(args)
    out, lse = attend_on_cpu(args.of_rows, True)
    parts, lses = attend_on_cpu(args.of_runs, True, causal=False)
    assert lse is not None, "they are wanted"
    assert lses is not None, "they are wanted"
    merge_on_cpu(out, lse, parts, lses, args.merge_parts)
    return out, lse if wants_lse else None


def _cuda(args: PlannedCascadeAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    from compiled_llm_ops.kernels.attention.merge import merge_parts

    _check(args)
    with torch.cuda.device(args.query.device):  # Triton launches on the current one
        out, lse = attend_on_cuda(args.of_rows, True)
        parts, lses = attend_on_cuda(args.of_runs, True)
        assert lse is not None, "they are wanted"
        assert lses is not None, "they are wanted"
        merge_parts(out, lse, parts, lses, args.merge_parts.contiguous(), pdl=False)
    return out, lse if wants_lse else None


_planned_cascade_attention, _planned_cascade_attention_lse = define_with_lse(
    "planned_cascade_attention", PlannedCascadeAttention, writes=("workspace",), cpu=_cpu, cuda=_cuda
)
