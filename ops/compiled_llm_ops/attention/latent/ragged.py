"""Attention of new rows over their own new tokens, whose keys and values are at hand: nothing is read from pages."""

# Shapes: T packed tokens, B rows, H query heads, K kv heads, D head dimension of queries and keys, E that of values, Q
# tokens of one row.

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from compiled_llm_ops.attention.lse import kernel_of_both, new_lse, with_lse
from compiled_llm_ops.contracts import check_int32
from compiled_llm_ops.contracts.latent import RaggedAttention
from compiled_llm_ops.library import define_op


@define_op(RaggedAttention)
def ragged_attention(args: RaggedAttention) -> Tensor:
    """Causal attention of packed rows over their own tokens, given with their keys and values.

    Token t of row b sees the tokens from ``qo_indptr[b]`` to t. It is for rows that have no others: the first tokens of
    a prompt, whose latents are expanded once, and written into pages as they are.

    Args:
        query: ``[T, H, D]``, any strides; H a multiple of K.
        key: ``[T, K, D]``, any strides, of the query's dtype.
        value: ``[T, K, E]``, any strides, of the query's dtype.
        qo_indptr: ``[B + 1]`` int32, where each row's tokens begin; rows may have none.
        scale: factor on the logits before the softmax.

    Returns:
        ``[T, H, E]``, contiguous, of the query's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together, or on CUDA there is no kernel for the sizes.

    Source:
        A Triton kernel of our own on CUDA, after FlashAttention-2 (https://arxiv.org/abs/2307.08691).
    """
    return args.query.new_empty((*args.query.shape[:2], args.value.shape[2]))


ragged_attention_lse = with_lse(ragged_attention)


def _check(args: RaggedAttention) -> None:
    query, key, value = args[:3]
    alike = query.dim() == key.dim() == value.dim() == 3 and query.dtype == key.dtype == value.dtype
    if not (alike and query.shape[0] == key.shape[0] == value.shape[0]):
        found = ", ".join(f"{tuple(states.shape)} {states.dtype}" for states in args[:3])
        raise ValueError(
            f"ragged_attention: query, key and value must be [T, H, D], [T, K, D] and [T, K, E] of one dtype; got "
            f"{found}"
        )
    if key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1] or key.shape[2] != query.shape[2]:
        raise ValueError(
            f"ragged_attention: {query.shape[1]} query heads of size {query.shape[2]} do not fit {key.shape[1]} key "
            f"heads of size {key.shape[2]} and {value.shape[1]} value heads"
        )
    if args.qo_indptr.dim() != 1 or not len(args.qo_indptr):
        raise ValueError(f"ragged_attention: qo_indptr must be [B + 1]; got {tuple(args.qo_indptr.shape)}")
    check_int32("ragged_attention", qo_indptr=args.qo_indptr)


@kernel_of_both(ragged_attention, "CPU")
def _cpu(args: RaggedAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    _check(args)
    return attend_on_cpu(args, args.qo_indptr.tolist(), wants_lse)


def attend_on_cpu(args: RaggedAttention, ends: Sequence[int], wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Return what the op does, of arguments that are not checked; ``ends`` are the numbers of ``qo_indptr``."""
    lse = _lse_of_rows(args, ends) if wants_lse else None
    length = ends[-1] // max(1, len(ends) - 1)
    if length and [*ends] == [*range(0, len(args.query) + 1, length)]:  # rows of one length are a batch
        query, key, value = [states.view(-1, length, *states.shape[1:]) for states in args[:3]]
        return _attend(query, key, value, args.scale).flatten(0, 1), lse
    out = args.query.new_zeros((*args.query.shape[:2], args.value.shape[2]))
    for begin, end in pairwise(ends):
        if begin < end:
            query, key, value = (states[None, begin:end] for states in args[:3])
            out[begin:end] = _attend(query, key, value, args.scale)[0]
    return out, lse


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """``[B, Q, H, E]`` of queries ``[B, Q, H, D]``, keys and values alike, by HuggingFace's call for its bits."""
    out: Tensor = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        is_causal=True,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out.transpose(1, 2).contiguous()


def _lse_of_rows(args: RaggedAttention, ends: Sequence[int]) -> Tensor:
    lse = torch.full(args.query.shape[:2], -math.inf, dtype=torch.float32, device=args.query.device)
    for begin, end in pairwise(ends):
        if begin < end:
            query, key = (states[begin:end].transpose(0, 1) for states in args[:2])
            lse[begin:end] = _lse(query, key, args.scale)
    return lse


def _lse(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return ``[Q, H]``, the log-sum-exp in base 2; arithmetic is in float32."""
    keys = key.float().repeat_interleave(len(query) // len(key), dim=0)
    logits = torch.matmul(query.float(), keys.transpose(1, 2)) * scale
    unseen = torch.ones_like(logits[0], dtype=torch.bool).triu(1)
    return torch.logsumexp(logits.masked_fill(unseen, -math.inf), dim=-1).T / math.log(2)


@kernel_of_both(ragged_attention, "CUDA")
def _cuda(args: RaggedAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    from compiled_llm_ops.kernels.latent.ragged import attend

    _check(args)
    out = args.query.new_empty((*args.query.shape[:2], args.value.shape[2]))
    lse = new_lse(args.query) if wants_lse else None
    with torch.cuda.device(args.query.device):  # Triton launches on the current one
        attend(args.query, args.key, args.value, args.qo_indptr, args.scale, out, lse)
    return out, lse
