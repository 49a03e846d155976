"""How the kernels of ``paged_attention`` divide a batch, decided on the host before the graph runs."""

# Shapes: B rows, T packed tokens, H query heads, K kv heads, D head dimension, S page size.

from __future__ import annotations

import torch

from compiled_llm_ops.contracts import PlannedBatch, PlanPagedAttention
from compiled_llm_ops.library import define_op, kernel_of
from compiled_llm_ops.protocol import owner_of


@define_op(PlanPagedAttention, writes=("plan", "numbers"))
def plan_paged_attention(args: PlanPagedAttention) -> None:
    """Decide how ``paged_attention`` divides a batch, and queue the copy of the plan to the device; never waits for it.

    The page table is given on the host, where it was made; it may be rewritten afterwards. Launches read the last plan,
    so a captured launch may be replayed for each batch that it was planned for in the meantime. The plan depends on how
    many pages rows have, not on how full the last one is; with ``rope_size`` it depends on both.

    On a CPU there is no plan: the kernel reads the page table itself.

    Args:
        plan: ``[bytes]`` uint8 on the device, written: the kernels read it. Made by ``new_plan`` of a backend.
        numbers: ``[n]`` int64 on the host, written: launches read it. Made with ``plan``.
        qo_indptr: ``[B + 1]`` int32 on the host, where each row's queries begin.
        indptr: ``[B + 1]`` int32 on the host, where each row's pages begin.
        last_page_len: ``[B]`` int32 on the host, tokens in each row's last page, 1 to S.
        workspace: ``[bytes]`` uint8 on the device, the one that launches will be given.
        query_heads: H.
        kv_heads: K.
        head_dim: D as stored in the pages.
        page_size: S, in tokens.
        window_left: tokens visible to the left of each query; -1 for all.
        logits_soft_cap: ``cap * tanh(logits / cap)`` after scaling; 0.0 for none.
        dtype: of the queries.
        kv_dtype: of the pages.
        rope_size: E where pages are ``[P, S, D + E]``, which all heads share (MLA); 0 for keys and values.
        function: key of what becomes of logits where the layers attend; empty for softmax attention.
        captured_tokens: the T of launches that are captured in a CUDA graph, at least that of any batch planned for
            them; -1 if they are not captured.
        variant: one of the backend's ``schedules``, which captured launches must name; -1 for the fastest one for this
            batch.

    Raises:
        ValueError: the columns have the wrong type or size, there are more tokens than ``captured_tokens``, or there is
            no kernel.
        RuntimeError: ``plan`` has no owner, the workspace is too small, a graph is being captured, or a captured launch
            no longer fits the plan: it must not be replayed then.

    Source:
        On CUDA FlashInfer ``BatchPrefillWithPagedKVCacheWrapper.plan`` (https://arxiv.org/abs/2501.01005).
    """


@kernel_of(plan_paged_attention, "CPU")
def _check(args: PlanPagedAttention) -> None:
    rows = args.last_page_len.shape[0]
    # Planners read the columns by address, and trust their place, type and size.
    for name, length in (("qo_indptr", rows + 1), ("indptr", rows + 1), ("last_page_len", rows)):
        column = getattr(args, name)
        if column.device.type != "cpu" or column.dtype != torch.int32 or column.shape != (length,):
            raise ValueError(
                f"plan_paged_attention: {name} must be int32 [{length}] on the host; got {column.dtype} "
                f"{list(column.shape)} on {column.device}"
            )
        if not column.is_contiguous():
            raise ValueError(f"plan_paged_attention: {name} must be contiguous")
    if args.captured_tokens >= 0 and args.variant < 0:
        raise ValueError("plan_paged_attention: captured launches have one variant for all batches; name it")


@kernel_of(plan_paged_attention, "CUDA")
def _cuda(args: PlanPagedAttention) -> None:
    _check(args)
    plan = owner_of(args.plan)
    if args.numbers.data_ptr() != plan.numbers.data_ptr():
        raise ValueError("plan_paged_attention: numbers belong to another plan; give those made with this one")
    starts, pages, last = args.qo_indptr.numpy(), args.indptr.numpy(), args.last_page_len.numpy()
    plan.decide(PlannedBatch(starts, pages, last, args.geometry, args.workspace, args.captured_tokens, args.variant))
