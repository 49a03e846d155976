"""Attention inside segments of packed tokens, which see each other both ways: the images of an encoder."""

# Shapes: T packed tokens, N segments, H heads, D head dimension.

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from compiled_llm_ops.contracts import check_int32
from compiled_llm_ops.contracts.segments import SegmentAttention
from compiled_llm_ops.library import define_op, kernel_of

_FLASH = frozenset({torch.float16, torch.bfloat16})
_FLASH_MULTIPLE, _FLASH_MOST = 8, 256  # sizes of heads that its kernels take


@define_op(SegmentAttention)
def segment_attention(args: SegmentAttention) -> Tensor:
    """Attention of packed tokens to those of their own segment, before and after them.

    Token t of segment n sees the tokens from ``starts[n]`` to ``starts[n + 1]``.

    Args:
        query: ``[T, H, D]``, any strides but for the last dimension, which is contiguous.
        key: ``[T, H, D]`` of the query's dtype, likewise.
        value: ``[T, H, D]`` of the query's dtype, likewise.
        starts: ``[N + 1]`` int32 ascending from 0 to T, where each segment begins; segments may be empty.
        scale: factor on the logits before the softmax.
        longest: tokens that a segment has at most; 0 if that is not known. Kernels are launched for so many.

    Returns:
        ``[T, H, D]``, contiguous, of the query's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        On CUDA the kernels that PyTorch has for ``scaled_dot_product_attention`` of nested tensors: FlashAttention-2
        (https://arxiv.org/abs/2307.08691) for float16 and bfloat16, memory-efficient attention
        (https://arxiv.org/abs/2112.05682) for others.
    """
    return args.query.new_empty(args.query.shape)


def _check(args: SegmentAttention) -> None:
    states = args[:3]
    if args.query.dim() != 3 or len({(own.shape, own.dtype) for own in states}) > 1:
        found = ", ".join(f"{tuple(own.shape)} {own.dtype}" for own in states)
        raise ValueError(f"segment_attention: query, key and value must be [T, H, D] of one dtype; got {found}")
    if args.starts.dim() != 1 or not len(args.starts):
        raise ValueError(f"segment_attention: starts must be [N + 1]; got {tuple(args.starts.shape)}")
    check_int32("segment_attention", starts=args.starts)


# ---- CPU: segments of one length that follow each other are a batch


@kernel_of(segment_attention, "CPU")
def _cpu(args: SegmentAttention) -> Tensor:
    _check(args)
    out = args.query.new_zeros(args.query.shape)
    for begin, end, length in _batches(args.starts.tolist()):
        query, key, value = (
            own[begin:end].unflatten(0, (-1, length)).transpose(1, 2) for own in (args.query, args.key, args.value)
        )
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=args.scale)
        out[begin:end] = found.transpose(1, 2).flatten(0, 1)
    return out


def _batches(starts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield where segments of one length begin and end, and this length."""
    begin = starts[0]
    for length, run in itertools.groupby(after - before for before, after in itertools.pairwise(starts)):
        end = begin + length * sum(1 for _ in run)
        if length:
            yield begin, end, length
        begin = end


# ---- CUDA: private ops of PyTorch, which read no length on the host (tests/ops/varlen/test_segments.py)


@kernel_of(segment_attention, "CUDA")
def _cuda(args: SegmentAttention) -> Tensor:
    _check(args)
    query, key, value, starts, scale, longest = args
    most, size = longest or len(query), query.shape[2]
    if query.dtype in _FLASH and size % _FLASH_MULTIPLE == 0 and size <= _FLASH_MOST:
        flash = torch.ops.aten._flash_attention_forward.default
        out: Tensor = flash(query, key, value, starts, starts, most, most, 0.0, False, False, scale=scale)[0]
    else:
        efficient = torch.ops.aten._efficient_attention_forward.default
        batch = query[None], key[None], value[None]
        out = efficient(*batch, None, starts, starts, most, most, 0.0, 0, False, scale=scale)[0][0]
    return out.contiguous()
