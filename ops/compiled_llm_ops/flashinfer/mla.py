"""FlashInfer's kernels for latents: their planner's arguments and results, their memory, and a launch."""

# The planner writes lists of fixed sizes, whatever the batch, and every block reads its part of them, so that a
# captured launch has the numbers of any batch with as many tokens and rows. It writes the rows' lengths, too: a decode
# step is planned again for each token.
# Shapes: B rows, T packed tokens, H query heads, R latent size, E size of the rotated part.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_llm_ops.contracts import Geometry
from compiled_llm_ops.contracts.latent import PlannedLatentAttention
from compiled_llm_ops.flashinfer.append import readable
from compiled_llm_ops.flashinfer.hopper import has_kernels
from compiled_llm_ops.flashinfer.versions import QUERY_DTYPES, import_flashinfer
from compiled_llm_ops.protocol import KERNELS

SIZES = (512, 64)  # r and E, the only ones that the kernels are made for and tested with

FIELDS: tuple[str, ...] = (
    "num_blks_x",
    "num_blks_y",
    "q_indptr_offset",
    "kv_indptr_offset",
    "partial_indptr_offset",
    "merge_packed_offset_start_offset",
    "merge_packed_offset_end_offset",
    "merge_partial_packed_offset_start_offset",
    "merge_partial_packed_offset_end_offset",
    "merge_partial_stride_offset",
    "q_len_offset",
    "kv_len_offset",
    "q_start_offset",
    "kv_start_offset",
    "kv_end_offset",
    "work_indptr_offset",
    "partial_o_offset",
    "partial_lse_offset",
)
"""The numbers of a plan, in FlashInfer's order: ``MLAPlanInfo`` in ``scheduler.cuh``."""

MOST_WORKS = 16384
"""Tiles of queries, and parts of their keys, that the lists have room for: ``max_total_num_works``, unchecked there."""

_TILE = 64
_LISTS_OF_WORKS, _LISTS_OF_BLOCKS = 9, 5  # int32 each


def missing_kernel(geometry: Geometry) -> str | None:
    """Return why FlashInfer has no kernel for latents of a geometry; None if it has one."""
    if (geometry.head_dim, geometry.rope_size) != SIZES:
        return (
            f"FlashInfer has no kernel for latents of {geometry.head_dim} + {geometry.rope_size} numbers; there is one "
            f"for {SIZES[0]} + {SIZES[1]}"
        )
    if geometry.dtype not in QUERY_DTYPES or geometry.kv_dtype != geometry.dtype:
        return f"there is no kernel for latents of {geometry.kv_dtype}; use torch.bfloat16 or torch.float16"
    return None


def plan_bytes(processors: int) -> int:
    """Return the size of a plan, in bytes: lists of fixed sizes, each aligned to 16 bytes."""
    return 4 * (_LISTS_OF_WORKS * MOST_WORKS + _LISTS_OF_BLOCKS * (processors + 4))


def workspace_bytes(geometry: Geometry, processors: int) -> int:
    """Return the size of the workspace of a plan, in bytes: two tiles of partial results for each multiprocessor."""
    queries = 2 * _TILE * processors
    return queries * (2 * geometry.head_dim + 4) + 32


def check_works(geometry: Geometry, tokens: int, rows: int, processors: int) -> None:
    """Raise ValueError if a batch may have more tiles, and parts of their keys, than the planner has room for."""
    works = tokens * geometry.query_heads // _TILE + rows + processors
    if works > MOST_WORKS:
        raise ValueError(
            f"plan_paged_attention: {tokens} tokens of {rows} rows with {geometry.query_heads} heads are up to {works} "
            f"tiles, and FlashInfer's plans for latents have room for {MOST_WORKS}; plan fewer tokens at a time "
            "(prefill_tokens of wrap)"
        )


def planner_arguments(geometry: Geometry, columns: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Return what the planner takes besides memory; ``columns`` are where queries and pages begin, and lengths."""
    causal = True
    return (*columns, geometry.query_heads, geometry.head_dim, causal)


def make_wrapper(geometry: Geometry, buffer: Tensor) -> Any:
    """Return a wrapper with loaded kernels, ``fa3`` on Hopper, by a public plan of one row of one token."""
    indptr, zero, one = (torch.tensor(of, dtype=torch.int32, device="cpu") for of in ([0, 1], [0], [1]))
    kernels = "fa3" if has_kernels(buffer.device) else "fa2"
    wrapper = import_flashinfer().BatchMLAPagedAttentionWrapper(float_workspace_buffer=buffer, backend=kernels)
    wrapper.plan(
        qo_indptr=indptr,
        kv_indptr=indptr,
        kv_indices=zero,
        kv_len_arr=one,
        num_heads=geometry.query_heads,
        head_dim_ckv=geometry.head_dim,
        head_dim_kpe=geometry.rope_size,
        page_size=geometry.page_size,
        causal=True,
        sm_scale=1.0,  # each launch has its own
        q_data_type=geometry.dtype,
        kv_data_type=geometry.kv_dtype,
    )
    # Its own memory has served: every plan brings some.
    wrapper._int_workspace_buffer = wrapper._pin_memory_int_workspace_buffer = None
    return wrapper


def _launch(plan: Any, args: PlannedLatentAttention, out: Tensor, lse: Tensor | None) -> None:
    """Write ``out`` ``[T, H, R]``; see ``protocol.Launch``."""
    wrapper, numbers = plan.to_launch(args)
    with plan.launching:
        _run(wrapper, numbers, args, out, lse)


KERNELS["flashinfer"]["latents"] = _launch


def _run(wrapper: Any, numbers: list[int], args: PlannedLatentAttention, out: Tensor, lse: Tensor | None) -> None:
    rank = args.query_latent.shape[2]
    wrapper._plan_info = numbers
    wrapper._sm_scale = args.scale
    wrapper._int_workspace_buffer = args.plan
    wrapper._float_workspace_buffer = args.workspace
    wrapper._kv_indices_buf = args.indices
    try:
        wrapper.run(
            q_nope=readable(args.query_latent),
            q_pe=readable(args.query_rope),
            ckv_cache=args.pages[..., :rank],
            kpe_cache=args.pages[..., rank:],
            out=out,
            lse=lse,
            return_lse=lse is not None,
        )
    finally:
        # A tensor that a graph made must not outlive its capture.
        wrapper._int_workspace_buffer = wrapper._float_workspace_buffer = wrapper._kv_indices_buf = None
