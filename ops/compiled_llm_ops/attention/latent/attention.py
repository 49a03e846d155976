"""Latent attention of packed queries: rows with any number of new tokens, over latents that lie in pages already."""

# Shapes: T packed tokens, B rows, H query heads, R latent size, E size of the rotated part, P pages, S page size, N
# entries of the page table.

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.attention.latent.plain import attend_in_pages, check_latent_queries
from compiled_llm_ops.attention.lse import kernel_of_both, new_lse, with_lse
from compiled_llm_ops.contracts import check_token_places
from compiled_llm_ops.contracts.latent import LatentAttention
from compiled_llm_ops.library import define_op


@define_op(LatentAttention)
def latent_attention(args: LatentAttention) -> Tensor:
    """Causal attention of packed, absorbed queries over the latents of their rows.

    Token t sees the tokens 0 to ``token_positions[t]`` of its row, its own included, which lie in the pages already.
    Its logits are ``scale * (query_latent[t] @ latent + query_rope[t] @ rope)``, and it gets the weighted sum of the
    latents. Multiplied with the parts of the layer's up-projection of keys (before) and values (after), that is
    attention over expanded keys and values. The op needs no plan, and a captured launch may be replayed with any rows.

    Args:
        query_latent: ``[T, H, R]``, any strides: the part of each query that is not rotated, multiplied with the
            up-projection of the keys.
        query_rope: ``[T, H, E]``, any strides, of the same dtype: the rotated part.
        pages: ``[P, S, R + E]``, as ``append_latent`` writes them.
        token_rows: ``[T]`` int32, the row each token belongs to. The kernel reads the keys of a row once for tokens
            that are next to each other.
        token_positions: ``[T]`` int32, each token's index in its row's cache; -1 sees no key.
        indptr: ``[B + 1]`` int32, where each row's pages begin in ``indices``.
        indices: ``[N]`` int32, page numbers.
        scale: factor on the logits before the softmax.
        chosen: ``[T, n]`` int32, any strides, n from 1 to P * S: the tokens of its row that each query reads, as
            positions, each once, in any order, and -1 for none; tokens after its own are left out, too. None to read
            all.
        invariant: whether a token's bits depend on the tokens of its row alone, not on the rest of the batch, nor on
            how many of them are computed at a time; they are those of ``latent_decode`` with it. Not with ``chosen``.

    Returns:
        ``[T, H, R]``, contiguous, of the queries' dtype; zeros for a token that sees no key.

    Raises:
        ValueError: shapes or dtypes do not fit together, or on CUDA there is no kernel for the sizes, or pages do not
            begin at a multiple of 16 bytes.

    Source:
        DeepSeek-V2 (https://arxiv.org/abs/2405.04434), whose appendix absorbs the up-projections; a Triton kernel of
        our own on CUDA, after FlashAttention-2 (https://arxiv.org/abs/2307.08691). Chosen tokens as in DeepSeek-V3.2
        (https://arxiv.org/abs/2512.02556).
    """
    return args.query_latent.new_empty(args.query_latent.shape)


latent_attention_lse = with_lse(latent_attention)


def _check(args: LatentAttention) -> None:
    check_latent_queries("latent_attention", args)
    check_token_places("latent_attention", len(args.query_latent), args)


@kernel_of_both(latent_attention, "CPU")
def _cpu(args: LatentAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    _check(args)
    owners, counts = torch.unique_consecutive(args.token_rows, return_counts=True)
    rows, first, page_size = [], 0, args.pages.shape[1]
    for row, count in zip(owners.tolist(), counts.tolist(), strict=True):
        tokens = slice(first, first + count)
        positions, start = args.token_positions[tokens], int(args.indptr[row])
        pages = int(positions.max()) // page_size + 1
        rows.append((tokens, positions, args.indices[start : start + pages]))
        first += count
    return attend_in_pages(args, rows)


@kernel_of_both(latent_attention, "CUDA")
def _cuda(args: LatentAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    from compiled_llm_ops.kernels.latent.attention import attend

    _check(args)
    lse = new_lse(args.query_latent) if wants_lse else None
    with torch.cuda.device(args.pages.device):  # Triton launches on the current one
        return attend(args, lse), lse
