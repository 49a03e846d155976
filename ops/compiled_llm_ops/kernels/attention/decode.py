"""A Triton kernel for decode: few queries a row, mostly one, over its pages, in one launch and without a plan."""

# Before it attends, it writes the row's newest keys and values into the pages: a separate launch would take longer than
# the writing.
# A plan would have to follow the rows' lengths. Here the grid does not depend on values that change from step to step,
# so a captured launch stays valid. Rows share its programs: each program computes from the current page table how the
# keys are divided, as a plan on the host would, and reads its own share. Programs without a share end at once.
# It may begin while the previous kernel ends (see ``pdl``), and reads the page table meanwhile.
# Shapes: B rows, q new tokens of each, T = B * q, H query heads, K kv heads, G query heads of one kv head, M = q * G of
# one row, D head dimension, D' the same as stored, P pages, S page size.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_llm_ops.contracts import DecodeAttention
from compiled_llm_ops.kernels.attention.decode_tiling import MAX_ROWS, MAX_SHARES, AttentionTiling
from compiled_llm_ops.kernels.attention.launching import check_launch, contiguous, factors, with_whole_heads
from compiled_llm_ops.kernels.attention.rotary import loaded, prepared, turned
from compiled_llm_ops.kernels.attention.scaled import add_values, as_multiplied, as_stored, faded, no_values, summed
from compiled_llm_ops.kernels.counters import zeroed_counters
from compiled_llm_ops.kernels.logits import LogitsTransform, base_of, capped, transformed, weighed

LARGEST_REPEATED = tl.constexpr(128)
"""Head size as stored up to which queries of padding are copies, which stay in registers; larger ones spill them."""

