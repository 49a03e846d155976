"""The kernel of latent decode for Hopper, in Gluon: the next block of latents is copied while one is multiplied."""

# What a program reads and finds is as in ``decode``. There the compiler orders copies, and copies a block only when the
# one that lies in its buffer has been multiplied, after all of its products. Here they are ordered by hand: two blocks
# fit shared memory, and one is always on its way. Page numbers are loaded a block earlier than latents, and chosen
# tokens of a row, whose positions say which page numbers, another block earlier.
# Hopper's products are made by warp groups, four warps each, of 64 rows at least, out of shared memory. With up to 32
# heads there is one group: keys, and then numbers of a latent, are its rows, and heads its columns. With 64 heads these
# are rows, and two groups divide the columns, since registers of one hold no more than half of the sums.
# Shapes: M query heads of a program, N keys of a block, R latent size, E size of the rotated part, S page size.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportFunctionMemberAccess=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_llm_ops.kernels.attention.decode import _pick as pick, _share as share
from compiled_llm_ops.kernels.latent.step import least_share

_pick = gluon.jit(pick.fn)
_share = gluon.jit(share.fn)
_least_share = gluon.jit(least_share.fn)


# ---- which thread has what


@gluon.constexpr_function
def _lines(width: int, block: int, warps: int) -> gl.BlockedLayout:
    """Of copies ``[N, width]``: sixteen bytes for a thread, and rows next to each other for a warp."""
    across = min(32, width // 8)
    return gl.BlockedLayout([max(1, block * across // (32 * warps)), 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def _paged(page: int, block: int, lines: gl.BlockedLayout) -> gl.DistributedLinearLayout:
    """Of page numbers and places in pages ``[N / S, S]``: a thread has those of the rows that it copies."""
    steps = [[step // page, step % page] for step in (1 << bit for bit in range(block.bit_length() - 1))]
    found, same = [], [0, 0]
    for size in (lines.size_per_thread[0], lines.threads_per_warp[0], lines.warps_per_cta[0]):
        bits = size.bit_length() - 1
        found.append(steps[:bits] + [same] * (bits - len(steps)))
        steps = steps[bits:]
    registers, lanes, warps = found
    return gl.DistributedLinearLayout(registers, [same] * (5 - len(lanes)) + lanes, warps, [], [block // page, page])


@gluon.constexpr_function
def _products(columns: int, warps: int) -> gl.NVMMADistributedLayout:
    """Of products with so many columns: the warps of a group divide rows, and groups divide columns."""
    groups = warps // 4
    return gl.NVMMADistributedLayout([3, 0], [4, groups], [16, min(256, columns // groups), 16])


@gluon.constexpr_function
def _multiplied(width: int) -> gl.NVMMASharedLayout:
    """Of rows in shared memory that tensor cores read."""
    return gl.NVMMASharedLayout(min(128, 2 * width), 16)


@gluon.jit
def _of_heads(values, KEYS_FIRST: gl.constexpr):
    """Return a value of each head beside products, whose columns are heads if KEYS_FIRST, and else rows."""
    return values[None, :] if KEYS_FIRST else values[:, None]


@gluon.jit
def _of_others(values, KEYS_FIRST: gl.constexpr):
    """Return a value of each key, or number of a latent, beside products."""
    return values[:, None] if KEYS_FIRST else values[None, :]


# ---- copies


@gluon.jit
def _entries(block, length, PAGE: gl.constexpr, BLOCK: gl.constexpr, LINES: gl.constexpr):
    """Return the entries ``[N / S]`` of a block in the table of a row, past its end those of its last page."""
    # A list of chosen tokens is a table whose pages have one token.
    entry = block * (BLOCK // PAGE) + gl.arange(0, BLOCK // PAGE, gl.SliceLayout(1, _paged(PAGE, BLOCK, LINES)))
    return gl.minimum(entry, (length - 1) // PAGE)


@gluon.jit
def _load_numbers(
    indices, block, length, PAGE: gl.constexpr, BLOCK: gl.constexpr, WIDE: gl.constexpr, NARROW: gl.constexpr
):
    """Return the page numbers of a block twice, as threads need them that copy latents, and rotated parts."""
    numbers = gl.load(indices + _entries(block, length, PAGE, BLOCK, WIDE))
    return numbers, gl.load(indices + _entries(block, length, PAGE, BLOCK, NARROW))


@gluon.jit
def _slots(indices, position, length, PAGE: gl.constexpr):
    """Return the numbers of slots of chosen tokens; of those that a query does not see, of its row's newest."""
    # Any other slot may hold NaN, whose product with a weight of zero is not zero.
    position = gl.where((position >= 0) & (position < length), position, length - 1)
    return gl.load(indices + position // PAGE) * PAGE + position % PAGE


@gluon.jit
def _load_next(
    indices, chosen, positions, block, length, listed,
    PAGE: gl.constexpr, BLOCK: gl.constexpr, WIDE: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """Numbers of a block to copy, twice as of ``_load_numbers``, and positions of the next one's chosen tokens."""
    # The numbers are those of pages, or of slots of the chosen tokens at ``positions``.
    if chosen is None:
        numbers = _load_numbers(indices, block, length, PAGE, BLOCK, WIDE, NARROW)
    else:
        numbers = _slots(indices, positions[0], length, PAGE), _slots(indices, positions[1], length, PAGE)
        positions = _load_numbers(chosen, block + 1, listed, 1, BLOCK, WIDE, NARROW)
    return numbers, positions


@gluon.jit
def _copy(target, pages, numbers, block, length, SIZE: gl.constexpr, PAGE: gl.constexpr, LINES: gl.constexpr):
    """Begin to copy what ``target`` takes of each token of a block; past the row's end, of its last token."""
    # A slot past the end may hold NaN, whose product with a weight of zero is not zero.
    BLOCK: gl.constexpr = target.shape[0]
    inside = gl.arange(0, PAGE, gl.SliceLayout(0, _paged(PAGE, BLOCK, LINES)))
    first = _entries(block, length, PAGE, BLOCK, LINES) * PAGE
    inside = gl.minimum(inside[None, :], (length - 1 - first)[:, None])
    slot = gl.reshape((numbers.to(gl.int64)[:, None] * PAGE + inside) * SIZE, [BLOCK])
    slot = gl.multiple_of(gl.convert_layout(slot, gl.SliceLayout(1, LINES)), 16)
    offs = gl.arange(0, target.shape[1], gl.SliceLayout(0, LINES))
    async_copy.async_copy_global_to_shared(target, (pages + slot)[:, None] + offs[None, :])


@gluon.jit
def _copy_block(
    latents, turned, pages, chosen, numbers, block, length, listed,
    PAGE: gl.constexpr, WIDE: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """Begin to copy a block, latents ``[N, R]`` and rotated parts ``[N, E]``, as one group of copies."""
    READ: gl.constexpr = PAGE if chosen is None else 1
    entries = length if chosen is None else listed
    RANK: gl.constexpr = latents.shape[1]
    SIZE: gl.constexpr = RANK + turned.shape[1]
    _copy(latents, pages, numbers[0], block, entries, SIZE, READ, WIDE)
    _copy(turned, pages + RANK, numbers[1], block, entries, SIZE, READ, NARROW)
    async_copy.commit_group()


@gluon.jit
def _queries(states, head_stride, head, heads, dtype: gl.constexpr, TILE: gl.constexpr, WIDTH: gl.constexpr):
    """Return shared memory with the queries ``[M, WIDTH]`` of a tile of heads; zeros past the last head."""
    LINES: gl.constexpr = _lines(WIDTH, TILE, gl.num_warps())
    own = head + gl.arange(0, TILE, gl.SliceLayout(1, LINES))
    numbers = gl.arange(0, WIDTH, gl.SliceLayout(0, LINES))
    found = gl.load(states + own[:, None] * head_stride + numbers[None, :], mask=(own < heads)[:, None], other=0.0)
    return gl.allocate_shared_memory(dtype, [TILE, WIDTH], _multiplied(WIDTH), found)


@gluon.jit
def _store_newest(slot, latent, rope, RANK: gl.constexpr, ROPE: gl.constexpr):
    """Write a row's newest latent into its page, before any thread of the program reads it."""
    offs_r = gl.arange(0, RANK, gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    offs_e = gl.arange(0, ROPE, gl.BlockedLayout([2], [32], [gl.num_warps()], [0]))
    gl.store(slot + offs_r, gl.load(latent + offs_r))
    gl.store(slot + RANK + offs_e, gl.load(rope + offs_e))
    gl.thread_barrier()


@gluon.jit
def _store_result(out, lse, item, offs_v, offs_h, values, lses, keep, known, RANK: gl.constexpr):
    """Write what a row's heads from ``item`` on have: all of it, not a part that is merged."""
    gl.store(out + item * RANK + offs_v, values.to(out.dtype.element_ty), mask=keep)
    if lse is not None:
        gl.store(lse + item + offs_h, lses, mask=known)


# ---- products


@gluon.jit
def _begin_product(left, right, acc, KEYS_FIRST: gl.constexpr, ADDS: gl.constexpr):
    """Begin to multiply each row of ``left`` with each of ``right``; results are turned unless KEYS_FIRST."""
    if KEYS_FIRST:
        acc = hopper.warpgroup_mma(left, right.permute((1, 0)), acc, use_acc=ADDS, is_async=True)
    else:
        acc = hopper.warpgroup_mma(right, left.permute((1, 0)), acc, use_acc=ADDS, is_async=True)
    return acc


@gluon.jit
def _attend(
    q, q_rope, wide, narrow, pages, indices, chosen, numbers, positions, begin, end, length, listed, scale,
    PAGE: gl.constexpr, WIDE: gl.constexpr, NARROW: gl.constexpr, KEYS_FIRST: gl.constexpr,
    LOGITS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Return the largest logits ``[M]``, sums of weights and of weighted latents, over blocks ``begin`` to ``end``."""
    # The first block is being copied into ``wide`` and ``narrow``, which have room for two; ``numbers`` are the second
    # one's, and ``positions`` those of chosen tokens of the third one. Sums of weights are ``[N, M]``, one for each key
    # of a block, and of latents ``[R, M]``; turned unless KEYS_FIRST.
    TILE: gl.constexpr = q.shape[0]
    BLOCK: gl.constexpr = wide.shape[1]
    RANK: gl.constexpr = wide.shape[2]
    AXIS: gl.constexpr = 1 if KEYS_FIRST else 0  # of heads
    WEIGHTS: gl.constexpr = [BLOCK, TILE] if KEYS_FIRST else [TILE, BLOCK]
    dtype: gl.constexpr = pages.dtype.element_ty
    weighing = gl.allocate_shared_memory(dtype, WEIGHTS, gl.NVMMASharedLayout.get_default_for(WEIGHTS, dtype))
    by_head = weighing.permute((1, 0)) if KEYS_FIRST else weighing
    offs_n = gl.arange(0, BLOCK, gl.SliceLayout(AXIS, LOGITS))
    largest = gl.full([TILE], -float("inf"), gl.float32, gl.SliceLayout(1 - AXIS, LOGITS))
    nothing = gl.zeros(WEIGHTS, gl.float32, LOGITS)
    total = gl.zeros(WEIGHTS, gl.float32, LOGITS)
    acc = gl.zeros([RANK, TILE] if KEYS_FIRST else [TILE, RANK], gl.float32, SUMS)
    for block in range(begin, end):
        this = (block - begin) % 2
        position = block * BLOCK + offs_n
        if chosen is not None:
            position = gl.load(chosen + position, mask=position < listed, other=-1)
        # Each thread waits for its copies, and then for all others, at a barrier that the compiler adds: the block is
        # whole, and no warp still multiplies the previous one, which is copied over next.
        async_copy.wait_group(0)
        if block + 1 < end:
            following = wide.index(1 - this), narrow.index(1 - this)
            _copy_block(
                following[0], following[1], pages, chosen, numbers, block + 1, length, listed, PAGE, WIDE, NARROW
            )
            numbers, positions = _load_next(
                indices, chosen, positions, block + 2, length, listed, PAGE, BLOCK, WIDE, NARROW
            )
        latents, turned = wide.index(this), narrow.index(this)
        hopper.fence_async_shared()  # tensor cores read shared memory past what orders copies and stores of threads
        logits = _begin_product(turned, q_rope, nothing, KEYS_FIRST, False)
        logits = _begin_product(latents, q, logits, KEYS_FIRST, True)
        logits = hopper.warpgroup_mma_wait(0, [logits])
        seen = _of_others((position >= 0) & (position < length), KEYS_FIRST)
        logits = gl.where(seen, logits * scale, -float("inf"))
        larger = gl.maximum(largest, gl.max(logits, 1 - AXIS))
        base = larger
        if chosen is not None:  # there may be no key that a query sees
            base = gl.where(larger == -float("inf"), 0.0, larger)
        weights = gl.exp2(logits - _of_heads(base, KEYS_FIRST))
        fade = gl.exp2(largest - base)
        total = total * _of_heads(fade, KEYS_FIRST) + weights
        largest = larger
        weighing.store(weights.to(dtype))
        hopper.fence_async_shared()
        fade = _of_heads(gl.convert_layout(fade, gl.SliceLayout(1 - AXIS, SUMS)), KEYS_FIRST)
        acc = _begin_product(latents.permute((1, 0)), by_head, acc * fade, KEYS_FIRST, True)
        acc = hopper.warpgroup_mma_wait(0, [acc])
    return largest, total, acc


@gluon.jit(do_not_specialize=["rows", "row_tile", "heads", "min_share", "few", "equal", "listed"])
def _latent_decode_hopper(
    query_latent, query_rope, latent, rope, pages, starts, lengths, indices,
    out, lse, partials, partial_lses, shares,
    row_stride, head_stride, rope_row_stride, rope_head_stride, latent_stride, key_rope_stride,
    rows, row_tile, heads, min_share, few, equal, scale, chosen, listed,
    ROWS: gl.constexpr, MOST: gl.constexpr, TILE: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr,
    PAGE: gl.constexpr, BLOCK: gl.constexpr, KEYS_FIRST: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As ``decode._latent_decode``."""
    WIDE: gl.constexpr = _lines(RANK, BLOCK, gl.num_warps())
    NARROW: gl.constexpr = _lines(ROPE, BLOCK, gl.num_warps())
    LOGITS: gl.constexpr = _products(TILE if KEYS_FIRST else BLOCK, gl.num_warps())
    SUMS: gl.constexpr = _products(TILE if KEYS_FIRST else RANK, gl.num_warps())
    AXIS: gl.constexpr = 1 if KEYS_FIRST else 0  # of heads
    OF_HEADS: gl.constexpr = gl.SliceLayout(1 - AXIS, SUMS)
    dtype: gl.constexpr = pages.dtype.element_ty
    head_tile, tile, program = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    head_tiles, programs = gl.num_programs(0), gl.num_programs(2)
    head = head_tile * TILE
    each = gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    row_ids = tile * row_tile + each
    mask = (each < row_tile) & (row_ids < rows)
    first_pages = gl.load(starts + row_ids, mask=mask, other=0)
    ends = gl.load(lengths + row_ids, mask=mask, other=0)  # no row: no keys
    blocks = (ends + BLOCK - 1) // BLOCK
    if chosen is not None:  # of the list
        blocks = gl.where(ends > 0, (listed + BLOCK - 1) // BLOCK, 0)
    least = _least_share(blocks, row_tile, min_share, few, equal)
    own, first_program, count, begin, end = _share(blocks, program, programs, row_tile, least, least, MOST)
    offs_h = gl.arange(0, TILE, OF_HEADS)
    offs_r = _of_others(gl.arange(0, RANK, gl.SliceLayout(AXIS, SUMS)), KEYS_FIRST)
    offs_v = _of_heads(offs_h, KEYS_FIRST) * RANK + offs_r
    known = head + offs_h < heads
    keep = _of_heads(known, KEYS_FIRST) & (offs_r >= 0)
    # The first programs answer for rows without keys: there is one for each row at least.
    unseen = mask & (each == program) & (ends == 0)
    if gl.sum(unseen.to(gl.int32), 0) > 0:
        if PDL:
            gdc_wait()
        row = tile * row_tile + program
        item = row.to(gl.int64) * heads + head
        _store_result(out, lse, item, offs_v, offs_h, offs_v * 0, offs_h * 0.0 - float("inf"), keep, known, RANK)
        if shares is not None:
            gl.store(shares + 2 * row + 1, 0)
    if count > 0:
        row, length = _pick(own, row_ids), _pick(own, ends)
        own_indices = indices + _pick(own, first_pages)
        newest = length - 1
        own_list = chosen
        if chosen is None:
            numbers = _load_numbers(own_indices, begin, length, PAGE, BLOCK, WIDE, NARROW)
            positions = numbers  # of none
        page = gl.load(own_indices + newest // PAGE).to(gl.int64)
        slot = pages + (page * PAGE + newest % PAGE) * (RANK + ROPE)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        at = row.to(gl.int64)
        writes = end * BLOCK >= length
        if chosen is not None:  # any program may read the newest, so each writes it
            own_list = chosen + at * listed
            positions = _load_numbers(own_list, begin, listed, 1, BLOCK, WIDE, NARROW)
            numbers, positions = _load_next(
                own_indices, own_list, positions, begin, length, listed, PAGE, BLOCK, WIDE, NARROW
            )
            writes = begin < end
        if writes:
            _store_newest(slot, latent + at * latent_stride, rope + at * key_rope_stride, RANK, ROPE)
        wide = gl.allocate_shared_memory(dtype, [2, BLOCK, RANK], _multiplied(RANK))
        narrow = gl.allocate_shared_memory(dtype, [2, BLOCK, ROPE], _multiplied(ROPE))
        _copy_block(wide.index(0), narrow.index(0), pages, own_list, numbers, begin, length, listed, PAGE, WIDE, NARROW)
        numbers, positions = _load_next(
            own_indices, own_list, positions, begin + 1, length, listed, PAGE, BLOCK, WIDE, NARROW
        )
        q = _queries(query_latent + at * row_stride, head_stride, head, heads, dtype, TILE, RANK)
        q_rope = _queries(query_rope + at * rope_row_stride, rope_head_stride, head, heads, dtype, TILE, ROPE)
        largest, total, acc = _attend(
            q, q_rope, wide, narrow, pages, own_indices, own_list, numbers, positions, begin, end, length, listed,
            scale, PAGE, WIDE, NARROW, KEYS_FIRST, LOGITS, SUMS,
        )  # fmt: skip
        total = gl.sum(total, 1 - AXIS)
        if chosen is not None:
            total = gl.where(total == 0.0, 1.0, total)
        lses = gl.convert_layout(largest + gl.log2(total), OF_HEADS)
        values = acc / _of_heads(gl.convert_layout(total, OF_HEADS), KEYS_FIRST)
        if shares is not None:
            gl.store(shares + 2 * row, first_program)
            gl.store(shares + 2 * row + 1, count)
        if count == 1:
            _store_result(out, lse, at * heads + head, offs_v, offs_h, values, lses, keep, known, RANK)
        elif shares is not None:
            part = ((tile * head_tiles + head_tile) * programs + program).to(gl.int64) * TILE
            gl.store(partials + part * RANK + offs_v, values, mask=keep)
            gl.store(partial_lses + part + offs_h, lses)
