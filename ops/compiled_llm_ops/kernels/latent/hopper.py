"""The kernel of latent decode for Hopper, in Gluon: the next block of latents is copied while one is multiplied.

What a program reads and finds is as in ``decode``. There the compiler orders copies, and copies a block only when the
one that lies in its buffer has been multiplied, after all of its products. Here they are ordered by hand: two blocks
fit shared memory, and one is always on its way.

Shapes: M query heads of a program, N keys of a block, R latent size, E size of the rotated part, S page size.
"""

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportFunctionMemberAccess=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_llm_ops.kernels.attention import decode

_pick = gluon.jit(decode._pick.fn)
_share = gluon.jit(decode._share.fn)
_unsplit = gluon.jit(decode._unsplit.fn)


@gluon.constexpr_function
def _lines(width: int, block: int, warps: int) -> gl.BlockedLayout:
    """Of copies ``[N, width]``: sixteen bytes for a thread, and rows next to each other for a warp."""
    across = min(32, width // 8)
    return gl.BlockedLayout([max(1, block * across // (32 * warps)), 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def _paged(page: int, block: int, lines: gl.BlockedLayout) -> gl.DistributedLinearLayout:
    """The layout of ``[N / S, S]`` that ``lines`` follow from."""
    steps = [[step // page, step % page] for step in (1 << bit for bit in range(block.bit_length() - 1))]
    found, same = [], [0, 0]
    for size in (lines.size_per_thread[0], lines.threads_per_warp[0], lines.warps_per_cta[0]):
        bits = size.bit_length() - 1
        found.append(steps[:bits] + [same] * (bits - len(steps)))
        steps = steps[bits:]
    registers, lanes, warps = found
    return gl.DistributedLinearLayout(registers, [same] * (5 - len(lanes)) + lanes, warps, [], [block // page, page])


@gluon.jit
def _load_numbers(indices, block, last, PAGE: gl.constexpr, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the entries ``[N / S]`` of a block in a row's table, none past ``last``, and the page numbers there."""
    entry = block * (BLOCK // PAGE) + gl.arange(0, BLOCK // PAGE, gl.SliceLayout(1, LAYOUT))
    entry = gl.minimum(entry, last)
    return entry, gl.load(indices + entry)


@gluon.jit
def _copy(
    target, pages, entry, number, length, SIZE: gl.constexpr, PAGE: gl.constexpr, PAGED: gl.constexpr,
    LINES: gl.constexpr,
):  # fmt: skip
    """Begin to copy each token's numbers into ``target``, so many as it takes; past the row's end, the last token's."""
    BLOCK: gl.constexpr = target.shape[0]
    WIDTH: gl.constexpr = target.shape[1]
    inside = gl.arange(0, PAGE, gl.SliceLayout(0, PAGED))
    inside = gl.minimum(inside[None, :], (length - 1 - entry * PAGE)[:, None])
    slot = gl.reshape((number.to(gl.int64)[:, None] * PAGE + inside) * SIZE, [BLOCK])
    slot = gl.multiple_of(gl.convert_layout(slot, gl.SliceLayout(1, LINES)), 16)
    numbers = gl.arange(0, WIDTH, gl.SliceLayout(0, LINES))
    async_copy.async_copy_global_to_shared(target, (pages + slot)[:, None] + numbers[None, :])


@gluon.jit
def _queries(states, head_stride, head, heads, dtype: gl.constexpr, TILE: gl.constexpr, WIDTH: gl.constexpr):
    """Return shared memory with the queries ``[M, WIDTH]`` of a tile of heads; zeros past the last head."""
    LINES: gl.constexpr = _lines(WIDTH, TILE, gl.num_warps())
    own = head + gl.arange(0, TILE, gl.SliceLayout(1, LINES))
    numbers = gl.arange(0, WIDTH, gl.SliceLayout(0, LINES))
    found = gl.load(states + own[:, None] * head_stride + numbers[None, :], mask=(own < heads)[:, None], other=0.0)
    return gl.allocate_shared_memory(dtype, [TILE, WIDTH], gl.NVMMASharedLayout(min(128, 2 * WIDTH), 16), found)


@gluon.jit(do_not_specialize=["rows", "row_tile", "heads", "unsplit", "min_share"])
def _latent_decode_hopper(
    query_latent, query_rope, latent, rope, pages, starts, lengths, indices,
    out, lse, partials, partial_lses, shares,
    row_stride, head_stride, rope_row_stride, rope_head_stride, latent_stride, key_rope_stride,
    rows, row_tile, heads, unsplit, min_share, scale,
    ROWS: gl.constexpr, MOST: gl.constexpr, TILE: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr,
    PAGE: gl.constexpr, BLOCK: gl.constexpr, KEYS_FIRST: gl.constexpr, SHARE_EQUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As ``decode._latent_decode``."""
    SIZE: gl.constexpr = RANK + ROPE
    WARPS: gl.constexpr = gl.num_warps()
    WIDE: gl.constexpr = _lines(RANK, BLOCK, WARPS)
    NARROW: gl.constexpr = _lines(ROPE, BLOCK, WARPS)
    WIDE_PAGES: gl.constexpr = _paged(PAGE, BLOCK, WIDE)
    NARROW_PAGES: gl.constexpr = _paged(PAGE, BLOCK, NARROW)
    ACROSS: gl.constexpr = WARPS // 4
    # How many of the numbers that an instruction multiplies by lie next to each other: warpgroups divide them, or rows.
    PRODUCTS: gl.constexpr = (TILE if KEYS_FIRST else BLOCK) // ACROSS
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, ACROSS], [16, PRODUCTS, 16])
    WEIGHTED: gl.constexpr = TILE if KEYS_FIRST else min(256, RANK // ACROSS)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [WARPS, 1] if KEYS_FIRST else [4, ACROSS], [16, WEIGHTED, 16]
    )
    HEAD_AXIS: gl.constexpr = 1 if KEYS_FIRST else 0
    OF_LOGITS: gl.constexpr = gl.SliceLayout(1 - HEAD_AXIS, LOGITS)
    OF_SUMS: gl.constexpr = gl.SliceLayout(1 - HEAD_AXIS, SUMS)
    ROW_LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    dtype: gl.constexpr = pages.dtype.element_ty

    head_tile, tile, program = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    head_tiles, programs = gl.num_programs(0), gl.num_programs(2)
    head = head_tile * TILE
    each = gl.arange(0, ROWS, ROW_LAYOUT)
    row_ids = tile * row_tile + each
    mask = (each < row_tile) & (row_ids < rows)
    first_pages = gl.load(starts + row_ids, mask=mask, other=0)
    ends = gl.load(lengths + row_ids, mask=mask, other=0)  # no row: no keys
    blocks = (ends + BLOCK - 1) // BLOCK
    unsplit = _unsplit(blocks, row_tile, unsplit, SHARE_EQUAL)
    own, first_program, count, begin, end = _share(blocks, program, programs, row_tile, unsplit, min_share, MOST)
    offs_v = gl.arange(0, RANK, gl.SliceLayout(HEAD_AXIS, SUMS))
    offs_h = gl.arange(0, TILE, OF_SUMS)
    if KEYS_FIRST:
        offs = offs_h[None, :] * RANK + offs_v[:, None]
        keep = (head + offs_h < heads)[None, :] & (offs_v >= 0)[:, None]
    else:
        offs = offs_h[:, None] * RANK + offs_v[None, :]
        keep = (head + offs_h < heads)[:, None] & (offs_v >= 0)[None, :]
    # The first programs answer for rows without keys: there is one for each row at least.
    unseen = mask & (each == program) & (ends == 0)
    if gl.sum(unseen.to(gl.int32), 0) > 0:
        if PDL:
            gdc_wait()
        row = tile * row_tile + program
        item = row.to(gl.int64) * heads + head
        gl.store(out + item * RANK + offs, (offs * 0).to(out.dtype.element_ty), mask=keep)
        if lse is not None:
            gl.store(lse + item + offs_h, offs_h * 0.0 - float("inf"), mask=head + offs_h < heads)
        if shares is not None:
            gl.store(shares + 2 * row + 1, 0)
    if count > 0:
        row, length = _pick(own, row_ids), _pick(own, ends)
        own_indices = indices + _pick(own, first_pages)
        newest = length - 1
        last = newest // PAGE
        entry, number = _load_numbers(own_indices, begin, last, PAGE, BLOCK, WIDE_PAGES)
        turned_entry, turned_number = _load_numbers(own_indices, begin, last, PAGE, BLOCK, NARROW_PAGES)
        page = gl.load(own_indices + last).to(gl.int64)
        slot = pages + (page * PAGE + newest % PAGE) * SIZE
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        line = gl.arange(0, RANK, gl.BlockedLayout([4], [32], [WARPS], [0]))
        short = gl.arange(0, ROPE, gl.BlockedLayout([2], [32], [WARPS], [0]))
        if end * BLOCK >= length:
            gl.store(slot + line, gl.load(latent + row.to(gl.int64) * latent_stride + line))
            gl.store(slot + RANK + short, gl.load(rope + row.to(gl.int64) * key_rope_stride + short))
            gl.thread_barrier()  # written before any thread of the program reads it

        wide = gl.allocate_shared_memory(dtype, [2, BLOCK, RANK], gl.NVMMASharedLayout(min(128, 2 * RANK), 16))
        narrow = gl.allocate_shared_memory(dtype, [2, BLOCK, ROPE], gl.NVMMASharedLayout(min(128, 2 * ROPE), 16))
        _copy(wide.index(0), pages, entry, number, length, SIZE, PAGE, WIDE_PAGES, WIDE)
        _copy(narrow.index(0), pages + RANK, turned_entry, turned_number, length, SIZE, PAGE, NARROW_PAGES, NARROW)
        async_copy.commit_group()
        entry, number = _load_numbers(own_indices, begin + 1, last, PAGE, BLOCK, WIDE_PAGES)
        turned_entry, turned_number = _load_numbers(own_indices, begin + 1, last, PAGE, BLOCK, NARROW_PAGES)

        q = _queries(query_latent + row.to(gl.int64) * row_stride, head_stride, head, heads, dtype, TILE, RANK)
        q_rope = _queries(
            query_rope + row.to(gl.int64) * rope_row_stride, rope_head_stride, head, heads, dtype, TILE, ROPE
        )
        LOGIT_SHAPE: gl.constexpr = [BLOCK, TILE] if KEYS_FIRST else [TILE, BLOCK]
        SUM_SHAPE: gl.constexpr = [RANK, TILE] if KEYS_FIRST else [TILE, RANK]
        chosen = gl.allocate_shared_memory(dtype, LOGIT_SHAPE, gl.NVMMASharedLayout.get_default_for(LOGIT_SHAPE, dtype))
        largest = gl.full([TILE], -float("inf"), gl.float32, OF_LOGITS)
        total = gl.zeros(LOGIT_SHAPE, gl.float32, LOGITS)
        nothing = gl.zeros(LOGIT_SHAPE, gl.float32, LOGITS)
        acc = gl.zeros(SUM_SHAPE, gl.float32, SUMS)
        offs_n = gl.arange(0, BLOCK, gl.SliceLayout(HEAD_AXIS, LOGITS))
        for block in range(begin, end):
            this = (block - begin) % 2
            async_copy.wait_group(0)
            if block + 1 < end:
                _copy(wide.index(1 - this), pages, entry, number, length, SIZE, PAGE, WIDE_PAGES, WIDE)
                _copy(
                    narrow.index(1 - this),
                    pages + RANK,
                    turned_entry,
                    turned_number,
                    length,
                    SIZE,
                    PAGE,
                    NARROW_PAGES,
                    NARROW,
                )
                async_copy.commit_group()
                entry, number = _load_numbers(own_indices, block + 2, last, PAGE, BLOCK, WIDE_PAGES)
                turned_entry, turned_number = _load_numbers(own_indices, block + 2, last, PAGE, BLOCK, NARROW_PAGES)
            hopper.fence_async_shared()
            latents, turned = wide.index(this), narrow.index(this)
            seen = offs_n < length - block * BLOCK
            if KEYS_FIRST:
                logits = hopper.warpgroup_mma(turned, q_rope.permute((1, 0)), nothing, use_acc=False, is_async=True)
                logits = hopper.warpgroup_mma(latents, q.permute((1, 0)), logits, is_async=True)
                logits = hopper.warpgroup_mma_wait(0, [logits])
                logits = gl.where(seen[:, None], logits * scale, -float("inf"))
                larger = gl.maximum(largest, gl.max(logits, 0))
                weights = gl.exp2(logits - larger[None, :])
                fade = gl.exp2(largest - larger)
                total = total * fade[None, :] + weights
            else:
                logits = hopper.warpgroup_mma(q_rope, turned.permute((1, 0)), nothing, use_acc=False, is_async=True)
                logits = hopper.warpgroup_mma(q, latents.permute((1, 0)), logits, is_async=True)
                logits = hopper.warpgroup_mma_wait(0, [logits])
                logits = gl.where(seen[None, :], logits * scale, -float("inf"))
                larger = gl.maximum(largest, gl.max(logits, 1))
                weights = gl.exp2(logits - larger[:, None])
                fade = gl.exp2(largest - larger)
                total = total * fade[:, None] + weights
            largest = larger
            chosen.store(weights.to(dtype))
            hopper.fence_async_shared()
            fade = gl.convert_layout(fade, OF_SUMS)
            if KEYS_FIRST:
                acc = hopper.warpgroup_mma(latents.permute((1, 0)), chosen, acc * fade[None, :], is_async=True)
            else:
                acc = hopper.warpgroup_mma(chosen, latents, acc * fade[:, None], is_async=True)
            acc = hopper.warpgroup_mma_wait(0, [acc])

        sums = gl.sum(total, 1 - HEAD_AXIS)
        lses = gl.convert_layout(largest + gl.log2(sums), OF_SUMS)
        sums = gl.convert_layout(sums, OF_SUMS)
        values = acc / (sums[None, :] if KEYS_FIRST else sums[:, None])
        if shares is not None:
            gl.store(shares + 2 * row, first_program)
            gl.store(shares + 2 * row + 1, count)
        if count == 1:
            item = row.to(gl.int64) * heads + head
            gl.store(out + item * RANK + offs, values.to(out.dtype.element_ty), mask=keep)
            if lse is not None:
                gl.store(lse + item + offs_h, lses, mask=head + offs_h < heads)
        elif shares is not None:
            part = ((tile * head_tiles + head_tile) * programs + program).to(gl.int64) * TILE
            gl.store(partials + part * RANK + offs, values, mask=keep)
            gl.store(partial_lses + part + offs_h, lses)
