"""A Triton kernel for attention of packed queries over keys and values that lie apart, in any layout."""

# As in ``kernels.attention.packed``, a program has a tile of queries of one row and kv head. Masks and positions are
# those of FlashInfer's calls. Where there are few tiles, as in decode, several programs share the keys of each: their
# results are merged by their log-sum-exps.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from compiled_llm_flashinfer.ops.contracts import StridedAttention
from compiled_llm_flashinfer.ops.kernels.strided.parts import PartResults, check_contiguous
from compiled_llm_ops.contracts.devices import device_of, power_of_two
from compiled_llm_ops.kernels.attention.packed import row_of
from compiled_llm_ops.kernels.attention.packed_tiling import (
    FEWEST,
    LARGEST_HEAD,
    SMALLEST_HEAD,
    PackedTiling,
    packed_tiling,
)
from compiled_llm_ops.kernels.logits import capped, weighed

PROGRAMS = 2  # programs of a multiprocessor that rows are divided for

SHORTEST_PART = 256  # keys that a program has on average at least, if several share a row

MOST_PARTS = 64


@triton.jit
def _rotated(states, partners, position, offs_d, scale, log_theta, HEAD: tl.constexpr):
    """Return ``states`` rotated by ``position``, with ``partners`` of the other half; all but two numbers broadcast."""
    # Angles are turned back by whole turns: sines of large ones are not exact on a GPU.
    HALF: tl.constexpr = HEAD // 2
    exponents = (offs_d % HALF).to(tl.float32) / HALF
    turns = position.to(tl.float32) * scale * tl.exp2(-exponents * log_theta) * 0.15915494309189535
    angles = (turns - tl.floor(turns)) * 6.283185307179586
    others = partners.to(tl.float32)
    signed = tl.where(offs_d >= HALF, others, -others)
    return states.to(tl.float32) * tl.cos(angles) + signed * tl.sin(angles)


