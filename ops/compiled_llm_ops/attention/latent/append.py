"""Writing the latents of new tokens into the pages."""

# Shapes: T packed tokens, R latent size, E size of the rotated part, P pages, S page size, B rows, N entries of the
# page table.

from __future__ import annotations

import torch

from compiled_llm_ops.attention.latent.plain import check_latents, store
from compiled_llm_ops.contracts import check_token_places
from compiled_llm_ops.contracts.latent import AppendLatent
from compiled_llm_ops.library import define_op, kernel_of


@define_op(AppendLatent, writes=("pages",))
def append_latent(args: AppendLatent) -> None:
    """Write what latent attention keeps of new tokens into the pages of their rows, in place.

    Token t goes to page ``indices[indptr[token_rows[t]] + token_positions[t] // S]``, slot ``token_positions[t] % S``.
    Positions are not checked here: the planner must keep every row within the pages it owns.

    Args:
        latent: ``[T, R]``, any strides: the compressed keys and values, after their norm.
        rope: ``[T, E]``, any strides, of the latent's dtype: the part of the keys that all heads share, rotated.
        pages: ``[P, S, R + E]``, written in place: each latent is followed by its rotated part.
        token_rows: ``[T]`` int32, the row each token belongs to.
        token_positions: ``[T]`` int32, each token's index in its row's cache, in tokens.
        indptr: ``[B + 1]`` int32, where each row's pages begin in ``indices``.
        indices: ``[N]`` int32, page numbers.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        Multi-head latent attention of DeepSeek-V2 (https://arxiv.org/abs/2405.04434); a Triton kernel of our own on
        CUDA.
    """


def _check(args: AppendLatent) -> None:
    if args.latent.dim() != 2:
        raise ValueError(f"append_latent: latent must be [T, R]; got {tuple(args.latent.shape)}")
    check_latents("append_latent", args.latent, args.rope, args.pages)
    check_token_places("append_latent", len(args.latent), args)


@kernel_of(append_latent, "CPU")
def _cpu(args: AppendLatent) -> None:
    _check(args)
    page_size = args.pages.shape[1]
    page = args.indices[args.indptr[args.token_rows] + args.token_positions // page_size]
    store(args.latent, args.rope, args.pages, page, args.token_positions % page_size)


@kernel_of(append_latent, "CUDA")
def _cuda(args: AppendLatent) -> None:
    from compiled_llm_ops.kernels.latent.append import append

    _check(args)
    with torch.cuda.device(args.pages.device):  # Triton launches on the current one
        append(args)
