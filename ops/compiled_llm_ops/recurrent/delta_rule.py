"""The gated delta rule (Qwen3-Next, Qwen3.5, OLMo hybrid) and Kimi's delta attention, over packed rows."""

# A state S ``[D, V]`` of a head maps keys to values. A token lets it decay, corrects what S has for the token's key,
# and reads what S has for its query:
#     S = exp(decay)[:, None] * S
#     S = S + key[:, None] * beta * (value - key @ S)
#     out = scale * query @ S
# Shapes: T packed tokens, K heads of queries and keys, H heads of values, D size of a key, V size of a value, B rows, E
# entries, R rows with equally many tokens, L tokens of a chunk.

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from compiled_llm_ops.library import define_op, kernel_of
from compiled_llm_ops.recurrent.contracts import GatedDeltaRule
from compiled_llm_ops.recurrent.rows import (
    check_rows,
    check_shape,
    rows_by_count,
    states_before,
    walk_over_tokens,
    write_states,
)

CHUNK = 64  # tokens that the CPU kernel computes at once, with a decay of each head
CHUNK_OF_CHANNELS = 16  # the same with a decay of each channel: memory grows with the square of it, times D
TINY = 1e-6  # keeps the length of a vector from being 0, as HuggingFace's and flash-linear-attention's kernels do


@define_op(GatedDeltaRule, writes=("states",))
def gated_delta_rule(args: GatedDeltaRule) -> Tensor:
    """Apply the gated delta rule to each row's new tokens, from the state that the row has.

    States and sums are float32. On CUDA, prompts are computed in chunks of 64 tokens, whose products take bfloat16 from
    bfloat16; else all arithmetic is in float32. Which it is depends on shapes and ``invariant`` alone.

    Args:
        query: ``[T, K, D]``, any strides; H a multiple of K. Tokens after those of all rows are padding.
        key: ``[T, K, D]``, any strides, of the query's dtype.
        value: ``[T, H, V]``, any strides, of the query's dtype.
        decay: ``[T, H]``, or ``[T, H, D]`` for one of each channel, float32 or the query's dtype: the logarithm of the
            factor that a state is multiplied by, at most 0.
        beta: ``[T, H]``, float32 or the query's dtype: how much of a token's correction is made.
        states: ``[E, H, D, V]`` float32, contiguous, written in place.
        qo_indptr: ``[B + 1]`` int32, where each row's tokens begin; rows may have none, and are left as they are.
        read: ``[B]`` int32, the entry of ``states`` that each row begins with; negative for zeros.
        write: ``[B]`` int32, the entry that its new state is written to; negative to drop it. No row may write an entry
            that any row reads.
        scale: factor on the queries.
        normalize: whether queries and keys are divided by their lengths first.
        invariant: whether the bits of a row's results and state depend on its tokens alone: not on the rest of the
            batch, nor on how many of its tokens are computed at a time. Prompts are not computed in chunks
            then, but token by token, as in decode.

    Returns:
        ``[T, H, V]``, contiguous, of the query's dtype; zeros for padding.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        Gated Delta Networks (https://arxiv.org/abs/2412.06464); with a decay of each channel Kimi Linear
        (https://arxiv.org/abs/2510.26692). On CUDA Triton kernels of our own.
    """
    return args.value.new_empty(args.value.shape)


def _check(args: GatedDeltaRule) -> None:
    op, query, value = "gated_delta_rule", args.query, args.value
    if query.dim() != 3 or value.dim() != 3 or len(query) != len(value) or value.shape[1] % query.shape[1]:
        raise ValueError(
            f"{op}: query and value must be [T, K, D] and [T, H, V], with H a multiple of K; got "
            f"{tuple(query.shape)} and {tuple(value.shape)}"
        )
    (count, _, size), (_, heads, value_size) = query.shape, value.shape
    check_shape(op, "key", args.key, tuple(query.shape), "[T, K, D]")
    if args.decay.shape != (count, heads):
        check_shape(op, "decay", args.decay, (count, heads, size), "[T, H] or [T, H, D]")
    check_shape(op, "beta", args.beta, (count, heads), "[T, H]")
    check_shape(op, "states", args.states, (len(args.states), heads, size, value_size), "[E, H, D, V]")
    for name, others in (("key", ()), ("value", ()), ("decay", (torch.float32,)), ("beta", (torch.float32,))):
        found = getattr(args, name).dtype
        if found not in (query.dtype, *others):
            raise ValueError(f"{op}: {name} must be {query.dtype}{' or float32' if others else ''}; got {found}")
    if args.states.dtype != torch.float32:
        raise ValueError(f"{op}: states must be float32; got {args.states.dtype}")
    check_rows(op, args.states, args.qo_indptr, args.read, args.write)


