"""FlashInfer's planner: what it takes, what it returns, and what we correct in that.

Shapes: B rows, T packed tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm_ops.contracts import Geometry, PlanPagedAttention
from compiled_llm_ops.flashinfer.splitting import SPLIT, most_tiles, worth_splitting
from compiled_llm_ops.flashinfer.versions import idle_blocks_read_the_plan, uniform_q_len_argument
from compiled_llm_ops.flashinfer.workspace import Workspace

# What FlashInfer's planner returns, in its order: PrefillPlanInfo in scheduler.cuh.
PLAN_FIELDS: tuple[str, ...] = (
    "padded_batch_size",
    "total_num_rows",
    "total_num_rows_offset",
    "cta_tile_q",
    "request_indices_offset",
    "qo_tile_indices_offset",
    "kv_tile_indices_offset",
    "merge_indptr_offset",
    "o_indptr_offset",
    "kv_chunk_size_ptr_offset",
    "v_offset",
    "s_offset",
    "block_valid_mask_offset",
    "enable_cuda_graph",
    "split_kv",
)


def decide(args: PlanPagedAttention, known: list[int] | None, workspace: Workspace) -> list[int]:
    """Plan a batch: queue the copy of the plan to ``args.plan`` and return the numbers that launches take on the host.

    Args:
        args: its columns are on the host, int32, of exact sizes.
        known: the numbers of this plan's last batch; None before the first.
        workspace: of the plan.

    Returns:
        The values of ``PLAN_FIELDS``.

    Raises:
        ValueError: there are more tokens than a captured launch has, or the plan is too small.
        RuntimeError: the workspace is too small.
    """
    captured, tokens, rows = args.captured_tokens >= 0, _tokens(args), args.last_page_len.shape[0]
    _check_size(args, tokens, workspace)
    geometry, lengths = args.geometry, row_lengths(args)
    if args.variant < 0:
        split = worth_splitting(geometry, np.diff(args.qo_indptr.numpy()), lengths, workspace.processors)
    else:
        split = args.variant == SPLIT
    arguments = planner_arguments(args, lengths, tokens=tokens, split=split)
    with workspace.staging(args.plan.numel()) as pinned, overflow_explained(args.workspace):
        all_arguments = args.workspace, args.plan, pinned, *arguments
        planner = workspace.wrapper(geometry)._cached_module
        if captured and not split and idle_blocks_read_the_plan():
            # Only the planner knows the offsets, so the first plan is made twice.
            let_idle_blocks_repeat(pinned, known or planner.plan(*all_arguments), row=rows - 1)
        plan_info = planner.plan(*all_arguments)
    numbers = [int(number) for number in plan_info]
    return with_blocks_for_tiles(numbers, geometry, tokens, rows) if captured and not split else numbers


def plan_bytes(geometry: Geometry, tokens: int, rows: int, max_blocks: int) -> int:
    """Return an upper bound on the size of the plan of any batch with at most these tokens and rows, in bytes.

    For each block of the launch up to three int32 and a bool, for each row and each token one int32 more, and
    some alignment. Split rows fill the device at most once (``max_grid_size`` in scheduler.cuh); rows that are not
    split take a block for each started tile of 16 or more (token, head of the group) pairs.

    Args:
        geometry: the attention group.
        tokens: T.
        rows: B.
        max_blocks: thread blocks that can be resident on the device at once.
    """
    group = geometry.query_heads // geometry.kv_heads
    tiles = tokens * group // 16 + rows
    blocks = max(max_blocks // geometry.kv_heads, tiles) + 1
    return 13 * blocks + 4 * (rows + tokens) + 512


def planner_arguments(
    args: PlanPagedAttention, lengths: NDArray[np.int32], *, tokens: int, split: bool
) -> tuple[Any, ...]:
    """Return what follows the three workspaces in the planner's arguments."""
    causal, fixed_split_size, disable_split_kv, num_colocated_ctas = True, -1, not split, 0
    return (
        args.qo_indptr,
        args.indptr,
        torch.from_numpy(lengths),
        tokens,
        args.last_page_len.shape[0],
        args.query_heads,
        args.kv_heads,
        args.page_size,
        args.captured_tokens >= 0,
        args.head_dim,
        args.head_dim,
        causal,
        args.window_left,
        fixed_split_size,
        disable_split_kv,
        num_colocated_ctas,
        *uniform_q_len_argument(),
    )


def _tokens(args: PlanPagedAttention) -> int:
    """Return T; for captured launches the number that they were captured with."""
    tokens = int(args.qo_indptr[-1])
    if args.captured_tokens < 0:
        return tokens
    if tokens > args.captured_tokens:
        raise ValueError(
            f"plan_paged_attention: {tokens} tokens are more than captured_tokens={args.captured_tokens}; "
            "capture the largest batch"
        )
    return args.captured_tokens


def _check_size(args: PlanPagedAttention, tokens: int, workspace: Workspace) -> None:
    rows = args.last_page_len.shape[0]
    needed = plan_bytes(args.geometry, tokens, rows, workspace.max_blocks)
    if args.plan.numel() < needed:
        raise ValueError(
            f"plan_paged_attention: {tokens} tokens of {rows} rows need a plan of {needed} bytes; got "
            f"{args.plan.numel()}; plan_bytes() of the backend says what holds any batch"
        )


def with_blocks_for_tiles(numbers: list[int], geometry: Geometry, tokens: int, rows: int) -> list[int]:
    """Return the plan of a captured launch without split with as many blocks as there can be tiles of queries.

    The planner gives it enough to fill the device. Blocks without work would crowd the others onto fewer
    multiprocessors: on an H200, 1 row of 512 new tokens takes 29 us instead of 19.
    """
    info = dict(zip(PLAN_FIELDS, numbers, strict=True))
    return [*(info | {"padded_batch_size": most_tiles(geometry, tokens, rows, info["cta_tile_q"])}).values()]


def row_lengths(args: PlanPagedAttention) -> NDArray[np.int32]:
    """Return ``[B]``, all tokens of each row."""
    # In numpy, which takes a tenth of the time over so few numbers.
    pages, last = np.diff(args.indptr.numpy()), args.last_page_len.numpy()
    lengths: NDArray[np.int32] = (pages - 1) * np.int32(args.page_size) + last
    return lengths


def let_idle_blocks_repeat(pinned: Tensor, plan_info: Any, row: int) -> None:
    """Fill what the planner does not write: blocks without work recompute the first tile of ``row``.

    Several blocks that write the same do no harm. Without split, put a short row last: idle blocks take its time.
    """
    info = dict(zip(PLAN_FIELDS, map(int, plan_info), strict=True))
    columns = {"request_indices_offset": row, "qo_tile_indices_offset": 0, "kv_tile_indices_offset": 0}
    for name, value in columns.items():
        column = pinned[info[name] : info[name] + 4 * info["padded_batch_size"]]
        column.numpy().view(np.int32)[:] = value


@contextmanager
def overflow_explained(float_buffer: Tensor) -> Iterator[None]:
    """Say what to do if FlashInfer finds the float workspace too small."""
    try:
        yield
    except RuntimeError as error:
        overflow = re.search(r"allocating memory for \w+_tmp_[vs] with size (\d+)", str(error))
        if overflow is None:
            raise
        raise RuntimeError(
            f"plan_paged_attention: the workspace of {float_buffer.numel()} bytes is too small for "
            f"this batch, whose split rows alone take {overflow[1]} bytes; raise workspace_bytes"
        ) from error
