"""FlashInfer's planner: what it takes, what it returns, and what we correct in that."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm_ops.contracts import Geometry, PageTable
from compiled_llm_ops.flashinfer.splitting import most_tiles
from compiled_llm_ops.flashinfer.versions import uniform_q_len_argument

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


def planner_arguments(
    geometry: Geometry, host: PageTable, lengths: NDArray[np.int32], *, tokens: int, static: bool, split: bool
) -> tuple[Any, ...]:
    """Return what follows the three workspaces in the planner's arguments."""
    causal, fixed_split_size, disable_split_kv, num_colocated_ctas = True, -1, not split, 0
    return (
        host.qo_indptr,
        host.indptr,
        torch.from_numpy(lengths),
        tokens,
        host.last_page_len.shape[0],
        geometry.query_heads,
        geometry.kv_heads,
        geometry.page_size,
        static,
        geometry.head_dim,
        geometry.head_dim,
        causal,
        geometry.window_left,
        fixed_split_size,
        disable_split_kv,
        num_colocated_ctas,
        *uniform_q_len_argument(),
    )


def with_blocks_for_tiles(plan_info: Any, geometry: Geometry, tokens: int, rows: int) -> list[int]:
    """Return a static plan that is not split with as many blocks as there can be tiles of queries.

    The planner gives it as many as fill the device. Those without work would have the others share multiprocessors: on
    an H200, 1 row of 512 new tokens takes 29 us instead of 19.
    """
    info = dict(zip(PLAN_FIELDS, map(int, plan_info), strict=True))
    return [*(info | {"padded_batch_size": most_tiles(geometry, tokens, rows, info["cta_tile_q"])}).values()]


def row_lengths(geometry: Geometry, host: PageTable) -> NDArray[np.int32]:
    """Return ``[B]``, all tokens of each row."""
    # In numpy, which takes a tenth of the time over so few numbers.
    pages, last = np.diff(host.indptr.numpy()), host.last_page_len.numpy()
    lengths: NDArray[np.int32] = (pages - 1) * np.int32(geometry.page_size) + last
    return lengths


def let_idle_blocks_repeat(pinned: Tensor, plan_info: Any, row: int) -> None:
    """Fill what the planner leaves as it finds it: all blocks take the first tile of ``row``, until they get another.

    Several that write the same do no harm.
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
            f"FlashInferPlan.plan: the float workspace of {float_buffer.numel()} bytes is too small for "
            f"this batch, whose split rows alone take {overflow[1]} bytes; raise workspace_bytes"
        ) from error