@kernel_of(gated_delta_rule, "CPU")
def _cpu(args: GatedDeltaRule) -> Tensor:
    _check(args)
    out = args.value.new_zeros(args.value.shape, dtype=args.query.dtype)
    if args.invariant:
        walk_over_tokens(args, out, lambda state, token: _step(args, state, token))
        return out
    group = args.value.shape[1] // args.query.shape[1]
    query, key = (_prepared(states, args.normalize).repeat_interleave(group, 1) for states in (args.query, args.key))
    decay = args.decay if args.decay.dim() == 3 else args.decay[..., None]
    per_token = query * args.scale, key, args.value, decay, args.beta[..., None]
    most = CHUNK if args.decay.dim() == 2 else CHUNK_OF_CHANNELS
    for rows, tokens in rows_by_count(args.qo_indptr):
        state = states_before(args.states, args.read, rows)
        for chunk in tokens.split(most, dim=1):
            given = (states[chunk].float().transpose(1, 2) for states in per_token)
            state, mixed = _chunk(state, *given)
            out[chunk] = mixed.transpose(1, 2).to(out.dtype)
        write_states(args.states, args.write, rows, state)
    return out


def _step(args: GatedDeltaRule, state: Tensor, token: int) -> tuple[Tensor, Tensor]:
    """Return the state ``[H, D, V]`` after a token, and ``[H, V]`` of it."""
    group = args.value.shape[1] // args.query.shape[1]
    query, key = (
        _prepared(states[token], args.normalize).repeat_interleave(group, 0)[..., None]
        for states in (args.query, args.key)
    )
    faded = args.decay[token].float().exp()
    state = state * (faded[..., None] if faded.dim() == 2 else faded[:, None, None])
    correction = args.beta[token].float()[:, None] * (args.value[token].float() - (state * key).sum(1))
    state = state + key * correction[:, None]
    return state, (state * (query * args.scale)).sum(1)


def _prepared(states: Tensor, normalize: bool) -> Tensor:
    states = states.float()
    return states * torch.rsqrt(states.square().sum(dim=-1, keepdim=True) + TINY) if normalize else states


def _chunk(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the state ``[R, H, D, V]`` after L tokens, and ``[R, H, L, V]`` of them; decays ``[R, H, L, 1 or D]``."""
    # What each token corrects depends on all corrections before it: a triangular system of equations.
    total = decay.cumsum(dim=2)
    grown, last = total.exp(), total[:, :, -1:]
    hidden = torch.ones(len(decay[0, 0]), len(decay[0, 0]), dtype=torch.bool, device=decay.device).triu(1)
    # Not the quotient of two exponentials: each could be too large, or 0, where their quotient is neither.
    between = total[:, :, :, None] - total[:, :, None]
    between = between.masked_fill(hidden[..., None], -math.inf).exp()
    wrong = beta * (value - (key * grown) @ state)
    corrections = torch.linalg.solve_triangular(
        _products(beta * key, key, between), wrong, upper=False, unitriangular=True
    )
    out = (query * grown) @ state + _products(query, key, between) @ corrections
    return state * last.exp().mT + (key * (last - total).exp()).mT @ corrections, out


def _products(left: Tensor, right: Tensor, between: Tensor) -> Tensor:
    """Return ``[R, H, L, L]``, of each token on the left with each on the right, which has decayed in between."""
    if between.shape[-1] == 1:
        return (left @ right.mT) * between[..., 0]
    return torch.einsum("rhid,rhjd,rhijd->rhij", left, right, between)


@kernel_of(gated_delta_rule, "CUDA")
def _cuda(args: GatedDeltaRule) -> Tensor:
    _check(args)
    out = args.value.new_empty(args.value.shape)
    with torch.cuda.device(args.query.device):  # Triton launches on the current one
        _launcher(args)(args, out)
    return out


def _launcher(args: GatedDeltaRule) -> Callable[[GatedDeltaRule, Tensor], None]:
    """Return what launches the kernels for these shapes, into ``out``."""
    from compiled_llm_ops.recurrent.kernels.chunked_channel_rule import apply_channels_in_chunks
    from compiled_llm_ops.recurrent.kernels.chunked_delta_rule import apply_in_chunks
    from compiled_llm_ops.recurrent.kernels.chunking import takes_chunks
    from compiled_llm_ops.recurrent.kernels.delta_rule import apply

    of_channels = args.decay.dim() == 3
    if args.invariant or not takes_chunks(len(args.query), len(args.read), args.query.shape[2]):
        return apply
    return apply_channels_in_chunks if of_channels else apply_in_chunks
