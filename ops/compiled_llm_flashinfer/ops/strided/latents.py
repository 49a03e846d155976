"""Attention over latents whose rotated parts lie apart from them, in pages of any strides."""

# Shapes: T packed tokens, B rows, H query heads, R latent size, E size of the rotated part, P pages, S page size, N
# entries of the page table, L tokens of one row.

from __future__ import annotations

import torch

from compiled_llm_flashinfer.ops.contracts import StridedLatentAttention, check_columns
from compiled_llm_flashinfer.ops.library import LIBRARY
from compiled_llm_ops.attention.latent.plain import attend as attend_plainly
from compiled_llm_ops.library import define_op, kernel_of


@define_op(StridedLatentAttention, writes=("out", "lse"), library=LIBRARY)
def strided_latent_attention(args: StridedLatentAttention) -> None:
    """Attend with packed, absorbed queries over the latents of their rows, and write to ``out`` and ``lse``.

    As ``latent_attention``, but latents and rotated parts are two tensors of any strides, such as views of one; neither
    is copied. The op needs no plan. The last query of a row is at its last token. A query that sees no key has zeros,
    and minus infinity.

    Args:
        query_latent: ``[T, H, R]``, any strides: the part of each query that is not rotated, multiplied with the
            up-projection of the keys.
        query_rope: ``[T, H, E]``, any strides, of the same dtype: the rotated part.
        latents: ``[P, S, R]``, any strides: compressed keys, which are the values, too.
        ropes: ``[P, S, E]``, likewise: the rotated parts of keys.
        out: ``[T, H, R]``, written.
        lse: ``[T, H]`` float32, written: the log-sum-exp of logits in base 2 (multiply by ln 2 for the natural one).
            None to skip it.
        qo_indptr: ``[B + 1]`` int32 or int64, where each row's queries begin.
        indptr: ``[B + 1]`` int32 or int64, where each row's pages begin in ``indices``.
        indices: ``[N]`` int32 or int64, page numbers.
        lengths: ``[B]`` int32 or int64, tokens of each row.
        scale: factor on the logits before the softmax.
        causal: whether queries see no keys after their own position.

    Raises:
        ValueError: shapes or dtypes do not fit together, or on CUDA there is no kernel for the sizes; nothing is
            written.

    Source:
        DeepSeek-V2 (https://arxiv.org/abs/2405.04434); the arguments are those of FlashInfer's
        ``BatchMLAPagedAttentionWrapper``. On CUDA a Triton kernel of our own, after FlashAttention-2
        (https://arxiv.org/abs/2307.08691) and Flash-Decoding (https://pytorch.org/blog/flash-decoding/).
    """


def check(args: StridedLatentAttention) -> None:
    """Raise ValueError if shapes or dtypes do not fit together."""
    query, rope, latents, ropes = args[:4]
    fits = (
        query.dim() == rope.dim() == latents.dim() == ropes.dim() == 3
        and query.shape[:2] == rope.shape[:2]
        and latents.shape[:2] == ropes.shape[:2]
        and (latents.shape[2], ropes.shape[2]) == (query.shape[2], rope.shape[2])
    )
    if not fits:
        raise ValueError(
            "strided_latent_attention: queries must be [T, H, R] and [T, H, E], latents [P, S, R] and ropes [P, S, E]; "
            f"got {', '.join(str(tuple(states.shape)) for states in args[:4])}"
        )
    if query.dtype != rope.dtype or latents.dtype != ropes.dtype or not query.is_floating_point():
        raise ValueError(
            "strided_latent_attention: both queries must have one dtype of floats, and latents and ropes one; got "
            f"{', '.join(str(states.dtype) for states in args[:4])}"
        )
    if args.out.shape != query.shape or (args.lse is not None and args.lse.shape != query.shape[:2]):
        raise ValueError(
            f"strided_latent_attention: out must be {tuple(query.shape)}, and lse {tuple(query.shape[:2])}; got "
            f"{tuple(args.out.shape)} and {None if args.lse is None else tuple(args.lse.shape)}"
        )
    if args.lse is not None and args.lse.dtype != torch.float32:
        raise ValueError(f"strided_latent_attention: lse must be float32; got {args.lse.dtype}")
    sizes = {"qo_indptr": args.rows + 1, "indptr": args.rows + 1, "indices": None, "lengths": args.rows}
    check_columns("strided_latent_attention", args, sizes)


@kernel_of(strided_latent_attention, "CPU")
def _on_cpu(args: StridedLatentAttention) -> None:
    check(args)
    (tokens, _, rank), page_size = args.query_latent.shape, args.latents.shape[1]
    begins, firsts = args.qo_indptr.tolist(), args.indptr.tolist()
    if begins[-1] > tokens:
        raise ValueError(f"strided_latent_attention: qo_indptr ends at {begins[-1]}, after the last of {tokens} tokens")
    query = torch.cat([args.query_latent, args.query_rope], -1)
    for row, length in enumerate(args.lengths.tolist()):
        own = slice(begins[row], begins[row + 1])
        if own.start == own.stop:
            continue
        numbers = args.indices[firsts[row] : firsts[row] + -(-length // page_size)].long()
        cached = torch.cat([args.latents[numbers], args.ropes[numbers]], -1).flatten(0, 1)[:length]
        last = torch.full((own.stop - own.start,), length - 1, device=cached.device)
        positions = last - torch.arange(len(last) - 1, -1, -1, device=cached.device) if args.causal else last
        out, lse = attend_plainly(query[own], cached, positions, rank, args.scale)
        args.out[own] = out.to(args.out.dtype)
        if args.lse is not None:
            args.lse[own] = lse.to(torch.float32)


@kernel_of(strided_latent_attention, "CUDA")
def _on_cuda(args: StridedLatentAttention) -> None:
    from compiled_llm_flashinfer.ops.kernels.strided.latents import attend

    check(args)
    with torch.cuda.device(args.out.device):  # Triton launches on the current one
        attend(args)
