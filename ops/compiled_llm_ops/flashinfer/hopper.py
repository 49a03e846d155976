"""FlashInfer's kernels for Hopper, ``fa3``: which geometries have them, whether they are built, and when they pay."""

# They attend up to twice as fast as ``fa2``, but take a minute or two to build. So a process uses them only if they
# were there when it first asked, and otherwise builds them, at the lowest priority, for those that come after it: what
# it computes does not change while it runs.

from __future__ import annotations

import functools
import importlib
import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch

from compiled_llm_ops.contracts import Geometry
from compiled_llm_ops.flashinfer.install import find_nvcc
from compiled_llm_ops.flashinfer.prebuilt import is_built, kernels_are_given
from compiled_llm_ops.flashinfer.splitting import whole_tiles, worth_splitting

logger = logging.getLogger("compiled_llm.graphs")

FA3 = 2  # the schedule of plans that are for these kernels; ``WHOLE`` and ``SPLIT`` are for ``fa2``

FIELDS: tuple[str, ...] = (
    "qo_tile_indices_offset",
    "qo_indptr_offset",
    "kv_indptr_offset",
    "qo_len_offset",
    "kv_len_offset",
    "head_indices_offset",
    "work_indptr_offset",
    "batch_indices_offset",
    "same_schedule_for_all_heads",
)
"""The numbers of a plan, in FlashInfer's order: ``PrefillPlanSM90Info`` in ``scheduler.cuh``."""

HEAD_DIMS = (128,)  # FlashInfer also has kernels for 64 and 256, which have not been tested here
LEAST_TOKENS = 32  # of the longest row: a block has 128 queries, and of fewer most is padding

SHORT = 384
"""Tokens of all rows up to which what ``fa3`` gains is lost on the host, where its plans take longer."""
# First tokens of 28 layers on an H100 came 34 us later after 128 tokens, and 58 us earlier after 384.

_LISTS = 7  # of as many int32 as there are tiles, each aligned to 16 bytes


def is_there(geometry: Geometry, device: torch.device) -> bool:
    """Whether a device has these kernels for a geometry, already built; the same as long as the process lives."""
    return has_kernels(device) and _fits(geometry) and _was_built(geometry._replace(query_heads=1, kv_heads=1))


def takes_fa3(
    groups: Sequence[Geometry], queries: Sequence[int], lengths: Sequence[int], device: torch.device, processors: int
) -> bool:
    """Return whether a batch runs by these kernels; the arguments are those of ``Backend.best_schedule``."""
    if sum(lengths) <= SHORT:
        return False
    return all(is_there(group, device) and worth_fa3(group, queries, lengths, processors) for group in groups)


def plan_bytes(geometry: Geometry, tokens: int, rows: int, processors: int) -> int:
    """Return an upper bound on the size of the plan of any batch with at most these tokens and rows, in bytes."""
    works = _tiles(geometry, tokens, rows) * geometry.query_heads
    return _LISTS * (4 * works + 16) + 4 * (processors + 1) + 16


def worth_fa3(geometry: Geometry, queries: Sequence[int], lengths: Sequence[int], processors: int) -> bool:
    """Return whether a prefill of ``queries`` ``[B]`` new tokens of ``lengths`` ``[B]`` is faster than by ``fa2``."""
    # A block has one head of 128 queries, so rows of few new tokens, and heads that share keys, read these several
    # times; and it goes over all keys of its queries, so after long beginnings ``fa2`` gains by sharing them.
    # Microseconds on an H100, fitted to 242 batches: 16 and 32 query heads, 8 kv heads of size 128, 1 to 65 rows, 1 to
    # 32,768 new tokens after 0 to 8,192. Its choices take 0.6% longer than the best on average, at most 28%.
    tokens, longest = sum(queries), max(lengths, default=0)
    if max(queries, default=0) < LEAST_TOKENS:
        return False
    if geometry.window_left >= 0:
        longest = min(longest, geometry.window_left + 128)
    heads, kv_heads, group = geometry.query_heads, geometry.kv_heads, geometry.query_heads // geometry.kv_heads
    work = heads * _pairs(geometry, queries, lengths, 1) / processors
    fa3 = 5 + 0.0075 * max(longest, 1.2 * work)
    work = kv_heads * _pairs(geometry, queries, lengths, group) / (2 * processors)
    if worth_splitting(geometry, queries, lengths, processors):
        return fa3 < 8 + 0.0008 * tokens * heads + 0.032 * work
    alone = whole_tiles(geometry, queries) * kv_heads <= processors
    return fa3 < 5 + max(0.022 * longest * (0.6 if alone else 1), 0.025 * work)