MERGED_VALUES = 2**12  # values of partial results that are summed at a time

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Of queries. float32 is multiplied as IEEE 754 says, without tensor cores."""


@triton.jit
def _tokens(offs_g, NEW: tl.constexpr, GQA: tl.constexpr):
    """Return which of its row's new tokens each query head belongs to; heads of padding to the last one."""
    return tl.minimum(offs_g // GQA, NEW - 1)


@triton.jit
def _place(position, length, listed, NEW: tl.constexpr, PAGE: tl.constexpr):
    """Return where a row with a list of ``listed`` pages reads the position of a new token."""
    # Places count keys through the pages of the list, and then through those that new tokens may lie in.
    last: tl.constexpr = (NEW + PAGE - 2) // PAGE  # contracts.newest_pages, less one
    return (listed + last - (length - 1) // PAGE + position // PAGE) * PAGE + position % PAGE


@triton.jit
def _position(place, length, visible, listed, NEW: tl.constexpr, PAGE: tl.constexpr):
    """Return the position that a row reads at a place of its list; ``length`` where there is none."""
    # Pages with new tokens follow the list, so they are left out where they are in it.
    last: tl.constexpr = (NEW + PAGE - 2) // PAGE
    entry, first_new = place // PAGE, (length - NEW) // PAGE
    page = tl.load(visible + entry, mask=entry < listed, other=-1)
    newest = (length - 1) // PAGE - (listed + last - entry)
    known = tl.where(entry < listed, (page >= 0) & (page < first_new), newest >= first_new)
    return tl.where(known, tl.where(entry < listed, page, newest) * PAGE + place % PAGE, length)


@triton.jit
def _attend(
    q, keys_ptr, indices_ptr, values_offset, first, length, begin, end, window_left, scale, cap, visible, listed,
    row, head, tensors, sizes,
    NEW: tl.constexpr, GQA: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    CAPPED: tl.constexpr, STAGES: tl.constexpr,
    TRANSFORMED: tl.constexpr, LOGITS: tl.constexpr, VISIBLE: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """``[M, D']`` and its log-sum-exp ``[M]`` in base 2, of blocks ``begin`` to ``end`` from key ``first`` on."""
    # Keys past ``length`` are not read: their slots may hold values (NaN) whose product with zero is not zero. A query
    # that sees none of the keys has zeros, and minus infinity.
    # If ``visible`` is not None, blocks are of places in this list of ``listed`` pages (see ``_place``). If SUMMED,
    # there is no softmax: results are sums, and their log-sum-exp is 0.
    BLIND: tl.constexpr = NEW > 1 or visible is not None or TRANSFORMED
    own = length - NEW + _tokens(tl.arange(0, q.shape[0]), NEW, GQA)[:, None]  # the positions of the queries
    if TRANSFORMED:
        heads = head * GQA + (tl.arange(0, q.shape[0]) % GQA)[:, None]
        queries = row * NEW + own - (length - NEW)
    offs_n, offs_d = tl.arange(0, BLOCK), tl.arange(0, DIM)
    largest = tl.full([q.shape[0]], -float("inf"), tl.float32)
    # One sum for each key of a block: threads exchange them once, at the end, not at each block.
    weight_sums = tl.zeros([q.shape[0], BLOCK], tl.float32)
    sums = no_values(q.shape[0], DIM, keys_ptr)
    for block in tl.range(begin, end, num_stages=STAGES):
        position = first + block * BLOCK + offs_n
        if visible is not None:
            position = _position(position, length, visible, listed, NEW, PAGE)
        mask = position < length
        page = tl.load(indices_ptr + position // PAGE, mask=mask, other=0)
        slot = page.to(tl.int64) * (2 * values_offset) + (position % PAGE) * DIM
        k = tl.load(keys_ptr + slot[None, :] + offs_d[:, None], mask=mask[None, :], other=0.0)
        logits = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        if CAPPED:
            logits = capped(logits, cap)
        if not BLIND:
            logits = tl.where(mask[None, :], logits, -float("inf"))
        else:
            seen = (position[None, :] <= own) & (position[None, :] >= own - window_left)
            if TRANSFORMED:
                logits = transformed(
                    logits, seen, row, heads, queries, own, position[None, :], tensors, sizes, LOGITS, VISIBLE, SUMMED
                )
            else:
                logits = tl.where(seen, logits, -float("inf"))
        if not SUMMED:
            weights, fade, larger = weighed(logits, largest, BLIND)
        if SUMMED:
            sums = add_values(sums, logits.to(q.dtype), keys_ptr + values_offset, slot, mask, DIM)
        else:
            sums = add_values(faded(sums, fade), weights.to(q.dtype), keys_ptr + values_offset, slot, mask, DIM)
            weight_sums = weight_sums * fade[:, None] + weights
            largest = larger
    acc = summed(sums)
    if SUMMED:
        return acc, tl.zeros([q.shape[0]], tl.float32)
    total = tl.sum(weight_sums, 1)
    if BLIND:
        total = tl.where(total == 0.0, 1.0, total)
    return acc / total[:, None], largest + tl.log2(total)


@triton.jit
def _merge(
    partials, partial_lses, first, count, BLIND: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    CHUNK: tl.constexpr, STRIDE: tl.constexpr = None, UNSEEN: tl.constexpr = None,
    SUMMED: tl.constexpr = None,
):  # fmt: skip
    """Return ``[HEADS, D']`` and ``[HEADS]`` from ``count`` partial results, always in the same order."""
    # They are STRIDE values apart, D' if it is None. If UNSEEN, a query may have seen no key in any of them. If SUMMED,
    # they are added up, and log-sum-exps are 0.
    APART: tl.constexpr = DIM if STRIDE is None else STRIDE
    offs_g, offs_d = tl.arange(0, HEADS), tl.arange(0, DIM)
    largest = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, DIM], tl.float32)
    for start in tl.range(0, count, CHUNK):
        partial = start + tl.arange(0, CHUNK)
        mask = partial < count
        offs = (first + partial)[:, None] * HEADS + offs_g[None, :]
        lses = tl.load(partial_lses + offs, mask=mask[:, None], other=-float("inf"), cache_modifier=".cg")
        part_ptrs = partials + offs[:, :, None] * APART + offs_d[None, None, :]
        parts = tl.load(part_ptrs, mask=mask[:, None, None], other=0.0, cache_modifier=".cg")
        if SUMMED:
            acc += tl.sum(parts, 0)
        else:
            larger = tl.maximum(largest, tl.max(lses, 0))
            base = base_of(larger, BLIND)
            weights = tl.exp2(lses - base[None, :])
            fade = tl.exp2(largest - base)
            acc = acc * fade[:, None] + tl.sum(weights[:, :, None] * parts, 0)
            total = total * fade + tl.sum(weights, 0)
            largest = larger
    if SUMMED:
        return acc, total
    if UNSEEN:
        total = tl.where(total == 0.0, 1.0, total)
    return acc / total[:, None], largest + tl.log2(total)


@triton.jit
def _repeated(numbers, HEADS: tl.constexpr):
    """Return as many rows as tensor cores take, ``[HEADS, n]``, of fewer: those of padding are copies."""
    HAS: tl.constexpr = numbers.shape[0]
    if HAS == HEADS:
        return numbers
    copies = tl.broadcast_to(numbers[None, :, :], (HEADS // HAS, HAS, numbers.shape[1]))
    return copies.reshape(HEADS, numbers.shape[1])


@triton.jit
def _store(
    out, lse, values, lses, item, heads,
    ROWS: tl.constexpr, NEW: tl.constexpr, GQA: tl.constexpr, HEAD: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Write the results of the query heads of one row and kv head."""
    offs_g, offs_d = tl.arange(0, ROWS), tl.arange(0, DIM)
    if NEW == 1:
        offs_h = item * GQA + offs_g
    else:
        row, head = item // heads, item % heads
        offs_h = ((row * NEW + offs_g // GQA) * heads + head) * GQA + offs_g % GQA
    keep = (offs_g[:, None] < NEW * GQA) & (offs_d[None, :] < HEAD)
    tl.store(out + offs_h[:, None] * HEAD + offs_d[None, :], values.to(out.dtype.element_ty), mask=keep)
    if lse is not None:
        tl.store(lse + offs_h, lses, mask=offs_g < NEW * GQA)


@triton.jit
def _pick(own, values):
    """Return the value of the program's own row, the one that the mask ``own`` selects; 0 if it has none."""
    return tl.sum(tl.where(own, values, 0))


@triton.jit
def _shares(blocks, size, unsplit, MOST: tl.constexpr):
    """Return how many programs share each row if their shares are of up to so many blocks; without a row, none."""
    return tl.where(blocks > unsplit, tl.minimum(tl.cdiv(blocks, size), MOST), tl.minimum(blocks, 1))


@triton.jit
def _unsplit(blocks, row_tile, unsplit, SHARE_EQUAL: tl.constexpr):
    """Return the blocks up to which a row is not shared: any number where all rows have about as many."""
    if SHARE_EQUAL:
        return unsplit
    longest = tl.max(blocks)
    return tl.where(4 * row_tile * longest <= 5 * tl.sum(blocks), tl.maximum(longest, unsplit), unsplit)


@triton.jit
def _share(blocks, program, programs, row_tile, unsplit, min_share, MOST: tl.constexpr):
    """Return the row of ``program`` as a mask, its first program, how many they are, and the share: blocks from, to."""
    # ``blocks`` ``[ROWS]`` holds zeros if there is no row, and so does the mask of programs past the end. Rows that are
    # shared come first: the longest shares are theirs.
    # The size of a share cuts all blocks into as many pieces as there are programs. Rows end in smaller ones: if these
    # make too many shares, the size leaves one program for the end of each row but one, which is enough for any
    # lengths. Rows of like lengths need no such reserve.
    total = tl.sum(blocks)
    shares = _shares(blocks, tl.maximum(tl.cdiv(total, programs), min_share), unsplit, MOST)
    fewer = _shares(blocks, tl.maximum(tl.cdiv(total, programs - row_tile + 1), min_share), unsplit, MOST)
    shares = tl.where(tl.sum(shares) <= programs, shares, fewer)
    shared = tl.where(shares > 1, shares, 0)
    single = tl.where(shares == 1, 1, 0)
    ends = tl.where(shares > 1, tl.cumsum(shared), tl.sum(shared) + tl.cumsum(single))
    own = (program >= ends - shares) & (program < ends)
    smaller = _pick(own, blocks // tl.maximum(shares, 1))
    count = _pick(own, shares)
    first = _pick(own, ends) - count
    split, larger = program - first, _pick(own, blocks) - smaller * count  # so many of the shares have one block more
    begin = split * smaller + tl.minimum(split, larger)
    end = begin + smaller + tl.where(split < larger, 1, 0)
    return own, first, count, begin, end


@triton.jit(do_not_specialize=["rows", "row_tile", "window_left", "unsplit", "min_share", "listed"])
def _decode_paged_attention(
    query, key, value, pages, starts, lengths, indices, shared_lengths, query_norm, key_norm, cos, sin,
    out, lse, partials, partial_lses, arrivals, key_scale, value_scale, saturated, visible, tensors, sizes,
    row_stride, head_stride, key_row_stride, key_head_stride, value_row_stride, value_head_stride,
    rows, row_tile, window_left, unsplit, min_share, listed, scale, cap, epsilon,
    ROWS: tl.constexpr, MOST: tl.constexpr, NEW: tl.constexpr, GQA: tl.constexpr, PADDED: tl.constexpr,
    HEAD: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, CAPPED: tl.constexpr, SHARE_EQUAL: tl.constexpr, PDL: tl.constexpr,
    TRANSFORMED: tl.constexpr = None, LOGITS: tl.constexpr = None, VISIBLE: tl.constexpr = None,
    SUMMED: tl.constexpr = None,
):  # fmt: skip
    """Attend over some keys of one row and kv head; if several programs share them, the last to end merges all."""
    # The program with the last keys writes the newest of them first; of several new ones, each program its own.
    # With ``shared_lengths`` the first keys of each row are left to the kernel that was launched just before, which
    # reads and writes nothing that this one does. So the two run side by side, and one program waits for that kernel at
    # the end, for the sake of those that come later; those before have ended, since that kernel has waited for them.
    # Keys and values of 8 bits are multiplied as they are stored. The scale of keys is a factor on logits, that of
    # values one on results.
    # Axes of the grid: kv heads, tiles of rows, programs, so that programs without keys start last. A tile is
    # ``row_tile`` rows, at most ROWS. ``partials`` holds a [PADDED, D'] for each program and ``partial_lses`` a
    # [PADDED]; ``arrivals`` holds a zero for each row and kv head, which it is again afterwards.
    head, tile, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads, programs = tl.num_programs(0), tl.num_programs(2)
    HEADS: tl.constexpr = max(PADDED, 16)  # tensor cores take no fewer
    BLIND: tl.constexpr = NEW > 1 or visible is not None or TRANSFORMED
    offs_r, offs_g, offs_d = tl.arange(0, ROWS), tl.arange(0, HEADS), tl.arange(0, DIM)[None, :]
    offs_q = tl.arange(0, PADDED if DIM <= LARGEST_REPEATED else HEADS)
    row_ids = tile * row_tile + offs_r
    mask = (offs_r < row_tile) & (row_ids < rows)
    first_pages = tl.load(starts + row_ids, mask=mask, other=0)
    ends = tl.load(lengths + row_ids, mask=mask, other=0)  # no row: no keys
    if shared_lengths is not None:
        # All that follows counts keys from where the row's own ones begin: distances in a window are the same.
        shared = tl.load(shared_lengths + row_ids, mask=mask, other=0)
        first_pages += shared // PAGE
        ends -= shared
    if visible is None:
        firsts = tl.maximum(ends - NEW - window_left, 0)
        blocks = tl.cdiv(ends - firsts, BLOCK)
    else:  # as many places for each row
        places: tl.constexpr = (NEW + PAGE - 2) // PAGE * PAGE + PAGE
        firsts = tl.zeros([ROWS], tl.int32)
        blocks = tl.where(ends > 0, tl.cdiv(listed * PAGE + places, BLOCK), 0)
    unsplit = _unsplit(blocks, row_tile, unsplit, SHARE_EQUAL)
    own, first_program, count, begin, end = _share(blocks, program, programs, row_tile, unsplit, min_share, MOST)
    if count > 0:
        row, length, first = _pick(own, row_ids), _pick(own, ends), _pick(own, firsts)
        head_pages, values_offset = pages + head * (PAGE * DIM), heads * (PAGE * DIM)
        own_indices = indices + _pick(own, first_pages)
        newest = length - 1
        page = tl.load(own_indices + newest // PAGE).to(tl.int64)
        slot_ptr = head_pages + page * (2 * values_offset) + (newest % PAGE) * DIM
        if PDL:
            if shared_lengths is None:
                gdc_wait()
            gdc_launch_dependents()
        in_head = offs_d < HEAD
        cos_ptr, sin_ptr = cos, sin
        if NEW == 1:
            if cos is not None:
                cos_ptr, sin_ptr = cos + row * HEAD, sin + row * HEAD
            q_ptrs = query + row * row_stride + (head * GQA + offs_q)[:, None] * head_stride
        else:
            tokens = (row * NEW + _tokens(offs_q, NEW, GQA))[:, None]
            if cos is not None:
                cos_ptr, sin_ptr = cos + tokens * HEAD, sin + tokens * HEAD
            q_ptrs = query + tokens * row_stride + (head * GQA + offs_q % GQA)[:, None] * head_stride
        in_query = (offs_q[:, None] < NEW * GQA) & in_head
        # All is asked for before any of it is waited for: it comes from L2, which takes longer than to compute.
        of_keys, of_values = key_scale, value_scale
        if key_scale is not None:
            of_keys = tl.load(key_scale + head)
        if value_scale is not None:
            of_values = tl.load(value_scale + head)
        given_query = loaded(q_ptrs, offs_d, in_query, query_norm, cos_ptr, sin_ptr, HEAD)
        own_list = visible
        if visible is not None:
            own_list += (row.to(tl.int64) * heads + head) * listed
        if NEW == 1:
            if visible is None:
                writes = first + end * BLOCK >= length
            else:
                place = _place(newest, length, listed, NEW, PAGE)
                writes = (place >= begin * BLOCK) & (place < end * BLOCK)
            newly = in_head & writes
            key_ptrs = key + row * key_row_stride + head * key_head_stride + tl.zeros([1, 1], tl.int32)
            given_key = loaded(key_ptrs, offs_d, newly, key_norm, cos_ptr, sin_ptr, HEAD)
            v = tl.load(value + row * value_row_stride + head * value_head_stride + offs_d, mask=newly, other=0.0)
            if writes:
                newest_key = as_stored(
                    turned(given_key, offs_d, key_norm, cos, epsilon, HEAD), pages, of_keys, saturated, in_head
                )
                newest_value = as_stored(v, pages, of_values, saturated, in_head)
                tl.store(slot_ptr + offs_d, newest_key, mask=in_head)
                tl.store(slot_ptr + values_offset + offs_d, newest_value, mask=in_head)
                tl.debug_barrier()  # written before any thread of the program reads it
        else:
            for new in tl.static_range(NEW):
                position = length - NEW + new
                place = position
                if visible is not None:
                    place = _place(position, length, listed, NEW, PAGE)
                if (place >= first + begin * BLOCK) & (place < first + end * BLOCK):
                    token = row * NEW + new
                    key_cos, key_sin = cos, sin
                    if cos is not None:
                        key_cos, key_sin = cos + token * HEAD, sin + token * HEAD
                    key_ptrs = key + token * key_row_stride + head * key_head_stride + tl.zeros([1, 1], tl.int32)
                    k = prepared(key_ptrs, offs_d, in_head, key_norm, key_cos, key_sin, epsilon, HEAD)
                    v = tl.load(value + token * value_row_stride + head * value_head_stride + offs_d, mask=in_head)
                    new_page = tl.load(own_indices + position // PAGE).to(tl.int64)
                    new_ptr = head_pages + new_page * (2 * values_offset) + (position % PAGE) * DIM
                    k = as_stored(k, pages, of_keys, saturated, in_head)
                    v = as_stored(v, pages, of_values, saturated, in_head)
                    tl.store(new_ptr + offs_d, k, mask=in_head)
                    tl.store(new_ptr + values_offset + offs_d, v, mask=in_head)
            tl.debug_barrier()
        q = turned(given_query, offs_d, query_norm, cos, epsilon, HEAD)
        if of_keys is not None:
            scale *= of_keys
        q, factor = as_multiplied(q, scale, pages)
        q = _repeated(q, HEADS)
        if pages.dtype.element_ty == tl.float8e4nv and query.dtype.element_ty == tl.bfloat16:
            factor = _repeated(factor, HEADS)
        values, lses = _attend(
            q, head_pages, own_indices, values_offset, first, length, begin, end, window_left, factor, cap,
            own_list, listed, row, head, tensors, sizes, NEW, GQA, PAGE, DIM, BLOCK, CAPPED, STAGES,
            TRANSFORMED, LOGITS, VISIBLE, SUMMED,
        )  # fmt: skip
        if of_values is not None:
            values *= of_values
        item = row * heads + head
        if count == 1:
            _store(out, lse, values, lses, item, heads, HEADS, NEW, GQA, HEAD, DIM)
        else:
            first_partial = (tile * heads + head) * programs
            offs_p, used = (first_partial + program) * PADDED + offs_g, offs_g < PADDED
            own_values = partials + offs_p[:, None] * DIM + offs_d
            tl.store(own_values, values, mask=used[:, None], cache_modifier=".cg")
            tl.store(partial_lses + offs_p, lses, mask=used, cache_modifier=".cg")
            tl.debug_barrier()  # every thread's part is written before one of them says so
            if tl.atomic_add(arrivals + item, 1, sem="acq_rel", scope="gpu") == count - 1:
                merged, merged_lses = _merge(
                    partials, partial_lses, first_partial + first_program, count, BLIND, PADDED, DIM, CHUNK,
                    UNSEEN=TRANSFORMED, SUMMED=SUMMED,
                )  # fmt: skip
                _store(out, lse, merged, merged_lses, item, heads, PADDED, NEW, GQA, HEAD, DIM)
                tl.store(arrivals + item, 0)
        if PDL and shared_lengths is not None:  # noqa: SIM102  known when the kernel is compiled
            if (item == 0) & (program == first_program):
                gdc_wait()


def decode(args: DecodeAttention, lse: Tensor | None, *, tiling: AttentionTiling, pdl: bool) -> Tensor:
    """Launch attention of q queries a row, and return ``[T, H, D]``, contiguous; arguments as of ``prepare_decode``."""
    out, launch = prepare_decode(args, lse, tiling=tiling, pdl=pdl)
    launch()
    return out


def prepare_decode(
    args: DecodeAttention,
    lse: Tensor | None,
    *,
    tiling: AttentionTiling,
    pdl: bool,
    shared_lengths: Tensor | None = None,
    transform: LogitsTransform | None = None,
) -> tuple[Tensor, Callable[[], None]]:
    """Prepare attention of q queries a row: ``[T, H, D]``, contiguous, and what launches the kernel that writes it.

    Preparing may launch kernels that copy or clear; the launch itself is one kernel.

    Args:
        args: of ``decode_attention``, checked; query in one of DTYPES, or ValueError, ``pages`` ``[P, 2, K, S, D']``
            contiguous, with D' a power of two from 64 on; each row has a page at least.
        lse: ``[T, H]`` float32, contiguous, written: the log-sum-exp in base 2. None to skip it.
        tiling: block times D' is a power of two.
        shared_lengths: ``[B]`` int32, contiguous: so many of each row's first keys are not attended to; multiples of S,
            and fewer than the row has before its new ones. With ``pdl`` the kernel that is launched just before must
            have waited before it let this one begin.
        transform: what else becomes of logits; without ``shared_lengths``, ``visible`` and a cap.
    """
    check_launch("decode_attention", args.query, args.pages, DTYPES)
    query, key, value = with_whole_heads(args.query, args.key, args.value)
    query_norm, key_norm, cos, sin = contiguous(args.query_norm, args.key_norm, args.cos, args.sin)
    key_scale, value_scale, visible = contiguous(args.key_scale, args.value_scale, args.visible)
    (_, heads, head_dim), (_, _, kv_heads, page_size, stored) = query.shape, args.pages.shape
    rows, new_tokens, gqa = len(args.starts), args.new_tokens, heads // kv_heads
    padded = triton.next_power_of_2(new_tokens * gqa)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    row_tiles = -(-rows // tiling.row_tile)
    # The only program of a row and kv head touches none of these; their types would make it another kernel.
    partial_results = kv_heads * tiling.programs * row_tiles if tiling.programs > 1 else 0
    partials = torch.empty((partial_results, padded, stored), dtype=torch.float32, device=query.device)
    partial_lses = torch.empty((partial_results, padded), dtype=torch.float32, device=query.device)
    arrivals = zeroed_counters.take(rows * kv_heads, query.device) if partial_results else args.starts
    window_left = args.window_left if args.window_left >= 0 else 2**31 - new_tokens
    factor, cap = factors(args.scale, args.logits_soft_cap)
    tensors, sizes = None, None
    if transform is not None:
        factor, (tensors, sizes) = transform.factor(args.scale), transform.arguments
    constants: dict[str, Any] = {
        "ROWS": 1 if tiling.row_tile == 1 else MAX_ROWS, "MOST": MAX_SHARES,
        "NEW": new_tokens, "GQA": gqa, "PADDED": padded, "HEAD": head_dim, "DIM": stored, "PAGE": page_size,
        "BLOCK": tiling.block, "CHUNK": max(1, MERGED_VALUES // (padded * stored)), "STAGES": tiling.stages,
        "CAPPED": cap > 0, "SHARE_EQUAL": tiling.share_equal, "PDL": pdl, "num_warps": tiling.warps,
        **({"launch_pdl": True} if pdl else {}),
        **({"maxnreg": tiling.registers} if tiling.registers and transform is None else {}),
        **({} if transform is None else transform.constants),
    }  # fmt: skip
    launch = functools.partial(
        _decode_paged_attention[(kv_heads, row_tiles, tiling.programs)],
        query, key, value, args.pages, args.starts, args.lengths, args.indices, shared_lengths,
        query_norm, key_norm, cos, sin, out, lse, partials, partial_lses, arrivals,
        key_scale, value_scale, args.saturated, visible, tensors, sizes,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], rows, tiling.row_tile, window_left,
        tiling.unsplit, tiling.min_share, 0 if visible is None else visible.shape[2], factor, cap, args.epsilon,
        **constants,
    )  # fmt: skip
    return out, launch
