"""A Triton kernel for attention over latents whose rotated parts lie apart, in pages of any strides."""

# A program has some pairs of a token and a head, next to each other, of one row: all heads read the same latents, once.
# Where there are few programs, as in decode, several share the keys of each, and their results are merged.
# Shapes: T packed tokens, H query heads, M pairs of a program, R latent size, E size of the rotated part.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false

from __future__ import annotations

import math

import triton
import triton.language as tl

from compiled_llm_flashinfer.ops.contracts import StridedLatentAttention
from compiled_llm_flashinfer.ops.kernels.strided.parts import PartResults, check_contiguous
from compiled_llm_ops.contracts.devices import device_of
from compiled_llm_ops.kernels.attention.packed import row_of
from compiled_llm_ops.kernels.latent.latent_tiling import STAGES, QueryTile, missing_kernel, query_tile
from compiled_llm_ops.kernels.latent.step import attend_block, inner_contiguous

MOST_TOKENS = 4  # tokens of a program, at most: with 16 heads they fill a tile

SHORTEST_PART = 256  # keys that a program has on average at least, if several share a row

MOST_PARTS = 16  # programs that share a row at most


@triton.jit(do_not_specialize=["rows"])
def _strided_latents(
    query_latent, query_rope, latents, ropes, out, lse, qo_indptr, indptr, indices, lengths,
    token_stride, head_stride, rope_token_stride, rope_head_stride, latent_page, latent_slot, rope_page, rope_slot,
    out_token, out_head, out_part, lse_token, lse_head, lse_part, rows, scale,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of pairs over one part of its row's keys. Axes of the grid: tiles, parts."""
    tile, part = tl.program_id(0), tl.program_id(1)
    row = row_of(tile, qo_indptr, rows, QUERIES, HEADS)
    row_begin, row_end = tl.load(qo_indptr + row).to(tl.int32), tl.load(qo_indptr + row + 1).to(tl.int32)
    first_pair = (tile - row_begin * HEADS // QUERIES - row) * QUERIES
    end_pair = tl.minimum(first_pair + QUERIES, (row_end - row_begin) * HEADS)
    if first_pair < end_pair:
        length, own_indices = tl.load(lengths + row).to(tl.int32), indices + tl.load(indptr + row)
        pair, offs_n = first_pair + tl.arange(0, QUERIES), tl.arange(0, BLOCK)
        offs_r, offs_e = tl.arange(0, RANK), tl.arange(0, ROPE)
        used, head = pair < end_pair, pair % HEADS
        number = tl.minimum(pair // HEADS, row_end - row_begin - 1)
        token = (row_begin + number).to(tl.int64)
        q_ptrs = query_latent + (token * token_stride + head * head_stride)[:, None] + offs_r[None, :]
        q = tl.load(q_ptrs, mask=used[:, None], other=0.0)
        rope_ptrs = query_rope + (token * rope_token_stride + head * rope_head_stride)[:, None] + offs_e[None, :]
        q_rope = tl.load(rope_ptrs, mask=used[:, None], other=0.0)
        own, end = tl.zeros([QUERIES], tl.int32) + length, length
        if CAUSAL:
            own = number + length - (row_end - row_begin)
            end = length - (row_end - row_begin) + (end_pair - 1) // HEADS + 1
        blocks = (tl.maximum(end, 0) + BLOCK - 1) // BLOCK
        shared = (blocks + tl.num_programs(1) - 1) // tl.num_programs(1)
        largest = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        acc = tl.zeros([QUERIES, RANK], tl.float32)
        for block in tl.range(part * shared, tl.minimum(blocks, part * shared + shared), num_stages=STAGES):
            position = block * BLOCK + offs_n
            inside = position < end
            # Slots past a row may hold values (NaN) whose product with zero is not zero.
            page = tl.load(own_indices + position // PAGE, mask=inside, other=0).to(tl.int64)
            latent_ptrs = latents + (page * latent_page + position % PAGE * latent_slot)[:, None] + offs_r[None, :]
            turned_ptrs = ropes + (page * rope_page + position % PAGE * rope_slot)[:, None] + offs_e[None, :]
            keys = tl.load(latent_ptrs, mask=inside[:, None], other=0.0)
            turned = tl.load(turned_ptrs, mask=inside[:, None], other=0.0)
            seen = inside[None, :] & (position[None, :] <= own[:, None])
            largest, total, acc = attend_block(q, q_rope, keys, turned, seen, scale, largest, total, acc)
        total = tl.where(total == 0.0, 1.0, total)
        values = acc / total[:, None]
        out_ptrs = out + token * out_token + head * out_head + part.to(tl.int64) * out_part
        tl.store(out_ptrs[:, None] + offs_r[None, :], values.to(out.dtype.element_ty), mask=used[:, None])
        if lse is not None:
            lse_ptrs = lse + token * lse_token + head * lse_head + part.to(tl.int64) * lse_part
            tl.store(lse_ptrs, largest + tl.log2(total), mask=used)


def _parts(args: StridedLatentAttention, tiles: int) -> int:
    """Return how many programs share a row's keys: so many that the device has work, if rows may be long enough."""
    keys = args.indices.shape[0] * args.latents.shape[1] // max(1, args.rows)
    return max(1, min(device_of(args.out.device).processors // max(1, tiles), keys // SHORTEST_PART, MOST_PARTS))


def attend(args: StridedLatentAttention, tile: QueryTile | None = None, parts: int | None = None) -> None:
    """Launch attention; so many programs share the keys of a row, None for what the device needs."""
    # ValueError if there is no kernel for the sizes or dtypes, or latents are not next to each other.
    _check(args)
    query, query_rope = map(inner_contiguous, args[:2])
    tokens, heads, rank = query.shape
    if not tokens:
        return
    args = args._replace(query_latent=query, query_rope=query_rope)
    if tile is None:
        tile = query_tile(heads, rank, 1 if tokens <= args.rows else MOST_TOKENS)
    pairs = max(16, tile.heads * tile.tokens)
    tiles = tokens * heads // pairs + args.rows  # at least as many as all rows have
    parts = _parts(args, tiles) if parts is None else parts
    results = PartResults(args.out, args.lse, parts)
    _launch(args, results, tile, (tiles, parts))
    results.merge()


def _check(args: StridedLatentAttention) -> None:
    dtype = args.query_latent.dtype
    if (missing := missing_kernel(args.query_latent.shape[2], args.query_rope.shape[2], dtype)) is not None:
        raise ValueError(f"strided_latent_attention: {missing}")
    if args.latents.dtype != dtype:
        raise ValueError(f"strided_latent_attention: latents must be {dtype}, as queries; got {args.latents.dtype}")
    check_contiguous("strided_latent_attention", "token", latents=args.latents, ropes=args.ropes)


def _launch(args: StridedLatentAttention, results: PartResults, tile: QueryTile, grid: tuple[int, int]) -> None:
    _, heads, rank = args.query_latent.shape
    _strided_latents[grid](
        *args[:4], results.out, results.lse, *args[6:10], *args.query_latent.stride()[:2],
        *args.query_rope.stride()[:2], *args.latents.stride()[:2], *args.ropes.stride()[:2], *results.strides,
        args.rows, args.scale * math.log2(math.e), HEADS=heads, QUERIES=max(16, tile.heads * tile.tokens), RANK=rank,
        ROPE=args.query_rope.shape[2], PAGE=args.latents.shape[1], BLOCK=tile.block, STAGES=STAGES, CAUSAL=args.causal,
        num_warps=tile.warps,
    )  # fmt: skip
