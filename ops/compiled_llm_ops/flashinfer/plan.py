"""The one module that touches FlashInfer: plan prefill on the host, launch inside a graph, append to the pages.

Decode needs neither a plan nor FlashInfer: see ``triton_attention``.

FlashInfer's planner reads lengths on the host, writes what it decided into a pinned buffer, and copies that to the
device with one ``cudaMemcpyAsync`` on the current stream. The public ``plan()`` around it copies the page table as
well and waits for the device, so it runs once for each geometry, to build or load the kernels; each batch after that
goes to the planner directly. The public ``run()`` launches.

What is private to FlashInfer and used here (``tests/ops/test_flashinfer_contract.py`` checks all of it):

=============================================  ==============================  ========================================
name                                           what for                        ends when
=============================================  ==============================  ========================================
``wrapper._cached_module.plan``, the order of  plan without copying the page   FlashInfer plans from host arrays without
its arguments                                  table and without waiting       a copy
``wrapper._plan_info``,                        hand ``run()`` what was         the same
``wrapper._qo_indptr_last``                    planned, and for how many
                                               tokens
``padded_batch_size`` in it, lowered           launch no blocks without work   the planner counts tiles where
                                               in a graph                      it does not split
``wrapper._int_workspace_buffer``              one wrapper serves many plans,  the same
                                               each with its own workspace
``wrapper._qo_indptr_buf``,                    let ``run()`` read the page     ``run()`` takes the page table
``wrapper._paged_kv_indptr_buf``,              table where it lies
``wrapper._paged_kv_indices_buf``,
``wrapper._paged_kv_last_page_len_buf``
the order of the numbers in ``_plan_info``     name what changed under a       the numbers have names
                                               captured graph
``utils._get_cache_alibi_slopes_buf``          make the tensor that ``run()``  ``run()`` makes no tensor for
                                               would make during a capture     ``pos_encoding_mode="NONE"``
the text of "Buffer overflow when allocating"  say what to do about a full     0.6 is no longer supported
                                               workspace                       (``workspace_size()`` exists in 0.7)
=============================================  ==============================  ========================================

Shapes: B rows, T packed tokens, H query heads, K kv heads, D head dimension (padded), P pages, S page size.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm_ops.contracts import Geometry, PageTable, register_plan

HEAD_DIMS = (64, 128, 256, 512)
"""Head sizes with kernels: ``DISPATCH_HEAD_DIM`` in FlashInfer's ``utils.cuh``."""

QUERY_DTYPES = (torch.float16, torch.bfloat16)

OLDEST, NEWEST_EXCLUSIVE = (0, 6, 13), (0, 8)
"""FlashInfer versions that this module knows."""

_BLOCKS_AT_ONCE = 2  # of a multiprocessor: FlashInfer splits rows into as many as fill the device

STAGING_BUFFERS = 16
"""Plans the host may be ahead of the device: three and more prefills of a model with several attention groups."""

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


