"""Differences between FlashInfer's versions, and their kernels."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
from typing import Any

import torch

from compiled_llm_ops.contracts import SCALED_DTYPES, Geometry
from compiled_llm_ops.flashinfer.functors import functors

HEAD_DIMS = (64, 128, 256, 512)  # head sizes with kernels: ``DISPATCH_HEAD_DIM`` in FlashInfer's ``utils.cuh``

QUERY_DTYPES = (torch.float16, torch.bfloat16)

OLDEST, NEWEST_EXCLUSIVE = (0, 6, 13), (0, 8)  # FlashInfer versions that we know


def padded_head_dim(d: int) -> int:
    """Return the head size that ``d`` is stored as: the next one with kernels; ValueError if there is none."""
    for size in HEAD_DIMS:
        if d <= size:
            return size
    raise ValueError(f"head size {d} is larger than {HEAD_DIMS[-1]}, the largest that FlashInfer has kernels for")


@functools.cache
def uniform_q_len_argument() -> tuple[int, ...]:
    """Return the argument of 0.7's prefill planner that 0.6 lacks: no promise of equal lengths. Ends with 0.6."""
    plan = import_flashinfer().BatchPrefillWithPagedKVCacheWrapper.plan
    return (0,) if "uniform_q_len" in inspect.signature(plan).parameters else ()


@functools.cache
def counts_pairs_as_queries() -> bool:
    """Whether split rows get room for as many queries as there are (query, head of the group) pairs. Ends with 0.6."""
    return version_of(import_flashinfer()) < (0, 7)


@functools.cache
def idle_blocks_read_the_plan() -> bool:
    """Whether idle blocks of a captured launch read the plan, as 0.6's planner masks them only if rows are split."""
    # Ends with 0.6.
    return version_of(import_flashinfer()) < (0, 7)


def missing_kernel(geometry: Geometry) -> str | None:
    """Return why FlashInfer has no kernel for a geometry, whose head size need not be padded; None if it has one."""
    if geometry.query_heads % geometry.kv_heads:
        return f"{geometry.query_heads} query heads are no multiple of {geometry.kv_heads} kv heads"
    if geometry.head_dim > HEAD_DIMS[-1]:
        return f"head size {geometry.head_dim} is larger than {HEAD_DIMS[-1]}, the largest that has a kernel"
    if geometry.dtype not in QUERY_DTYPES:
        return f"there is no kernel for {geometry.dtype} queries; use torch.bfloat16 or torch.float16"
    if padded_head_dim(geometry.head_dim) == 512 and geometry.kv_dtype in SCALED_DTYPES:
        return f"FlashInfer has no kernel for heads of size {geometry.head_dim} in pages of {geometry.kv_dtype}"
    return _missing_large_heads(geometry.head_dim) if padded_head_dim(geometry.head_dim) == 512 else None


def _missing_large_heads(head_dim: int) -> str | None:
    """Return why heads stored as 512 have no kernel. Ends with 0.6, whose kernels reject 512 at their launch."""
    try:
        flashinfer = import_flashinfer()
    except ImportError as error:  # asked who else has a kernel, where FlashInfer need not be installed
        return str(error)
    if version_of(flashinfer) >= (0, 7):
        return None
    return (
        f"FlashInfer {flashinfer.__version__} has no kernel for head size {head_dim}; "
        'pip install "flashinfer-python>=0.7,<0.8"'
    )


def sums_parts_wrongly(geometry: Geometry) -> bool:
    """Whether rows must not be split: without a softmax the sum over parts begins with what lies in registers."""
    # Ends with a FlashInfer that clears them (``PersistentVariableLengthAttentionSumKernel``).
    return bool(geometry.function) and not functors().has_softmax(geometry)


def import_flashinfer() -> Any:
    """Import FlashInfer; ImportError, with the way out, if it is not installed or does not import."""
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise ImportError('FlashInfer does not import: pip install ".[cuda]"') from error


def version_of(flashinfer: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", flashinfer.__version__)[:3])
