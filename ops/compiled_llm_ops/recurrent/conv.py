"""The short causal convolution of recurrent layers, over packed rows."""

# Shapes: T packed tokens, C channels, W width of the kernel, B rows, E entries.

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.contracts import check_int32
from compiled_llm_ops.library import define_op, kernel_of
from compiled_llm_ops.recurrent.contracts import CausalConv1d
from compiled_llm_ops.recurrent.rows import (
    check_rows,
    check_shape,
    rows_by_count,
    states_before,
    walk_over_tokens,
    write_states,
)

ACTIVATIONS = ("none", "silu")


@define_op(CausalConv1d, writes=("states",))
def causal_conv1d(args: CausalConv1d) -> Tensor:
    """Convolve each channel over the newest W tokens of its row, those before the given ones from the row's state.

    A state holds the newest W tokens of a row, as HuggingFace's caches do, the last one in the last column.

    Args:
        tokens: ``[T, C]``, any strides; rows' tokens follow one another. Tokens after those of all rows are padding.
        weight: ``[C, W]``, of the tokens' dtype; its last column is multiplied with the newest token.
        bias: ``[C]``, of the tokens' dtype, or None.
        states: ``[E, C, W]``, contiguous, of the tokens' dtype, written in place.
        token_rows: ``[T]`` int32, the row each token belongs to.
        qo_indptr: ``[B + 1]`` int32, where each row's tokens begin; rows may have none, and are left as they are.
        read: ``[B]`` int32, the entry of ``states`` that each row begins with; negative for zeros.
        write: ``[B]`` int32, the entry that its new state is written to; negative to drop it. No row may write an entry
            that any row reads.
        activation: of the results: ``"none"`` or ``"silu"``.
        invariant: whether the bits of a row's results and state depend on its tokens alone: not on the rest of the
            batch, nor on how many of its tokens are computed at a time.

    Returns:
        ``[T, C]``, contiguous, of the tokens' dtype; zeros for padding.

    Raises:
        ValueError: shapes or dtypes do not fit together, or an unknown activation.

    Source:
        Mamba (https://arxiv.org/abs/2312.00752), section 3.4; a Triton kernel of our own on CUDA.
    """
    return args.tokens.new_empty(args.tokens.shape)


def _check(args: CausalConv1d) -> None:
    op, weight = "causal_conv1d", args.weight
    if args.tokens.dim() != 2 or weight.dim() != 2:
        found = f"{tuple(args.tokens.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"{op}: tokens and weight must be [T, C] and [C, W]; got {found}")
    count, channels = args.tokens.shape
    check_shape(op, "weight", weight, (channels, weight.shape[1]), "[C, W]")
    check_shape(op, "states", args.states, (len(args.states), *weight.shape), "[E, C, W]")
    check_shape(op, "token_rows", args.token_rows, (count,), "[T]")
    if args.bias is not None:
        check_shape(op, "bias", args.bias, (channels,), "[C]")
    for name in ("weight", "bias", "states"):
        tensor = getattr(args, name)
        if tensor is not None and tensor.dtype != args.tokens.dtype:
            raise ValueError(f"{op}: {name} must be {args.tokens.dtype}, as tokens; got {tensor.dtype}")
    if args.activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be one of {', '.join(ACTIVATIONS)}; got {args.activation!r}")
    check_int32(op, token_rows=args.token_rows)
    check_rows(op, args.states, args.qo_indptr, args.read, args.write)


@kernel_of(causal_conv1d, "CPU")
def _cpu(args: CausalConv1d) -> Tensor:
    _check(args)
    out = args.tokens.new_zeros(args.tokens.shape)
    channels, width = args.weight.shape
    if args.invariant:
        walk_over_tokens(args, out, lambda state, token: _step(args, state, token))
        return out
    for rows, tokens in rows_by_count(args.qo_indptr):
        before = states_before(args.states, args.read, rows)
        window = torch.cat([before, args.tokens[tokens].transpose(1, 2)], dim=2)
        write_states(args.states, args.write, rows, window[..., -width:])
        mixed = torch.nn.functional.conv1d(window[..., 1:], args.weight[:, None], args.bias, groups=channels)
        out[tokens] = _activated(mixed, args.activation).transpose(1, 2)
    return out


def _step(args: CausalConv1d, state: Tensor, token: int) -> tuple[Tensor, Tensor]:
    """Return the state ``[C, W]`` after a token, and ``[C]`` of it."""
    state = torch.cat([state[:, 1:], args.tokens[token, :, None]], dim=1)
    mixed = (state.float() * args.weight.float()).sum(1)
    return state, _activated(mixed if args.bias is None else mixed + args.bias.float(), args.activation)


def _activated(states: Tensor, activation: str) -> Tensor:
    return torch.nn.functional.silu(states) if activation == "silu" else states


@kernel_of(causal_conv1d, "CUDA")
def _cuda(args: CausalConv1d) -> Tensor:
    from compiled_llm_ops.recurrent.kernels.conv import convolve

    _check(args)
    out = args.tokens.new_empty(args.tokens.shape)
    with torch.cuda.device(args.tokens.device):  # Triton launches on the current one
        convolve(args, out)
    return out