class Workspace:
    """What the plans of one device share, allocated once, before any capture.

    The float workspace holds the partial results of rows whose keys were split over several blocks. They are written
    and merged within one launch, so one buffer serves all plans whose launches follow each other on a stream.

    An int workspace holds what a plan decided, from ``plan`` to the last launch that reads it. Two attention groups
    are planned before either launches, and a graph replays from its address, so every plan has one of its own. It is
    as large as the plan can get, not FlashInfer's 8 MiB.

    The pinned buffers the plans are copied from are used in turn and belong to the workspace, since a copy may still
    be on its way when its plan is dropped.

    One thread at a time may plan or launch with the plans of a workspace.

    Attributes:
        device: with index.
        float_buffer: ``[workspace_bytes]`` uint8.
        processors: multiprocessors of the device.
        max_blocks: thread blocks that can be resident on it at once.
    """

    def __init__(self, device: torch.device | str, workspace_bytes: int = 128 * 2**20) -> None:
        """Allocate on ``device``.

        Args:
            device: a CUDA device.
            workspace_bytes: size of the float workspace; ``plan`` says so when it is too small.
        """
        self.float_buffer = torch.zeros(workspace_bytes, dtype=torch.uint8, device=device)
        self.device = self.float_buffer.device
        properties = torch.cuda.get_device_properties(self.device)
        self.processors = properties.multi_processor_count
        # No attention kernel has blocks of fewer than 128 threads.
        self.max_blocks = self.processors * properties.max_threads_per_multi_processor // 128
        self._staging = [(_pinned(64 * 2**10), torch.cuda.Event()) for _ in range(STAGING_BUFFERS)]
        self._turn = 0
        self._wrappers: dict[Geometry, Any] = {}
        self._loading: dict[Geometry, Future[Any]] = {}

    def load(self, geometry: Geometry) -> None:
        """Begin to build or load the kernels for a geometry on other threads, while this one traces what calls them."""
        self._loading[geometry] = _loaders.submit(_on_device, self.device, _make_wrapper, geometry, self.float_buffer)
        # What goes wrong in that one goes wrong again at the first launch.
        _loaders.submit(_on_device, self.device, _append_one_token, geometry, self.device)

    def is_loading(self, geometry: Geometry) -> bool:
        """Whether ``wrapper`` would wait for kernels that ``load`` has begun with."""
        return geometry in self._loading and not self._loading[geometry].done()

    def wrapper(self, geometry: Geometry) -> Any:
        """Return FlashInfer's wrapper for a geometry; waits for its kernels, or builds or loads them here."""
        if geometry not in self._wrappers:
            loading = self._loading.pop(geometry, None)
            made = _make_wrapper(geometry, self.float_buffer) if loading is None else loading.result()
            self._wrappers[geometry] = made
        return self._wrappers[geometry]

    @contextmanager
    def staging(self, nbytes: int) -> Iterator[Tensor]:
        """Yield pinned memory that no copy reads any more; copies out of it are issued within the block.

        Waits only when the host is ``STAGING_BUFFERS`` plans ahead of the device.

        Args:
            nbytes: size it must have at least.

        Yields:
            ``[>= nbytes]`` uint8.
        """
        buffer, copied = self._staging[self._turn]
        copied.synchronize()
        if buffer.numel() < nbytes:
            buffer = _pinned(_power_of_two(nbytes))
        yield buffer
        copied.record(torch.cuda.current_stream(self.device))
        self._staging[self._turn] = buffer, copied
        self._turn = (self._turn + 1) % len(self._staging)