def _pairs(geometry: Geometry, queries: Sequence[int], lengths: Sequence[int], group: int) -> float:
    """Return the keys that tiles of 128 (query, head of the group) pairs go over, all tiles together."""
    most = float("inf") if geometry.window_left < 0 else geometry.window_left + 64
    both = zip(queries, lengths, strict=True)
    return sum(-(-count * group // 128) * min(length - count / 2, most) for count, length in both)


def _tiles(geometry: Geometry, tokens: int, rows: int) -> int:
    return -(-tokens // (192 if geometry.head_dim == 64 else 128)) + rows - 1


# ---- which are there


def _fits(geometry: Geometry) -> bool:
    # Functors that layers bring along are for ``fa2``.
    return geometry.head_dim in HEAD_DIMS and geometry.kv_dtype == geometry.dtype and not geometry.function


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether a device runs FlashInfer's kernels for Hopper."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return bool(importlib.import_module("flashinfer.utils").is_sm90a_supported(device))


@functools.cache
def _was_built(geometry: Geometry) -> bool:
    return is_built(_name(geometry))


def _name(geometry: Geometry) -> str:
    """Return FlashInfer's name of the module, as ``BatchPrefillWithPagedKVCacheWrapper.plan`` asks for it."""
    modules: Any = importlib.import_module("flashinfer.jit.attention.modules")
    return str(modules.get_batch_prefill_uri(*_module_of(geometry)))


def _module_of(geometry: Geometry) -> tuple[Any, ...]:
    dtypes = (geometry.dtype, geometry.kv_dtype, geometry.dtype, torch.int32)
    no_rotary, half_precision = 0, False
    masks = geometry.window_left >= 0, geometry.logits_soft_cap > 0
    return ("fa3", *dtypes, geometry.head_dim, geometry.head_dim, no_rotary, *masks, half_precision)


# ---- building them for later processes

_builds: dict[str, threading.Thread] = {}
_one_at_a_time = threading.Lock()


def build_for_later(geometry: Geometry, device: torch.device) -> None:
    """Begin to build the kernels for a geometry, for later processes, if they are missing and there is a compiler."""
    if not (has_kernels(device) and _fits(geometry)) or is_there(geometry, device) or kernels_are_given():
        return
    if find_nvcc() is None or os.environ.get("FLASHINFER_DISABLE_JIT"):
        return
    name = _name(geometry)
    if name not in _builds:
        logger.info("building FlashInfer's fa3 kernels in the background, for processes that start later: %s", name)
        _builds[name] = threading.Thread(target=_build, args=(geometry,), name=f"build {name[:40]}", daemon=True)
        _builds[name].start()


def wait_for_builds() -> None:
    """Wait until all that ``build_for_later`` has begun is built."""
    for thread in list(_builds.values()):
        thread.join()


def _build(geometry: Geometry) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of this thread, and of the compilers it starts
    modules: Any = importlib.import_module("flashinfer.jit.attention.modules")
    with _one_at_a_time:
        try:
            modules.gen_batch_prefill_module(*_module_of(geometry)).build(verbose=False)
        except Exception as error:  # fa2 goes on
            logger.warning("compiled_llm: FlashInfer's fa3 kernels could not be built, prefill stays slower: %s", error)
