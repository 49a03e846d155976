"""FlashInfer's planner: its arguments, its results, and our corrections."""

# Shapes: B rows, T packed tokens.

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm_ops.contracts import Geometry, PlannedBatch
from compiled_llm_ops.contracts.devices import device_of
from compiled_llm_ops.flashinfer import hopper, mla
from compiled_llm_ops.flashinfer.hopper import FA3, is_there, takes_fa3
from compiled_llm_ops.flashinfer.splitting import SPLIT, WHOLE, max_tiles, worth_splitting
from compiled_llm_ops.flashinfer.versions import idle_blocks_read_the_plan, sums_parts_wrongly, uniform_q_len_argument
from compiled_llm_ops.flashinfer.workspace import FlashInferWorkspace, max_blocks_of

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
NUMBERS = max(len(PLAN_FIELDS), len(hopper.FIELDS), len(mla.FIELDS))  # how many numbers a plan has room for
_BLOCKS, _TILE = map(PLAN_FIELDS.index, ("padded_batch_size", "cta_tile_q"))
_ROWS, _QUERY_TILES, _KEY_TILES = map(
    PLAN_FIELDS.index, ("request_indices_offset", "qo_tile_indices_offset", "kv_tile_indices_offset")
)


class HostColumns(NamedTuple):
    """Memory from which the planner reads a batch of B rows: tensors, and the same memory as arrays."""

    # Kept from plan to plan: to make one of the other takes longer than all other work here.

    tensors: tuple[Tensor, ...]  # where queries and pages of rows begin ``[B + 1]``, and their tokens ``[B]``, int32
    arrays: tuple[NDArray[np.int32], ...]

    @classmethod
    def of(cls, rows: int) -> HostColumns:
        tensors = tuple(torch.zeros(size, dtype=torch.int32, device="cpu") for size in (rows + 1, rows + 1, rows))
        return cls(tensors, tuple(tensor.numpy() for tensor in tensors))

    @property
    def rows(self) -> int:
        return len(self.arrays[2])

    def fill(self, batch: PlannedBatch) -> None:
        starts, pages, lengths = self.arrays
        starts[:], pages[:] = batch.qo_indptr, batch.indptr
        lengths[:] = lengths_of(batch)


def schedule_of(batch: PlannedBatch, device: torch.device, processors: int) -> int:
    """Return the schedule of a batch: the one that captured launches name, else the fastest."""
    if batch.geometry.rope_size or sums_parts_wrongly(batch.geometry):
        return WHOLE
    if batch.schedule >= 0:
        return batch.schedule
    queries, lengths = np.diff(batch.qo_indptr).tolist(), lengths_of(batch)
    if takes_fa3([batch.geometry], queries, lengths, device, processors):
        return FA3
    return SPLIT if worth_splitting(batch.geometry, queries, lengths, processors) else WHOLE


def lengths_of(batch: PlannedBatch) -> list[int]:
    first, size = batch.indptr.tolist(), batch.geometry.page_size
    last = zip(pairwise(first), batch.last_page_len.tolist(), strict=True)
    return [(end - start - 1) * size + full for (start, end), full in last]


def decide(
    batch: PlannedBatch, plan: Tensor, columns: HostColumns, known: list[int] | None, workspace: FlashInferWorkspace
) -> list[int]:
    """Plan a batch: queue the copy to ``plan`` ``[bytes]`` and return the numbers of launches, filled with zeros."""
    # They are the values of ``PLAN_FIELDS``, or for ``fa3`` and for MLA of their ``FIELDS``; ``known`` are those of
    # this plan's last batch, None before the first. The batch has columns of exact sizes, as many as ``columns``, which
    # are written, and names its schedule. Errors are those of ``FlashInferPlan.decide``.
    captured, geometry, rows = batch.captured_tokens >= 0, batch.geometry, columns.rows
    tokens = tokens_of(batch)
    _check_size(plan, geometry, tokens, rows, workspace)
    columns.fill(batch)
    if geometry.rope_size:
        mla.check_works(geometry, tokens, rows, workspace.processors)
        arguments, whole = mla.planner_arguments(geometry, columns.tensors), False
    else:
        arguments, whole = planner_arguments(batch, columns, tokens), captured and batch.schedule == WHOLE
    with workspace.staging(plan.numel()) as staged:
        all_arguments = batch.workspace, plan, staged.memory, *arguments
        planner = workspace.wrapper(geometry, kernels_of(batch.schedule))._cached_module
        try:
            if whole and idle_blocks_read_the_plan():
                # Only the planner knows the offsets, so the first plan is made twice.
                let_idle_blocks_repeat(staged.words, known or planner.plan(*all_arguments), row=rows - 1)
            numbers = list(map(int, planner.plan(*all_arguments)))
        except RuntimeError as error:
            _explain_overflow(error, batch.workspace)
            raise
    numbers = with_blocks_for_tiles(numbers, geometry, tokens, rows) if whole else numbers
    return numbers + [0] * (NUMBERS - len(numbers))