class FlashInferPlan:
    """A plan for the prefills and extends that lie in one page table; see ``plans.AttentionPlan``.

    Call ``plan`` and the launches on one stream, or order the streams: the copy that ``plan`` issues overwrites what
    earlier launches read.
    """

    def __init__(
        self,
        geometry: Geometry,
        table: PageTable,
        *,
        rows: int,
        workspace: Workspace,
        static: bool,
        split: bool | None = None,
    ) -> None:
        """Register for ``table``; the first plan of a geometry builds or loads its kernels, later ones are cheap.

        Args:
            geometry: the attention group.
            table: device buffers at fixed addresses for exactly these rows, uploaded by the caller before a launch;
                every row has at least one page.
            rows: B.
            workspace: of the table's device.
            static: launches are captured in CUDA graphs, which replay after later calls of ``plan``. The number of
                rows is constant, and the first plan sets the largest number of tokens. Where it is not ``split``, the
                last row is best a short one: blocks without work repeat its first.
            split: whether blocks may share the keys of a row, which FlashInfer then makes them do wherever blocks are
                few; a static plan merges what they found even where they share none. None for what
                ``worth_splitting`` says of each batch, which a static plan has to be told.

        Raises:
            ValueError: the table does not have ``rows`` rows, a static plan is not told whether to split, or FlashInfer
                has no kernel for the geometry.
            ImportError: FlashInfer is missing.

        Source:
            FlashInfer ``BatchPrefillWithPagedKVCacheWrapper``, backend ``fa2`` (https://arxiv.org/abs/2501.01005).
        """
        _check_geometry(geometry)
        if table.indptr.shape[0] != rows + 1 or table.last_page_len.shape[0] != rows:
            raise ValueError(
                f"FlashInferPlan: {rows} rows need indptr [{rows + 1}] and last_page_len [{rows}]; got "
                f"[{table.indptr.shape[0]}] and [{table.last_page_len.shape[0]}]"
            )
        if static and split is None:
            raise ValueError("FlashInferPlan: split=None leaves it to each batch; static=True needs True or False")
        self.geometry = geometry
        self.table = table
        self._rows = rows
        self._static = static
        self._split = split
        self._workspace = workspace
        if not workspace.is_loading(geometry):
            workspace.wrapper(geometry)
        self._int_buffer = torch.empty(0, dtype=torch.uint8, device=workspace.device)
        self._tokens: int | None = None
        self._plan_info: Any = None
        self._frozen: tuple[int, ...] | None = None
        self._waiting: PageTable | None = None
        register_plan(table.indptr, rows, geometry, self)

    def plan(self, host: PageTable) -> None:
        """Decide how the kernels divide the batch, and queue the copy of that to the device. Never waits for it.

        While the kernels are being built, that is left to the first launch.

        Args:
            host: the table's columns on the host, int32, of exact sizes. Not copied to the device here, and free to
                be rewritten afterwards.

        Raises:
            ValueError: the columns are not on the host, have the wrong type or size, or a static plan got more
                tokens than its first one.
            RuntimeError: the float workspace is too small, a graph is being captured, or FlashInfer decided something
                else for a batch that a captured graph has fixed; the graph must not be replayed then.
        """
        _check_host(host, self._rows)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("FlashInferPlan.plan: a CUDA graph is being captured; plan before the capture")
        if self._workspace.is_loading(self.geometry):
            self._waiting = PageTable(*(column.clone() for column in host))
        else:
            self._plan(host)

    def _plan(self, host: PageTable) -> None:
        self._waiting = None
        tokens = self._tokens_to_plan(host)
        if self._int_buffer.numel() < (needed := self._int_bytes(tokens)):
            # Never under a captured graph: the rows are constant, and so is the number of tokens.
            self._int_buffer = self._int_buffer.new_empty(_power_of_two(needed))
        workspace, lengths = self._workspace, _lengths(self.geometry, host)
        split = self._split
        if split is None:
            split = worth_splitting(self.geometry, np.diff(host.qo_indptr.numpy()), lengths, workspace.processors)
        arguments = planner_arguments(self.geometry, host, lengths, tokens=tokens, static=self._static, split=split)
        with workspace.staging(self._int_buffer.numel()) as pinned, _overflow_explained(workspace):
            given = workspace.float_buffer, self._int_buffer, pinned, *arguments
            planner = workspace.wrapper(self.geometry)._cached_module
            if self._static and not split and _idle_blocks_read_the_plan():
                places = self._plan_info if self._tokens == tokens else planner.plan(*given)
                _let_idle_blocks_repeat(pinned, places, row=self._rows - 1)
            plan_info = planner.plan(*given)
        if self._static and not split:
            plan_info = _with_blocks_for_tiles(plan_info, self.geometry, tokens, self._rows)
        self._check_frozen(plan_info)
        self._plan_info, self._tokens = plan_info, tokens

    def freeze(self) -> None:
        """Note that a graph has captured a launch: from now on ``plan`` raises if a number it baked in changes.

        Every number of a plan is baked in: the sizes and switches choose kernels and grids, and the offsets are added
        to the workspaces' addresses before the kernels get them.

        Raises:
            RuntimeError: the plan is not static, or nothing was planned yet.
        """
        if not self._static or self._plan_info is None:
            raise RuntimeError("FlashInferPlan.freeze: only a static plan that has planned a batch can be frozen")
        self._frozen = tuple(int(number) for number in self._plan_info)

    def run(
        self,
        query: Tensor,
        pages: Tensor,
        out: Tensor,
        lse: Tensor | None,
        scale: float,
        table: PageTable | None = None,
    ) -> None:
        """Launch attention on the current stream. Launch once before a capture, so that the kernels are loaded.

        Args:
            query: ``[T, H, D]``, ``geometry.dtype``, with the planned number of tokens.
            pages: ``[P, 2, K, S, D]``, ``geometry.kv_dtype``.
            out: ``[T, H, D]``, contiguous, written.
            lse: ``[T, H]`` float32, contiguous, written: the log-sum-exp in base 2. None where it is not wanted.
            scale: factor on the logits before the softmax.
            table: the page table as the launcher received it, which in a compiled graph may be the result of an
                earlier step of that graph; the plan's own where None.

        Raises:
            RuntimeError: nothing was planned yet.
            ValueError: shapes or dtypes do not fit what was planned.
        """
        if self._waiting is not None:
            self._plan(self._waiting)
        if self._plan_info is None:
            raise RuntimeError("FlashInferPlan.run: nothing was planned; call plan() before the launch")
        self._check_launch(query, pages, out, lse)
        wrapper = self._workspace.wrapper(self.geometry)
        wrapper._plan_info = self._plan_info
        wrapper._int_workspace_buffer = self._int_buffer
        wrapper._qo_indptr_last = self._tokens
        self._point_at(self.table if table is None else table)
        try:
            wrapper.run(
                q=_readable(query),
                paged_kv_cache=pages,
                q_scale=scale,
                out=out,
                lse=lse,
                return_lse=lse is not None,
            )
        finally:
            self._point_at(self.table)  # a tensor that a graph made must not outlive its capture

    def _point_at(self, table: PageTable) -> None:
        """Let the wrapper read the page table there."""
        wrapper = self._workspace.wrapper(self.geometry)
        wrapper._qo_indptr_buf = table.qo_indptr
        wrapper._paged_kv_indptr_buf = table.indptr
        wrapper._paged_kv_indices_buf = table.indices
        wrapper._paged_kv_last_page_len_buf = table.last_page_len

    def _tokens_to_plan(self, host: PageTable) -> int:
        """Return T; in a static plan the first batch's, which the graph was captured with."""
        tokens = int(host.qo_indptr[-1])
        if not self._static or self._tokens is None:
            return tokens
        if tokens > self._tokens:
            raise ValueError(
                f"FlashInferPlan.plan: {tokens} tokens in a static plan whose first batch had {self._tokens}; "
                "plan the largest batch first"
            )
        return self._tokens

    def _int_bytes(self, tokens: int) -> int:
        """Return an upper bound of the bytes that FlashInfer plans for ``tokens`` tokens take.

        For each block of the launch up to three int32 and a bool, for each row and each token one int32 more, and
        some alignment. Split rows fill the device at most once (``max_grid_size`` in scheduler.cuh); rows that are not
        split take a block for each started tile of 16 or more (token, head of the group) pairs.
        """
        group = self.geometry.query_heads // self.geometry.kv_heads
        tiles = tokens * group // 16 + self._rows
        blocks = max(self._workspace.max_blocks // self.geometry.kv_heads, tiles) + 1
        return 13 * blocks + 4 * (self._rows + tokens) + 512

    def _check_frozen(self, plan_info: Any) -> None:
        if self._frozen is None:
            return
        changed = [
            f"{name} was {old} and is now {int(new)}"
            for name, old, new in zip(PLAN_FIELDS, self._frozen, plan_info, strict=True)
            if old != int(new)
        ]
        if changed:
            raise RuntimeError(
                f"FlashInferPlan.plan: a captured graph of {self._rows} rows no longer fits its plan: "
                f"{', '.join(changed)}; record the graph again before replaying it"
            )

    def _check_launch(self, query: Tensor, pages: Tensor, out: Tensor, lse: Tensor | None) -> None:
        geometry = self.geometry
        expected = (self._tokens, geometry.query_heads, geometry.head_dim)
        stored = (2, geometry.kv_heads, geometry.page_size, geometry.head_dim)
        if query.shape != expected or pages.shape[1:] != stored:
            raise ValueError(
                f"FlashInferPlan.run: planned for query {expected} and pages [P, {', '.join(map(str, stored))}]; got "
                f"{tuple(query.shape)} and {tuple(pages.shape)}"
            )
        if not out.is_contiguous() or (lse is not None and not lse.is_contiguous()):
            raise ValueError("FlashInferPlan.run: out and lse must be contiguous")


def append(
    key: Tensor, value: Tensor, pages: Tensor, token_rows: Tensor, token_positions: Tensor, table: PageTable
) -> None:
    """Launch the copy of new keys and values into the pages of their rows.

    Args:
        key: ``[T, K, D]``; strides that FlashInfer cannot read are copied first.
        value: like ``key``.
        pages: ``[P, 2, K, S, D]``, written; keys and values are converted to its dtype.
        token_rows: ``[T]`` int32, the row of each token.
        token_positions: ``[T]`` int32, each token's index in its row's cache. Not bounded by what the row owns.
        table: on the device; ``qo_indptr`` is not read.

    Source:
        FlashInfer ``flashinfer.append_paged_kv_cache``, layout HND.
    """
    if key.shape[0] == 0:
        return  # FlashInfer would launch a grid of no blocks, which CUDA rejects
    _flashinfer().append_paged_kv_cache(
        append_key=_readable(key.to(pages.dtype)),
        append_value=_readable(value.to(pages.dtype)),
        batch_indices=token_rows,
        positions=token_positions,
        paged_kv_cache=pages,
        kv_indices=table.indices,
        kv_indptr=table.indptr,
        kv_last_page_len=table.last_page_len,
        kv_layout="HND",
    )


def padded_head_dim(d: int) -> int:
    """Return the head size that ``d`` is stored as: the next one with kernels.

    Raises:
        ValueError: ``d`` is larger than any.
    """
    for size in HEAD_DIMS:
        if d <= size:
            return size
    raise ValueError(f"head size {d} is larger than {HEAD_DIMS[-1]}, the largest that FlashInfer has kernels for")


def missing_for_cuda() -> list[str]:
    """Return what keeps the ops from running on CUDA, each with the way out; empty where nothing does."""
    missing = []
    if problem := _flashinfer_problem():
        missing.append(problem)
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return missing  # brings the kernels along, so nothing is compiled
    if _nvcc() is None:
        missing.append(
            "nvcc is not found, with which FlashInfer compiles its kernels (looked at FLASHINFER_NVCC, CUDA_HOME, "
            "CUDA_PATH, PATH and /usr/local/cuda): install the CUDA toolkit and set CUDA_HOME to it, or install the "
            "flashinfer-jit-cache of your CUDA version, which brings the kernels along"
        )
    if shutil.which("ninja") is None:
        missing.append(
            "ninja is not on PATH, with which FlashInfer compiles its kernels: pip install ninja, and activate the "
            "environment (or put its bin folder on PATH)"
        )
    return missing


# ---- FlashInfer's planner


def split_bytes(geometry: Geometry, processors: int) -> int:
    """Return the bytes of float workspace that any plan takes at most which is not static.

    Args:
        geometry: the attention group.
        processors: multiprocessors of the device.
    """
    return _partial_results(geometry, _most_blocks(geometry, processors))


def static_split_bytes(geometry: Geometry, tokens: int, rows: int, processors: int) -> int:
    """Return the bytes of float workspace that a static plan takes at most.

    Such a plan counts every row as split, since a later batch's may be, and so has room for all queries.

    Args:
        geometry: the attention group.
        tokens: T of the first batch, the largest.
        rows: B.
        processors: multiprocessors of the device.
    """
    tiles = _most_tiles(geometry, tokens, rows, _largest_tile(geometry))
    return _partial_results(geometry, max(_most_blocks(geometry, processors), tiles))


def _most_tiles(geometry: Geometry, tokens: int, rows: int, tile: int) -> int:
    """Return how many tiles of (token, head of the group) pairs so many tokens of so many rows have at most."""
    return -(-tokens * (geometry.query_heads // geometry.kv_heads) // tile) + rows - 1


def _most_blocks(geometry: Geometry, processors: int) -> int:
    """Return how many blocks split rows get for each kv head."""
    return _BLOCKS_AT_ONCE * processors // geometry.kv_heads


def _largest_tile(geometry: Geometry) -> int:
    """Return the most (token, head of the group) pairs in a block."""
    return 128 if geometry.head_dim < 256 else 64 if geometry.head_dim < 512 else 32


def _partial_results(geometry: Geometry, blocks: int) -> int:
    """Return the bytes of a result and a log-sum-exp in float32 for each query, with room to align both."""
    pairs = blocks * _largest_tile(geometry)
    queries = pairs if _counts_pairs_as_queries() else -(-pairs * geometry.kv_heads // geometry.query_heads)
    return geometry.query_heads * queries * (geometry.head_dim + 1) * 4 + 32


def worth_splitting(
    geometry: Geometry, queries: NDArray[np.integer[Any]], lengths: NDArray[np.integer[Any]], processors: int
) -> bool:
    """Return whether a prefill is faster if blocks share the keys of a row, and merge what each has found.

    A block goes over the keys of its tile of queries one after the other, so the longest row sets the time unless its
    keys are shared; faster by two fifths as long as no two blocks are on one multiprocessor. Merging takes as long as
    going over so many keys. FlashInfer itself shares them whenever blocks would otherwise be fewer than fill the
    device: on an H200, 1 row of 512 new tokens and 32 query heads takes 60 us instead of 30.

    Args:
        geometry: the attention group.
        queries: ``[B]``, new tokens of each row.
        lengths: ``[B]``, all tokens of each row.
        processors: multiprocessors of the device.

    Source:
        Measured on an H200 with 16 query heads, 8 kv heads of size 128, 1 and 8 rows, 16 to 2,048 new tokens behind 0
        to 2,048: where it chooses the slower way, that is slower by at most 3%.
    """
    tile = _largest_tile(geometry)
    seen = lengths if geometry.window_left < 0 else np.minimum(lengths, geometry.window_left + tile)
    tiles = -(-queries * (geometry.query_heads // geometry.kv_heads) // tile)
    longest, tokens = int(seen[tiles > 0].max(initial=0)), int(queries.sum())
    alone = _most_tiles(geometry, tokens, len(queries), tile) * geometry.kv_heads <= processors
    shared = int(tiles @ seen) * geometry.kv_heads / (_BLOCKS_AT_ONCE * processors)
    merging = 64 + tokens * geometry.query_heads / 18
    return longest * (0.6 if alone else 1) - shared > merging


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


def _with_blocks_for_tiles(plan_info: Any, geometry: Geometry, tokens: int, rows: int) -> list[int]:
    """Return a static plan that is not split with as many blocks as there can be tiles of queries.

    The planner gives it as many as fill the device. Those without work would have the others share multiprocessors: on
    an H200, 1 row of 512 new tokens takes 29 us instead of 19.
    """
    info = dict(zip(PLAN_FIELDS, map(int, plan_info), strict=True))
    return [*(info | {"padded_batch_size": _most_tiles(geometry, tokens, rows, info["cta_tile_q"])}).values()]


def _lengths(geometry: Geometry, host: PageTable) -> NDArray[np.int32]:
    """Return ``[B]``, all tokens of each row."""
    # In numpy, which takes a tenth of the time over so few numbers.
    pages, last = np.diff(host.indptr.numpy()), host.last_page_len.numpy()
    lengths: NDArray[np.int32] = (pages - 1) * np.int32(geometry.page_size) + last
    return lengths


# ---- differences between FlashInfer's versions


@functools.cache
def uniform_q_len_argument() -> tuple[int, ...]:
    """Return what 0.7's prefill planner takes beyond 0.6's: no promise about equal lengths. Ends with 0.6."""
    plan = _flashinfer().BatchPrefillWithPagedKVCacheWrapper.plan
    return (0,) if "uniform_q_len" in inspect.signature(plan).parameters else ()


@functools.cache
def _counts_pairs_as_queries() -> bool:
    """Whether split rows get room for as many queries as there are (query, head of the group) pairs. Ends with 0.6."""
    return _version(_flashinfer()) < (0, 7)


@functools.cache
def _idle_blocks_read_the_plan() -> bool:
    """Whether blocks that a captured launch has no work for go by what lies in the plan. Ends with 0.6.

    Its planner masks them only where rows are split.
    """
    return _version(_flashinfer()) < (0, 7)


def _let_idle_blocks_repeat(pinned: Tensor, plan_info: Any, row: int) -> None:
    """Fill what the planner leaves as it finds it: all blocks take the first tile of ``row``, until they get another.

    Several that write the same do no harm.
    """
    info = dict(zip(PLAN_FIELDS, map(int, plan_info), strict=True))
    columns = {"request_indices_offset": row, "qo_tile_indices_offset": 0, "kv_tile_indices_offset": 0}
    for name, value in columns.items():
        column = pinned[info[name] : info[name] + 4 * info["padded_batch_size"]]
        column.numpy().view(np.int32)[:] = value


def _prefill_takes(head_dim: int) -> bool:
    """Whether kernels exist: those of 0.6 reject 512 at their launch. Ends with 0.6."""
    return head_dim < 512 or _version(_flashinfer()) >= (0, 7)


# ---- around them


def _flashinfer() -> Any:
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise ImportError('FlashInfer does not import: pip install "compiled-llm[cuda]"') from error


def _make_wrapper(geometry: Geometry, float_buffer: Tensor) -> Any:
    """Return a wrapper whose kernels are loaded, by planning one row of one token in public."""
    flashinfer = _flashinfer()
    indptr = torch.tensor([0, 1], dtype=torch.int32)
    indices, last_page_len = torch.tensor([0], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    # Whether launches are captured is the planner's to know, not the wrapper's: run() is the same for both.
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        float_workspace_buffer=float_buffer, kv_layout="HND", backend="fa2"
    )
    wrapper.plan(
        qo_indptr=indptr,
        paged_kv_indptr=indptr,
        paged_kv_indices=indices,
        paged_kv_last_page_len=last_page_len,
        num_qo_heads=geometry.query_heads,
        num_kv_heads=geometry.kv_heads,
        head_dim_qk=geometry.head_dim,
        page_size=geometry.page_size,
        causal=True,
        pos_encoding_mode="NONE",
        sm_scale=1.0,  # each launch has its own
        window_left=geometry.window_left,
        logits_soft_cap=geometry.logits_soft_cap,
        q_data_type=geometry.dtype,
        kv_data_type=geometry.kv_dtype,
        o_data_type=geometry.dtype,
    )
    # Its own int workspace has served; every plan brings one.
    small = torch.empty(16, dtype=torch.uint8, device=float_buffer.device)
    wrapper.reset_workspace_buffer(float_workspace_buffer=float_buffer, int_workspace_buffer=small)
    importlib.import_module("flashinfer.utils")._get_cache_alibi_slopes_buf(geometry.query_heads, float_buffer.device)
    return wrapper


def _append_one_token(geometry: Geometry, device: torch.device) -> None:
    """Build or load the kernel that writes to pages, by writing one token."""
    size = (1, 2, geometry.kv_heads, geometry.page_size, geometry.head_dim)
    pages = torch.empty(size, dtype=geometry.kv_dtype, device=device)
    zero, one = (torch.tensor([number], dtype=torch.int32, device=device) for number in (0, 1))
    indptr = torch.cat([zero, one])
    append(pages[0, :1, :, 0], pages[0, :1, :, 0], pages, zero, zero, PageTable(indptr, indptr, zero, one))


def _on_device(device: torch.device, function: Callable[..., Any], *args: Any) -> Any:
    with torch.cuda.device(device):
        return function(*args)


_loaders = ThreadPoolExecutor(2, "compiled_llm_kernels")


@contextmanager
def _overflow_explained(workspace: Workspace) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        overflow = re.search(r"allocating memory for \w+_tmp_[vs] with size (\d+)", str(error))
        if overflow is None:
            raise
        raise RuntimeError(
            f"FlashInferPlan.plan: the float workspace of {workspace.float_buffer.numel()} bytes is too small for "
            f"this batch, whose split rows alone take {overflow[1]} bytes; raise workspace_bytes"
        ) from error


def _check_geometry(geometry: Geometry) -> None:
    if geometry.query_heads % geometry.kv_heads:
        raise ValueError(f"{geometry.query_heads} query heads are no multiple of {geometry.kv_heads} kv heads")
    if geometry.head_dim not in HEAD_DIMS:
        raise ValueError(f"FlashInfer has no kernel for head size {geometry.head_dim}; pad it to padded_head_dim()")
    if geometry.dtype not in QUERY_DTYPES:
        raise ValueError(f"FlashInfer has no kernel for {geometry.dtype} queries; use torch.bfloat16 or torch.float16")
    if not _prefill_takes(geometry.head_dim):
        raise ValueError(
            f"FlashInfer {_flashinfer().__version__} has no kernel for head size {geometry.head_dim}; "
            'pip install "flashinfer-python>=0.7,<0.8"'
        )


def _check_host(host: PageTable, rows: int) -> None:
    """The planner reads the columns by address and trusts their place, type and size."""
    for name, length in (("qo_indptr", rows + 1), ("indptr", rows + 1), ("last_page_len", rows)):
        column = getattr(host, name)
        if column.device.type != "cpu" or column.dtype != torch.int32 or column.shape != (length,):
            raise ValueError(
                f"FlashInferPlan.plan: {name} must be int32 [{length}] on the host; got {column.dtype} "
                f"{list(column.shape)} on {column.device}"
            )
        if not column.is_contiguous():
            raise ValueError(f"FlashInferPlan.plan: {name} must be contiguous")


def _readable(states: Tensor) -> Tensor:
    """Return ``states`` ``[T, heads, D]`` as it is where the kernels can read it: in pieces of 16 bytes along D."""
    piece = 16 // states.element_size()
    if states.stride(2) == 1 and not (states.stride(0) % piece or states.stride(1) % piece or states.data_ptr() % 16):
        return states
    return states.clone(memory_format=torch.contiguous_format)


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _version(flashinfer: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", flashinfer.__version__)[:3])


def _flashinfer_problem() -> str | None:
    try:
        flashinfer = importlib.import_module("flashinfer")
    except Exception as error:  # a mismatched flashinfer-jit-cache raises RuntimeError, a broken CUDA OSError
        return f'FlashInfer does not import ({error}): pip install "compiled-llm[cuda]"'
    if not OLDEST <= _version(flashinfer) < NEWEST_EXCLUSIVE:
        return (
            f"FlashInfer {flashinfer.__version__} is outside 0.6.13 to 0.7, the versions that are supported: "
            'pip install "flashinfer-python>=0.6.13,<0.8"'
        )
    return None


def _nvcc() -> str | None:
    """Return the nvcc that FlashInfer would run, looking where it looks and in its order."""
    if compiler := os.environ.get("FLASHINFER_NVCC"):
        return shutil.which(compiler)
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return shutil.which(os.path.join(home, "bin", "nvcc"))
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
