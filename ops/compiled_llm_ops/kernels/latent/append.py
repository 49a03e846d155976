"""A Triton kernel that writes latents into pages."""

# Shapes: T packed tokens, R latent size, E size of the rotated part, P pages, S page size.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from compiled_llm_ops.contracts.latent import AppendLatent


@triton.jit
def _append_latent(
    latent, rope, pages, token_rows, token_positions, indptr, indices,
    latent_stride, latent_step, rope_stride, rope_step, page_stride, slot_stride, before,
    RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, position = tl.load(token_rows + token), tl.load(token_positions + token) - before
    written = position >= 0
    position = tl.maximum(position, 0)
    page = tl.load(indices + tl.load(indptr + row) + position // PAGE).to(tl.int64)
    slot = pages + page * page_stride + (position % PAGE) * slot_stride
    offs_r, offs_e = tl.arange(0, BLOCK), tl.arange(0, ROPE_BLOCK)
    states = tl.load(latent + token * latent_stride + offs_r * latent_step, mask=offs_r < RANK)
    turned = tl.load(rope + token * rope_stride + offs_e * rope_step, mask=offs_e < ROPE)
    tl.store(slot + offs_r, states.to(pages.dtype.element_ty), mask=written & (offs_r < RANK))
    tl.store(slot + RANK + offs_e, turned.to(pages.dtype.element_ty), mask=written & (offs_e < ROPE))


def append(args: AppendLatent, before: int = 0) -> None:
    """Launch the writing of new tokens; ValueError if a token's numbers do not lie next to each other in pages."""
    # Tokens go so many slots before ``token_positions``; those that have no slot there are not written.
    (tokens, rank), size, page_size = args.latent.shape, args.rope.shape[1], args.pages.shape[1]
    if args.pages.stride(2) != 1:
        raise ValueError("append_latent: pages must be contiguous")
    if tokens:
        _append_latent[(tokens,)](
            *args[:5], args.indptr.contiguous(), args.indices.contiguous(),
            *args.latent.stride(), *args.rope.stride(), *args.pages.stride()[:2], before,
            RANK=rank, ROPE=size, PAGE=page_size, BLOCK=triton.next_power_of_2(rank),
            ROPE_BLOCK=triton.next_power_of_2(size), num_warps=2,
        )  # fmt: skip