def plan_bytes(geometry: Geometry, tokens: int, rows: int, device: torch.device) -> int:
    """Return an upper bound on the size of the plan of any batch with at most these tokens and rows, in bytes."""
    if geometry.rope_size:
        return mla.plan_bytes(device_of(device).processors)
    needed = fa2_plan_bytes(geometry, tokens, rows, max_blocks_of(device))
    if is_there(geometry, device):
        needed = max(needed, hopper.plan_bytes(geometry, tokens, rows, device_of(device).processors))
    return needed


def fa2_plan_bytes(geometry: Geometry, tokens: int, rows: int, max_blocks: int) -> int:
    """Return an upper bound on the size of a plan for ``fa2``, in bytes."""
    # For each block of the launch up to three int32 and a bool, for each row and each token one int32 more, and some
    # alignment. Split rows fill the device at most once (``max_grid_size`` in scheduler.cuh); rows that are not split
    # take a block for each started tile of 16 or more (token, head of the group) pairs. ``max_blocks`` can be resident
    # on the device at once.
    group = geometry.query_heads // geometry.kv_heads
    tiles = tokens * group // 16 + rows
    blocks = max(max_blocks // geometry.kv_heads, tiles) + 1
    return 13 * blocks + 4 * (rows + tokens) + 512


def planner_arguments(batch: PlannedBatch, columns: HostColumns, tokens: int) -> tuple[Any, ...]:
    fixed_split_size, disable_split_kv, num_colocated_ctas = -1, batch.schedule != SPLIT, 0
    geometry = batch.geometry
    arguments = (
        *columns.tensors,
        tokens,
        columns.rows,
        geometry.query_heads,
        geometry.kv_heads,
        geometry.page_size,
        batch.captured_tokens >= 0,
        geometry.head_dim,
        geometry.head_dim,
        True,  # causal
        geometry.window_left,
    )
    if batch.schedule == FA3:
        return arguments
    return (*arguments, fixed_split_size, disable_split_kv, num_colocated_ctas, *uniform_q_len_argument())


def kernels_of(schedule: int) -> str:
    """Return FlashInfer's name of the kernels that a schedule is for."""
    return "fa3" if schedule == FA3 else "fa2"


def fields_of(schedule: int, geometry: Geometry) -> tuple[str, ...]:
    """Return the names of a plan's numbers."""
    if geometry.rope_size:
        return mla.FIELDS
    return hopper.FIELDS if schedule == FA3 else PLAN_FIELDS


def tokens_of(batch: PlannedBatch) -> int:
    """Return T; for captured launches the number that they were captured with."""
    tokens, captured = int(batch.qo_indptr[-1]), batch.captured_tokens
    if tokens > captured >= 0:
        raise ValueError(
            f"plan_paged_attention: {tokens} tokens are more than captured_tokens={captured}; capture the largest batch"
        )
    return max(tokens, captured)


def _check_size(plan: Tensor, geometry: Geometry, tokens: int, rows: int, workspace: FlashInferWorkspace) -> None:
    needed = plan_bytes(geometry, tokens, rows, workspace.device)
    if plan.numel() < needed:
        raise ValueError(
            f"plan_paged_attention: {tokens} tokens of {rows} rows need a plan of {needed} bytes; got "
            f"{plan.numel()}; plan_bytes() of the backend says what holds any batch"
        )


def with_blocks_for_tiles(numbers: list[int], geometry: Geometry, tokens: int, rows: int) -> list[int]:
    """Return the plan of a captured launch without split with as many blocks as there can be tiles of queries."""
    # The planner gives it enough to fill the device. Blocks without work would crowd the others onto fewer
    # multiprocessors: on an H200, 1 row of 512 new tokens takes 29 us instead of 19.
    changed = list(numbers)
    changed[_BLOCKS] = max_tiles(geometry, tokens, rows, numbers[_TILE])
    return changed


def let_idle_blocks_repeat(words: NDArray[np.int32], plan_info: Any, row: int) -> None:
    """Let blocks without work, whose part the planner does not write, recompute the first tile of ``row``."""
    # Blocks that write the same values do no harm. Without split, put a short row last: idle blocks take its time.
    blocks = int(plan_info[_BLOCKS])
    for field, value in ((_ROWS, row), (_QUERY_TILES, 0), (_KEY_TILES, 0)):
        first = int(plan_info[field]) // 4
        words[first : first + blocks] = value


def _explain_overflow(error: RuntimeError, float_buffer: Tensor) -> None:
    """Raise an error with the way out, if FlashInfer has found the float workspace too small."""
    overflow = re.search(r"allocating memory for \w+_tmp_[vs] with size (\d+)", str(error))
    if overflow is not None:
        raise RuntimeError(
            f"plan_paged_attention: the workspace of {float_buffer.numel()} bytes is too small for "
            f"this batch, whose split rows alone take {overflow[1]} bytes; raise workspace_bytes"
        ) from error