@triton.jit(
    do_not_specialize=["rows", "tokens", "all_keys", "window_left"],
    do_not_specialize_on_alignment=[
        "query", "qo_indptr", "indptr", "indices", "last_page_len", "mask", "mask_indptr", "out", "lse",
    ],
)  # fmt: skip
def _strided_attention(
    query, keys, values, out, lse, qo_indptr, indptr, indices, last_page_len, mask, mask_indptr, slopes,
    logit_factors, value_factors,
    query_row, query_head, keys_page, keys_head, keys_slot, values_page, values_head, values_slot,
    out_row, out_head, out_part, lse_row, lse_head, lse_part,
    rows, tokens, all_keys, window_left, scale, slope_scale, cap, value_scale, rope_scale, log_theta,
    QUERIES: tl.constexpr, GQA: tl.constexpr, HEAD: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr,
    VALUE_DIM: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, CAUSAL: tl.constexpr,
    CAPPED: tl.constexpr, ROTATED: tl.constexpr, CLAMPED: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of queries over one part of its row's keys; axes of the grid: tiles, kv heads, parts."""
    # Without ``qo_indptr`` rows have equally many tokens, without ``indptr`` there is one row of ``all_keys`` keys.
    tile, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if qo_indptr is None:
        new = tokens // rows
        tiles = (new * GQA + QUERIES - 1) // QUERIES
        row = tile // tiles
        row_begin, row_end = row * new, row * new + new
        first_query = tile % tiles * QUERIES
    else:
        row = row_of(tile, qo_indptr, rows, QUERIES, GQA)
        row_begin, row_end = tl.load(qo_indptr + row).to(tl.int32), tl.load(qo_indptr + row + 1).to(tl.int32)
        first_query = (tile - row_begin * GQA // QUERIES - row) * QUERIES
    end_query = tl.minimum(first_query + QUERIES, (row_end - row_begin) * GQA)
    if first_query < end_query:
        if indptr is None:
            first_page, length = 0, all_keys
        else:
            first_page = tl.load(indptr + row).to(tl.int32)
            pages = tl.load(indptr + row + 1).to(tl.int32) - first_page
            length = pages * PAGE
            if last_page_len is not None:
                length += tl.load(last_page_len + row).to(tl.int32) - PAGE
            length = tl.where(pages > 0, length, 0)
        offs_m, offs_n = first_query + tl.arange(0, QUERIES), tl.arange(0, KEYS)
        offs_d, offs_e = tl.arange(0, DIM), tl.arange(0, VALUE_DIM)
        number = tl.minimum(offs_m // GQA, row_end - row_begin - 1)
        token = (row_begin + number).to(tl.int64)
        used = (offs_m < end_query) & (token < tokens)
        head_ids = head * GQA + offs_m % GQA
        kv_head = head.to(tl.int64)  # where heads come first, one has all tokens
        q_ptrs = query + token * query_row + head_ids * query_head
        in_head = used[:, None] & (offs_d < HEAD)[None, :]
        q = tl.load(q_ptrs[:, None] + offs_d[None, :], mask=in_head, other=0.0)
        before = length - (row_end - row_begin)
        own = before + number
        partner_d = tl.where(offs_d >= HEAD // 2, offs_d - HEAD // 2, offs_d + HEAD // 2)
        if ROTATED:
            partners = tl.load(q_ptrs[:, None] + partner_d[None, :], mask=in_head, other=0.0)
            q = _rotated(q, partners, own[:, None], offs_d[None, :], rope_scale, log_theta, HEAD).to(q.dtype)
        factor = tl.full([QUERIES], 1.0, tl.float32) * scale
        if logit_factors is not None:
            factor *= tl.load(logit_factors + head_ids)
        if slopes is not None:
            slope = tl.load(slopes + head_ids) * slope_scale
        if mask is not None:
            bits = mask
            if mask_indptr is not None:
                bits += tl.load(mask_indptr + row)
        # Keys that any query of the tile sees are among these, and those of this part.
        end = length
        if CAUSAL:
            end = tl.minimum(length, before + (end_query - 1) // GQA + 1)
        first = tl.maximum(before + first_query // GQA - window_left, 0)
        first_block, end_block = first // KEYS, (tl.maximum(end, 0) + KEYS - 1) // KEYS
        blocks = (tl.maximum(end_block - first_block, 0) + tl.num_programs(2) - 1) // tl.num_programs(2)
        first_block += part * blocks
        end_block = tl.minimum(end_block, first_block + blocks)
        largest = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        sums = tl.zeros([QUERIES, VALUE_DIM], tl.float32)
        for block in tl.range(first_block, end_block, num_stages=STAGES):
            position = block * KEYS + offs_n
            # Pages before all windows may be free, and hold values (NaN) whose product with zero is not zero.
            inside = (position >= first) & (position < end)
            page = first_page + position // PAGE
            if indices is not None:
                page = tl.load(indices + page, mask=inside, other=0)
            page, slot = page.to(tl.int64), position % PAGE
            k_ptrs = keys + page * keys_page + kv_head * keys_head + slot * keys_slot
            k_mask = inside[None, :] & (offs_d < HEAD)[:, None]
            k = tl.load(k_ptrs[None, :] + offs_d[:, None], mask=k_mask, other=0.0)
            if ROTATED:
                other_half = tl.load(k_ptrs[None, :] + partner_d[:, None], mask=k_mask, other=0.0)
                k = _rotated(k, other_half, position[None, :], offs_d[:, None], rope_scale, log_theta, HEAD)
            logits = tl.dot(q, k.to(q.dtype), input_precision="ieee") * factor[:, None]
            if slopes is not None:
                logits += slope[:, None] * (position[None, :] - number[:, None]).to(tl.float32)
            if CAPPED:
                logits = capped(logits, cap)
            seen = inside[None, :] & used[:, None] & (position[None, :] >= own[:, None] - window_left)
            if CAUSAL:
                seen = seen & (position[None, :] <= own[:, None])
            if mask is not None:
                bit = number[:, None].to(tl.int64) * length + position[None, :]
                byte = tl.load(bits + bit // 8, mask=seen, other=0).to(tl.int32)
                seen = seen & (((byte >> (bit % 8).to(tl.int32)) & 1) == 1)
            logits = tl.where(seen, logits, -float("inf"))
            weights, fade, larger = weighed(logits, largest, True)
            v_ptrs = values + page * values_page + kv_head * values_head + slot * values_slot
            v_mask = inside[:, None] & (offs_e < VALUE)[None, :]
            v = tl.load(v_ptrs[:, None] + offs_e[None, :], mask=v_mask, other=0.0)
            sums = tl.dot(weights.to(q.dtype), v.to(q.dtype), sums * fade[:, None], input_precision="ieee")
            total = total * fade + tl.sum(weights, 1)
            largest = larger
        total = tl.where(total == 0.0, 1.0, total)  # no key was seen
        results = sums / total[:, None] * value_scale
        if value_factors is not None:
            results *= tl.load(value_factors + head_ids)[:, None]
        if CLAMPED:
            results = tl.clamp(results, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        out_ptrs = out + token * out_row + head_ids * out_head + part.to(tl.int64) * out_part
        out_mask = used[:, None] & (offs_e < VALUE)[None, :]
        tl.store(out_ptrs[:, None] + offs_e[None, :], results.to(out.dtype.element_ty), mask=out_mask)
        if lse is not None:
            lse_ptrs = lse + token * lse_row + head_ids * lse_head + part.to(tl.int64) * lse_part
            tl.store(lse_ptrs, largest + tl.log2(total), mask=used)


def _stored(size: int) -> int:
    """Return the power of two that heads of this size are multiplied as."""
    return max(16, power_of_two(size))


def strided_tiling(args: StridedAttention, shared_memory: int) -> PackedTiling:
    """Return the tiling of ``packed_tiling``, as far as registers go with strides and rotations."""
    # How fast that is was not measured: sizes are those that ``ptxas`` gives registers to for Hopper.
    queries = args.query.shape[0] * (args.query.shape[1] // args.keys.shape[1]) / max(1, args.rows)
    stored = _stored(max(args.query.shape[2], args.values.shape[3]))
    sizes = args.query.element_size(), args.keys.element_size()
    # With one order of sums the batch must not decide on tiles.
    tiling = packed_tiling(1 if args.one_order else queries, max(SMALLEST_HEAD, stored), *sizes, shared_memory)
    if tiling.queries == 128:
        tiling = tiling._replace(warps=8)
    if args.rope_scale:
        tiling = tiling._replace(keys=max(FEWEST, tiling.keys // 2))
    return tiling


def _parts(args: StridedAttention, tiles: int, device: torch.device) -> int:
    """Return how many programs share a row's keys: so many that the device has work, if rows may be long enough."""
    if args.one_order:
        return 1
    pages = args.keys.shape[0] if args.indices is None else args.indices.shape[0]
    programs = max(1, tiles * args.keys.shape[1])
    fit = PROGRAMS * device_of(device).processors // programs
    return max(1, min(fit, pages * args.keys.shape[2] // SHORTEST_PART, MOST_PARTS))


def attend(args: StridedAttention, tiling: PackedTiling | None = None, parts: int | None = None) -> None:
    """Launch attention; so many programs share the keys of a row, None for what the device needs."""
    # ValueError if heads are larger than there are kernels for, or their numbers do not lie next to each other.
    _check(args)
    query = args.query.to(torch.float16) if args.query.element_size() == 1 else args.query  # exact
    args = args._replace(query=query if query.stride(2) == 1 else query.contiguous())
    tokens, heads, _ = query.shape
    if not tokens:
        return
    gqa, device = heads // args.keys.shape[1], args.out.device
    if tiling is None:
        tiling = strided_tiling(args, device_of(device).shared_memory)
    if args.qo_indptr is None:
        tiles = args.rows * -(-(tokens // args.rows * gqa) // tiling.queries)
    else:  # without the tokens of each row, at least as many as all have
        tiles = tokens * gqa // tiling.queries + args.rows
    parts = _parts(args, tiles, device) if parts is None else parts
    results = PartResults(args.out, args.lse, parts)
    _launch(args, results, tiling, tiles, parts)
    results.merge()


def _check(args: StridedAttention) -> None:
    largest = max(args.query.shape[2], args.values.shape[3])
    if largest > LARGEST_HEAD:
        raise ValueError(f"strided_attention: no kernel for heads of size {largest}: the largest is {LARGEST_HEAD}")
    check_contiguous("strided_attention", "head", keys=args.keys, values=args.values)


def _launch(args: StridedAttention, results: PartResults, tiling: PackedTiling, tiles: int, parts: int) -> None:
    (tokens, heads, head_dim), (_, kv_heads, page_size, value_dim) = args.query.shape, args.values.shape
    log2e, cap = math.log2(math.e), args.logits_soft_cap
    window_left = args.window_left if args.window_left >= 0 else 2**30
    factor, slope_scale = (args.scale / cap, 1.0 / cap) if cap > 0 else (args.scale * log2e, log2e)
    rotated = args.rope_scale != 0
    rotation = (1.0 / args.rope_scale, math.log2(args.rope_theta)) if rotated else (0.0, 0.0)
    constants: dict[str, Any] = {
        "QUERIES": tiling.queries, "GQA": heads // kv_heads, "HEAD": head_dim, "DIM": _stored(head_dim),
        "VALUE": value_dim, "VALUE_DIM": _stored(value_dim), "PAGE": page_size, "KEYS": tiling.keys,
        "STAGES": tiling.stages, "CAUSAL": args.causal and args.mask is None, "CAPPED": cap > 0, "ROTATED": rotated,
        "CLAMPED": results.out.dtype == torch.float8_e4m3fn, "num_warps": tiling.warps,
    }  # fmt: skip
    table = (args.qo_indptr, args.indptr, args.indices, args.last_page_len, args.mask, args.mask_indptr)
    factors = (args.slopes, args.logit_factors, args.value_factors)
    _strided_attention[(tiles, kv_heads, parts)](
        args.query, args.keys, args.values, results.out, results.lse, *table, *factors,
        *args.query.stride()[:2], *args.keys.stride()[:3], *args.values.stride()[:3],
        *results.strides, args.rows, tokens, args.keys.shape[0] * page_size, window_left, factor, slope_scale,
        cap * log2e, args.value_scale, *rotation, **constants,
    )  # fmt: skip
