"""A Triton kernel for latent attention of packed queries, without a plan."""

# A program has some packed tokens next to each other, with a tile of their heads, and reads the keys of the rows that
# these tokens belong to, mostly of one. Long prompts make many programs, each of which reads its row up to its last
# token.
# Shapes: T packed tokens, H query heads, M queries of a program, R latent size, E size of the rotated part, P pages, S
# page size.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportFunctionMemberAccess=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm_ops.contracts.latent import AppendLatent, LatentAttention, LatentDecode
from compiled_llm_ops.kernels.latent.append import append
from compiled_llm_ops.kernels.latent.latent_tiling import STAGES, query_tile
from compiled_llm_ops.kernels.latent.step import (
    attend_block,
    check_kernel,
    inner_contiguous,
    load_block,
    load_chosen,
)

MOST_TOKENS = 4  # tokens of a program, at most: with 16 heads they fill a tile


@triton.jit(do_not_specialize=["tokens", "heads", "listed", "each", "before"])
def _latent_attention(
    query_latent, query_rope, pages, token_rows, token_positions, indptr, indices, chosen, out, lse,
    token_stride, head_stride, rope_token_stride, rope_head_stride, tokens, heads, listed, scale, each, before,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend with some tokens and heads. Axes of the grid: tiles of heads, tiles of tokens."""
    # A program has ``each`` tokens, TOKENS at most, which are ``before`` ``token_positions``.
    # A query of another row sees none of the keys of a row, and keeps what it has. Where keys are ``chosen`` ``[T,
    # n]``, n of them ``listed``, a program has one token.
    offs_q, offs_n = tl.arange(0, TOKENS * HEADS), tl.arange(0, BLOCK)
    offs_r, offs_e = tl.arange(0, RANK), tl.arange(0, ROPE)
    token = (tl.program_id(1) * each + offs_q // HEADS).to(tl.int64)
    head = tl.program_id(0) * HEADS + offs_q % HEADS
    known = (token < tokens) & (offs_q // HEADS < each)
    mask = known & (head < heads)
    row = tl.load(token_rows + token, mask=known, other=-1)
    own = tl.where(known, tl.load(token_positions + token, mask=known, other=0) - before, -1)
    q_ptrs = query_latent + (token * token_stride + head * head_stride)[:, None] + offs_r[None, :]
    q = tl.load(q_ptrs, mask=mask[:, None], other=0.0)
    rope_ptrs = query_rope + (token * rope_token_stride + head * rope_head_stride)[:, None] + offs_e[None, :]
    q_rope = tl.load(rope_ptrs, mask=mask[:, None], other=0.0)
    largest = tl.full([TOKENS * HEADS], -float("inf"), tl.float32)
    total = tl.zeros([TOKENS * HEADS], tl.float32)
    acc = tl.zeros([TOKENS * HEADS, RANK], tl.float32)
    last_row = tl.max(row)
    if chosen is not None:
        own_list = chosen + tl.program_id(1).to(tl.int64) * listed
        length = tl.max(own) + 1
        own_indices = indices + tl.load(indptr + last_row)
        for block in tl.range(0, tl.cdiv(listed, BLOCK), num_stages=STAGES):
            position, seen = load_chosen(own_list, block * BLOCK + offs_n, listed, length)
            latents, turned = load_block(pages, own_indices, position, seen, RANK, ROPE, PAGE)
            largest, total, acc = attend_block(q, q_rope, latents, turned, seen[None, :], scale, largest, total, acc)
    # Of one token the compiler sees that there is one row, and needs no registers for a loop.
    first_row = last_row if TOKENS == 1 else tl.min(tl.where(known, row, last_row))
    for this in range(first_row, last_row + 1 if chosen is None else first_row):
        length = tl.max(tl.where(row == this, own, -1)) + 1
        own_indices = indices + tl.load(indptr + this)
        for block in tl.range(0, tl.cdiv(length, BLOCK), num_stages=STAGES):
            position = block * BLOCK + offs_n
            latents, turned = load_block(pages, own_indices, position, position < length, RANK, ROPE, PAGE)
            seen = position[None, :] <= tl.where(row == this, own, -1)[:, None]
            largest, total, acc = attend_block(q, q_rope, latents, turned, seen, scale, largest, total, acc)
    total = tl.where(total == 0.0, 1.0, total)
    item = token * heads + head
    values = acc / total[:, None]
    out_ptrs = out + item[:, None] * RANK + offs_r[None, :]
    tl.store(out_ptrs, values.to(out.dtype.element_ty), mask=mask[:, None])
    if lse is not None:
        tl.store(lse + item, largest + tl.log2(total), mask=mask)


# One kernel for all batches. Other strides and addresses would make others of it, which may add in another order.
_invariant_latent_attention = triton.jit(
    do_not_specialize=[
        *("tokens", "heads", "listed", "each", "before"),
        *("token_stride", "head_stride", "rope_token_stride", "rope_head_stride"),
    ],
    do_not_specialize_on_alignment=[
        *("query_latent", "query_rope", "token_rows", "token_positions", "indptr", "indices"),
    ],
)(_latent_attention.fn)


def attend_newest(args: LatentDecode, lse: Tensor | None) -> Tensor:
    """Launch what ``latent_decode`` does with ``invariant``, whose bits are those of ``attend``."""
    rows = torch.arange(len(args.query_latent), dtype=torch.int32, device=args.query_latent.device)
    table = (rows, args.lengths, args.starts, args.indices)
    append(AppendLatent(args.latent, args.rope, args.pages, *table), before=1)
    given = LatentAttention(args.query_latent, args.query_rope, args.pages, *table, args.scale, None, True)
    return attend(given, lse, before=1)


def attend(args: LatentAttention, lse: Tensor | None, before: int = 0) -> Tensor:
    """Launch attention of packed queries: ``[T, H, R]``, and ``lse`` ``[T, H]`` float32, in base 2, if any."""
    # Tokens are so many ``before`` ``token_positions``, of one row each if any. ValueError if there is no kernel for
    # these sizes or dtypes, or the pages are not contiguous.
    check_kernel("latent_attention", args)
    query, query_rope = map(inner_contiguous, args[:2])
    (tokens, heads, rank), size, page_size = query.shape, query_rope.shape[2], args.pages.shape[1]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if out.numel():
        chosen = None if args.chosen is None else args.chosen.contiguous()
        tile = query_tile(heads, rank, MOST_TOKENS if chosen is None else 1)
        each = 1 if before else tile.tokens
        kernel = _invariant_latent_attention if args.invariant else _latent_attention
        kernel[(-(-heads // tile.heads), -(-tokens // each))](
            query, query_rope, *args[2:7], chosen, out, lse, *query.stride()[:2], *query_rope.stride()[:2], tokens,
            heads, 0 if chosen is None else chosen.shape[1], args.scale * math.log2(math.e), each, before,
            HEADS=tile.heads, TOKENS=tile.tokens, RANK=rank, ROPE=size, PAGE=page_size,
            BLOCK=tile.block, STAGES=STAGES, num_warps=tile.warps,
            enable_fp_fusion=not args.invariant,
        )  # fmt: skip
    return out
