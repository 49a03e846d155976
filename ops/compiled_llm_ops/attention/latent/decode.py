"""Latent attention in decode: one new token of each row, which is written into the pages, and which then attends."""

# Shapes: B rows, H query heads, R latent size, E size of the rotated part, P pages, S page size, N page numbers of all
# rows.

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.attention.latent.plain import attend_in_pages, check_latent_queries, check_latents, store
from compiled_llm_ops.attention.lse import kernel_of_both, new_lse, with_lse
from compiled_llm_ops.contracts import check_int32
from compiled_llm_ops.contracts.devices import device_of
from compiled_llm_ops.contracts.latent import LatentDecode
from compiled_llm_ops.library import define_op


@define_op(LatentDecode, writes=("pages",))
def latent_decode(args: LatentDecode) -> Tensor:
    """Write the latent of each row's newest token into its pages, then attend with its absorbed queries.

    Token t of row b lies in page ``indices[starts[b] + t // S]``, slot ``t % S``; the newest is number
    ``lengths[b] - 1``, and sees itself and all before it. Page numbers that a row will need may stand behind those that
    it has. The op needs no plan, and a captured launch may be replayed with any lengths. Logits and results are those
    of ``latent_attention``.

    Args:
        query_latent: ``[B, H, R]``, any strides: the part of each query that is not rotated, multiplied with the
            up-projection of the keys.
        query_rope: ``[B, H, E]``, any strides, of the same dtype: the rotated part.
        latent: ``[B, R]``, any strides, of the same dtype: the compressed keys and values, after their norm.
        rope: ``[B, E]``, any strides, of the same dtype: the rotated part of the keys, which all heads share.
        pages: ``[P, S, R + E]``, written in place: each latent is followed by its rotated part.
        starts: ``[B]`` int32, where each row's pages begin in ``indices``.
        lengths: ``[B]`` int32, tokens of each row, the new one included; of a row with 0 nothing is written.
        indices: ``[N]`` int32, page numbers.
        scale: factor on the logits before the softmax.
        overlap: whether it may run at the same time as the previous and the next kernel on CUDA, by the rules of
            ``compiled_llm_ops.kernels.pdl``; the previous kernel must not write ``starts``, ``lengths`` or ``indices``
            then.
        chosen: ``[B, n]`` int32, any strides, n from 1 to P * S: the tokens of its row that each query reads, as of
            ``latent_attention``; the newest one only if it is listed. None to read all.
        invariant: whether a token's bits depend on the tokens of its row alone, not on the rest of the batch, nor on
            how many of them are computed at a time; they are those of ``latent_attention`` with it. Not with
            ``chosen``.

    Returns:
        ``[B, H, R]``, contiguous, of the queries' dtype; zeros for a row without tokens.

    Raises:
        ValueError: shapes or dtypes do not fit together, or on CUDA there is no kernel for the sizes, or pages do not
            begin at a multiple of 16 bytes.

    Source:
        DeepSeek-V2 (https://arxiv.org/abs/2405.04434), whose appendix absorbs the up-projections; on CUDA a Triton
        kernel of our own after Flash-Decoding (https://pytorch.org/blog/flash-decoding/). Chosen tokens as in
        DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556).
    """
    return args.query_latent.new_empty(args.query_latent.shape)


latent_decode_lse = with_lse(latent_decode)


def _check(args: LatentDecode) -> None:
    check_latent_queries("latent_decode", args)
    (tokens, _, rank), size, dtype = args.query_latent.shape, args.query_rope.shape[2], args.query_latent.dtype
    if args.latent.shape != (tokens, rank) or args.rope.shape != (tokens, size) or args.latent.dtype != dtype:
        raise ValueError(
            f"latent_decode: latent and rope must be [{tokens}, {rank}] and [{tokens}, {size}] of {dtype}, like the "
            f"queries; got {tuple(args.latent.shape)} {args.latent.dtype} and {tuple(args.rope.shape)}"
        )
    check_latents("latent_decode", args.latent, args.rope, args.pages)
    if args.starts.shape != (tokens,) or args.lengths.shape != (tokens,):
        raise ValueError(
            f"latent_decode: starts and lengths must be [{tokens}], one new token a row; got "
            f"{tuple(args.starts.shape)} and {tuple(args.lengths.shape)}; rows with several take latent_attention"
        )
    check_int32("latent_decode", starts=args.starts, lengths=args.lengths, indices=args.indices)


@kernel_of_both(latent_decode, "CPU")
def _cpu(args: LatentDecode, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    _check(args)
    page_size = args.pages.shape[1]
    filled = args.lengths > 0
    newest = args.lengths[filled] - 1
    numbers = args.indices[args.starts[filled] + newest // page_size]
    store(args.latent[filled], args.rope[filled], args.pages, numbers, newest % page_size)
    starts = args.starts.tolist()
    rows = [
        (slice(row, row + 1), args.lengths[row : row + 1] - 1, args.indices[start : start - (-length // page_size)])
        for row, (start, length) in enumerate(zip(starts, args.lengths.tolist(), strict=True))
        if length
    ]
    return attend_in_pages(args, rows)


@kernel_of_both(latent_decode, "CUDA")
def _cuda(args: LatentDecode, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    from compiled_llm_ops.kernels.latent.decode import decode
    from compiled_llm_ops.kernels.latent.latent_tiling import choose_decode_tiling, reads_by_hand
    from compiled_llm_ops.kernels.pdl import has_pdl

    _check(args)
    (rows, heads, rank), device = args.query_latent.shape, args.query_latent.device
    lse = new_lse(args.query_latent) if wants_lse else None
    if args.invariant:
        from compiled_llm_ops.kernels.latent.attention import attend_newest

        with torch.cuda.device(device):
            return attend_newest(args, lse), lse
    # Nothing that changes from step to step: a captured launch is replayed with rows of other lengths.
    max_keys = args.indices.shape[0] * args.pages.shape[1] if args.chosen is None else args.chosen.shape[1]
    tiling = choose_decode_tiling(rows, heads, rank, max_keys, device_of(device).processors, reads_by_hand(args))
    with torch.cuda.device(device):  # Triton launches on the current one
        return decode(args, lse, tiling=tiling, pdl=args.overlap and has_pdl(device)), lse
