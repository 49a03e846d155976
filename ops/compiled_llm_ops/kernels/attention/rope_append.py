"""Triton kernel between prefill's projections and its attention: norm, rotary embedding, and the way into pages."""

# It moves bytes: each query, key and value is read once and written once. A program takes some heads of one token, so
# that it reads the token's cosines, sines and place in the pages once, with loads of 16 bytes a thread. Its grid
# depends on the number of tokens alone.
# Shapes: T packed tokens, H query heads, K kv heads, D head dimension, D' the same as stored, P pages, S page size.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_llm_ops.contracts import AppendPagedKv, RopeAppendPagedKv, common_fields
from compiled_llm_ops.kernels.attention.launching import check_launch, contiguous, with_whole_heads
from compiled_llm_ops.kernels.attention.rotary import prepared
from compiled_llm_ops.kernels.attention.scaled import as_stored


class RopeAppendTiling(NamedTuple):
    """The work of one program. It is one for all sizes, so that one kernel serves prefills of any length."""

    numbers: int = 2048  # of queries, or of keys and values, at most; heads are padded to a power of two
    warps: int = 4


TILING = RopeAppendTiling()
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def _prepared(
    head_ptrs, offs_d, mask, norm, cos, sin, angle, epsilon, HEAD: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Return heads ``[GROUP, D]`` as ``prepared`` does, from the token's cosines and sines at ``angle``."""
    # What each head needs is loaded as the heads are, so that threads exchange nothing.
    alike = tl.zeros([GROUP, 1], tl.int32)
    norm_ptrs, cos_ptrs, sin_ptrs = norm, cos, sin
    if norm is not None:
        norm_ptrs = norm + alike
    if cos is not None:
        cos_ptrs, sin_ptrs = cos + angle + alike, sin + angle + alike
    return prepared(head_ptrs, offs_d, mask, norm_ptrs, cos_ptrs, sin_ptrs, epsilon, HEAD)


@triton.jit(do_not_specialize_on_alignment=["token_rows", "token_positions", "indptr", "indices", "lengths"])
def _rope_append_paged_kv(
    query, key, value, pages, token_rows, token_positions, indptr, indices, query_norm, key_norm, cos, sin, out,
    key_scale, value_scale, saturated, lengths,
    row_stride, head_stride, key_row_stride, key_head_stride, value_row_stride, value_head_stride, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, DIM: tl.constexpr, STORED: tl.constexpr,
    PAGE: tl.constexpr, GROUP: tl.constexpr, KV_GROUP: tl.constexpr, NEW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Norm and turn up to GROUP query heads of a token, or up to KV_GROUP key heads, whose values are copied."""
    # Programs of one token follow each other. With ``lengths``, each row has NEW tokens, its newest ones.
    QUERIES: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    PROGRAMS: tl.constexpr = QUERIES + (KV_HEADS + KV_GROUP - 1) // KV_GROUP
    token, part = (tl.program_id(0) // PROGRAMS).to(tl.int64), tl.program_id(0) % PROGRAMS
    offs_d = tl.arange(0, DIM)[None, :]
    if part < QUERIES:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        offs_h = part * GROUP + tl.arange(0, GROUP)[:, None]
        q_mask = (offs_h < HEADS) & (offs_d < HEAD)
        q_ptrs = query + token * row_stride + offs_h * head_stride
        q = _prepared(q_ptrs, offs_d, q_mask, query_norm, cos, sin, token * HEAD, epsilon, HEAD, GROUP)
        tl.store(out + token * (HEADS * HEAD) + offs_h * HEAD + offs_d, q, mask=q_mask)
    else:
        if lengths is None:
            row, position = tl.load(token_rows + token), tl.load(token_positions + token)
        else:
            row = token // NEW
            position = tl.load(lengths + row) - NEW + token % NEW
        page = tl.load(indices + tl.load(indptr + row) + position // PAGE).to(tl.int64)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        offs_k = (part - QUERIES) * KV_GROUP + tl.arange(0, KV_GROUP)[:, None]
        k_mask = (offs_k < KV_HEADS) & (offs_d < HEAD)
        v = tl.load(value + token * value_row_stride + offs_k * value_head_stride + offs_d, mask=k_mask)
        k_ptrs = key + token * key_row_stride + offs_k * key_head_stride
        k = _prepared(k_ptrs, offs_d, k_mask, key_norm, cos, sin, token * HEAD, epsilon, HEAD, KV_GROUP)
        slot = page * (2 * KV_HEADS * PAGE * STORED) + position % PAGE * STORED
        slot_ptrs = pages + slot + offs_k * (PAGE * STORED) + offs_d
        of_keys, of_values = key_scale, value_scale
        if key_scale is not None:
            of_keys = tl.load(key_scale + tl.minimum(offs_k, KV_HEADS - 1))
        if value_scale is not None:
            of_values = tl.load(value_scale + tl.minimum(offs_k, KV_HEADS - 1))
        k = as_stored(k, pages, of_keys, saturated, k_mask)
        v = as_stored(v, pages, of_values, saturated, k_mask)
        tl.store(slot_ptrs, k, mask=k_mask)
        tl.store(slot_ptrs + KV_HEADS * PAGE * STORED, v, mask=k_mask)


def rope_append(
    args: RopeAppendPagedKv, *, pdl: bool, tiling: RopeAppendTiling = TILING, lengths: Tensor | None = None
) -> Tensor:
    """Launch the kernel; return ``[T, H, D]``, contiguous."""
    # ``args`` are checked, the query in one of DTYPES, or ValueError, of no heads if only keys and values are to be
    # written; ``pages`` ``[P, 2, K, S, D']`` are contiguous. ``lengths`` ``[B]`` int32 takes the place of
    # ``token_rows`` and ``token_positions``: of each row the newest tokens are written, equally many.
    check_launch("rope_append_paged_kv", args.query, args.pages, DTYPES)
    query, key, value = with_whole_heads(args.query, args.key, args.value)
    query_norm, key_norm, cos, sin = contiguous(args.query_norm, args.key_norm, args.cos, args.sin)
    key_scale, value_scale = contiguous(args.key_scale, args.value_scale)
    (tokens, heads, head_dim), (_, _, kv_heads, page_size, stored) = query.shape, args.pages.shape
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not tokens:
        return out
    dim = triton.next_power_of_2(head_dim)
    most = max(1, tiling.numbers // dim)
    group = min(most, triton.next_power_of_2(max(1, heads)))
    kv_group = min(max(1, most // 2), triton.next_power_of_2(kv_heads))
    constants: dict[str, Any] = {
        "HEADS": heads, "KV_HEADS": kv_heads, "HEAD": head_dim, "DIM": dim, "STORED": stored, "PAGE": page_size,
        "GROUP": group, "KV_GROUP": kv_group, "PDL": pdl,
        "NEW": 1 if lengths is None else tokens // len(lengths), "num_warps": tiling.warps,
        **({"launch_pdl": True} if pdl else {}),
    }  # fmt: skip
    programs = -(-heads // group) + -(-kv_heads // kv_group)
    _rope_append_paged_kv[(tokens * programs,)](
        query, key, value, args.pages, args.token_rows, args.token_positions, args.indptr, args.indices,
        query_norm, key_norm, cos, sin, out, key_scale, value_scale, args.saturated, lengths,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], args.epsilon, **constants,
    )  # fmt: skip
    return out


def append(args: AppendPagedKv) -> None:
    """Launch the kernel on the device of ``args``, which are checked, for keys and values alone."""
    shared = common_fields(args, RopeAppendPagedKv)
    with torch.cuda.device(args.key.device):  # Triton launches on the current one
        rope_append(RopeAppendPagedKv(query=args.key[:, :0], **shared), pdl=False)
