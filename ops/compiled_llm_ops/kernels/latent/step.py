"""What the latent kernels share: a block of keys, checks, and the sizes that there are kernels for."""

# Shapes: M queries of a program, N keys of a block, R latent size, E size of the rotated part, P pages, S page size.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from compiled_llm_ops.contracts.latent import LatentAttention, LatentDecode
from compiled_llm_ops.kernels.latent import latent_tiling
from compiled_llm_ops.kernels.logits import base_of, weighed


@triton.jit
def least_share(blocks, row_tile, min_share, few, equal):
    """Return the fewest blocks of a share: so many that ``few`` programs suffice, unless ``min_share`` is less."""
    # Rows of about equal lengths are cut into ``equal`` shares at most.
    total, longest = tl.sum(blocks), tl.max(blocks)
    least = tl.minimum(min_share, tl.cdiv(tl.maximum(total, 1), few))
    return tl.where(4 * row_tile * longest <= 5 * total, tl.maximum(least, tl.cdiv(longest, equal)), least)


@triton.jit
def load_block(pages, indices, position, mask, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr):
    """Return the latents ``[N, R]`` and rotated parts ``[N, E]`` at positions of a row; zeros past the ``mask``."""
    # Slots past the mask are not read: they may hold values (NaN) whose product with zero is not zero.
    page = tl.load(indices + position // PAGE, mask=mask, other=0).to(tl.int64)
    slot = (page * PAGE + position % PAGE) * (RANK + ROPE)
    return load_slots(pages, slot, mask, RANK, ROPE)


@triton.jit
def load_slots(pages, slot, mask, RANK: tl.constexpr, ROPE: tl.constexpr):
    """Return what ``load_block`` does, of tokens whose numbers begin at ``slot`` ``[N]`` in the pages."""
    offs_r, offs_e = tl.arange(0, RANK), tl.arange(0, ROPE)
    latents = tl.load(pages + slot[:, None] + offs_r[None, :], mask=mask[:, None], other=0.0)
    turned = tl.load(pages + slot[:, None] + RANK + offs_e[None, :], mask=mask[:, None], other=0.0)
    return latents, turned


@triton.jit
def load_whole_pages(
    pages, indices, block, length, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    """Return what ``load_block`` does for a block of a row of ``length`` tokens, and which of them there are."""
    # Pages divide blocks, so a thread reads each page number once, and knows how far apart the tokens of a page lie.
    PAGES: tl.constexpr = BLOCK // PAGE
    entry = block * PAGES + tl.arange(0, PAGES)
    page = tl.load(indices + entry, mask=entry * PAGE < length, other=0).to(tl.int64)
    slot = page[:, None] * (PAGE * (RANK + ROPE)) + tl.arange(0, PAGE)[None, :] * (RANK + ROPE)
    seen = tl.arange(0, BLOCK) < length - block * BLOCK
    slot = tl.multiple_of(tl.reshape(slot, [BLOCK]), 16)  # R and E are; the compiler copies single numbers otherwise
    latents, turned = load_slots(pages, slot, seen, RANK, ROPE)
    return latents, turned, seen


@triton.jit
def load_chosen(chosen, entry, listed, length):
    """Return the positions at entries of a query's list, and which of them it sees: no more than ``length`` keys."""
    position = tl.load(chosen + entry, mask=entry < listed, other=-1)
    return position, (position >= 0) & (position < length)


@triton.jit
def attend_block(q, q_rope, latents, turned, seen, scale, largest, total, acc):
    """Return the largest logits ``[M]``, sums of weights ``[M]`` of weighted latents ``[M, R]`` with a block more."""
    # A query that sees no key, of this block or ever, keeps what it has. Logits are in base 2.
    logits = tl.dot(q, tl.trans(latents))
    logits = tl.dot(q_rope, tl.trans(turned), logits) * scale
    logits = tl.where(seen, logits, -float("inf"))
    weights, fade, larger = weighed(logits, largest, True)
    acc = tl.dot(weights.to(q.dtype), latents, acc * fade[:, None])
    return larger, total * fade + tl.sum(weights, 1), acc


@triton.jit
def attend_keys_first(q, q_rope, latents, turned, seen, scale, largest, total, acc, BLIND: tl.constexpr):
    """``attend_block`` with its matrices turned: sums of weighted latents are ``[R, M]``, of weights ``[N, M]``."""
    # Hopper's tensor cores multiply 64 rows at least. Here these are keys and numbers of a latent, so a few queries
    # fill them, and the compiler keeps latents in shared memory alone. Threads add up weights of one key each until the
    # end. A query may see no key of a block if BLIND.
    logits = tl.dot(turned, tl.trans(q_rope))
    logits = tl.dot(latents, tl.trans(q), logits) * scale
    logits = tl.where(seen[:, None], logits, -float("inf"))
    larger = tl.maximum(largest, tl.max(logits, 0))
    base = base_of(larger, BLIND)
    weights = tl.exp2(logits - base[None, :])
    fade = tl.exp2(largest - base)[None, :]
    acc = tl.dot(tl.trans(latents), weights.to(q.dtype), acc * fade)
    return larger, total * fade + weights, acc


def check_kernel(op: str, args: LatentAttention | LatentDecode) -> None:
    """Raise ValueError if no kernel takes such queries and pages, with the numbers that one takes."""
    # Of pages at an odd address, rows of several blocks were wrong on an H200, and memory was read that is not there:
    # the kernel in Triton 3.6, whose compiler then copies page numbers and not latents ahead.
    sizes, dtype = (args.query_latent.shape[2], args.query_rope.shape[2]), args.query_latent.dtype
    if (missing := latent_tiling.missing_kernel(*sizes, dtype)) is not None:
        raise ValueError(f"{op}: {missing}")
    if args.pages.dtype != dtype:
        raise ValueError(f"{op}: pages must be of the queries' dtype, {dtype}; got {args.pages.dtype}")
    if not args.pages.is_contiguous():
        raise ValueError(f"{op}: pages must be contiguous")
    if args.pages.data_ptr() % latent_tiling.ALIGNMENT:
        raise ValueError(
            f"{op}: pages must begin at a multiple of {latent_tiling.ALIGNMENT} bytes, as tensors of their own do; got "
            f"address {args.pages.data_ptr():#x}"
        )


def inner_contiguous(states: Tensor) -> Tensor:
    """Return states whose last numbers lie next to each other."""
    return states if states.stride(-1) == 1 else states.contiguous()
