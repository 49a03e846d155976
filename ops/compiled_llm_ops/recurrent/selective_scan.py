"""The selective scan of state-space models (Mamba 1 and 2), over packed rows."""

# A state S ``[P, N]`` of a head decays with each token, takes it in, and is read:
#     S = exp(dt * a) * S + dt * token[:, None] * b
#     out = S @ c
# Mamba 1 has heads of a single number (P = 1), and a decay of each of the N; Mamba 2 has one decay of each head.
# Shapes: T packed tokens, H heads, P size of a head, N size of a state, G groups of heads that share b and c, B rows, E
# entries, R rows with equally many tokens, L tokens of a chunk.

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from compiled_llm_ops.library import define_op, kernel_of
from compiled_llm_ops.recurrent.contracts import SelectiveScan
from compiled_llm_ops.recurrent.rows import (
    check_rows,
    check_shape,
    rows_by_count,
    states_before,
    walk_over_tokens,
    write_states,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of all but the states: models turn some to float32 before the scan, and leave others as they are."""
CHUNK = 64  # tokens that the CPU kernel computes at once, with one decay of each head; else it is one


@define_op(SelectiveScan, writes=("states",))
def selective_scan(args: SelectiveScan) -> Tensor:
    """Scan each row's new tokens, from the state that the row has.

    States and sums are float32. On CUDA, prompts are computed in chunks of 64 tokens if there is one decay of each
    head, whose products take bfloat16 from bfloat16; else all arithmetic is in float32. Which it is depends on shapes
    and ``invariant`` alone. Skip connections, gates, and what is done to ``dt`` before, are left to the caller.

    Args:
        tokens: ``[T, H, P]``, any strides. Tokens after those of all rows are padding.
        dt: ``[T, H]``, float32, bfloat16 or float16: the time step of each token.
        a: ``[H]``, or ``[H, N]`` for a decay of each number of the state, of such a dtype, too; negative.
        b: ``[T, G, N]``, any strides, of such a dtype; H a multiple of G.
        c: ``[T, G, N]``, any strides, of such a dtype.
        states: ``[E, H, P, N]`` float32, contiguous, written in place.
        qo_indptr: ``[B + 1]`` int32, where each row's tokens begin; rows may have none, and are left as they are.
        read: ``[B]`` int32, the entry of ``states`` that each row begins with; negative for zeros.
        write: ``[B]`` int32, the entry that its new state is written to; negative to drop it. No row may write an entry
            that any row reads.
        invariant: whether the bits of a row's results and state depend on its tokens alone: not on the rest of the
            batch, nor on how many of its tokens are computed at a time. Prompts are not computed in chunks
            then, but token by token, as in decode.

    Returns:
        ``[T, H, P]``, contiguous, of the tokens' dtype; zeros for padding.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        Mamba (https://arxiv.org/abs/2312.00752) and Mamba-2 (https://arxiv.org/abs/2405.21060). On CUDA Triton
        kernels of our own.
    """
    return args.tokens.new_empty(args.tokens.shape)


def _check(args: SelectiveScan) -> None:
    op, tokens, b = "selective_scan", args.tokens, args.b
    if tokens.dim() != 3 or b.dim() != 3 or len(b) != len(tokens) or tokens.shape[1] % b.shape[1]:
        raise ValueError(
            f"{op}: tokens and b must be [T, H, P] and [T, G, N], with H a multiple of G; got {tuple(tokens.shape)} "
            f"and {tuple(b.shape)}"
        )
    (count, heads, size), numbers = tokens.shape, b.shape[2]
    check_shape(op, "dt", args.dt, (count, heads), "[T, H]")
    if args.a.shape != (heads,):
        check_shape(op, "a", args.a, (heads, numbers), "[H] or [H, N]")
    check_shape(op, "c", args.c, tuple(b.shape), "[T, G, N]")
    check_shape(op, "states", args.states, (len(args.states), heads, size, numbers), "[E, H, P, N]")
    for name in ("tokens", "dt", "a", "b", "c"):
        if (found := getattr(args, name).dtype) not in DTYPES:
            raise ValueError(f"{op}: {name} must be float32, bfloat16 or float16; got {found}")
    if args.states.dtype != torch.float32:
        raise ValueError(f"{op}: states must be float32; got {args.states.dtype}")
    check_rows(op, args.states, args.qo_indptr, args.read, args.write)


@kernel_of(selective_scan, "CPU")
def _cpu(args: SelectiveScan) -> Tensor:
    _check(args)
    out = args.tokens.new_zeros(args.tokens.shape)
    if args.invariant:
        walk_over_tokens(args, out, lambda state, token: _step(args, state, token))
        return out
    group = args.tokens.shape[1] // args.b.shape[1]
    b, c = (states.float().repeat_interleave(group, dim=1) for states in (args.b, args.c))
    a = args.a.float() if args.a.dim() == 2 else args.a.float()[:, None]
    dt = args.dt.float()[..., None]
    per_token = args.tokens.float() * dt, dt * a, b, c
    most = CHUNK if args.a.dim() == 1 else 1
    for rows, tokens in rows_by_count(args.qo_indptr):
        state = states_before(args.states, args.read, rows)
        for chunk in tokens.split(most, dim=1):
            given = (states[chunk].transpose(1, 2) for states in per_token)
            state, mixed = _chunk(state, *given)
            out[chunk] = mixed.transpose(1, 2).to(out.dtype)
        write_states(args.states, args.write, rows, state)
    return out


def _step(args: SelectiveScan, state: Tensor, token: int) -> tuple[Tensor, Tensor]:
    """Return the state ``[H, P, N]`` after a token, and ``[H, P]`` of it."""
    group = args.tokens.shape[1] // args.b.shape[1]
    b, c = (states[token].float().repeat_interleave(group, 0)[:, None] for states in (args.b, args.c))
    dt = args.dt[token].float()[:, None]
    faded = (dt * (args.a.float() if args.a.dim() == 2 else args.a.float()[:, None])).exp()
    state = state * faded[:, None] + (args.tokens[token].float() * dt)[..., None] * b
    return state, (state * c).sum(-1)


def _chunk(state: Tensor, tokens: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The state ``[R, H, P, N]`` after L tokens, and ``[R, H, L, P]``; decays ``[R, H, L, 1]`` or ``[R, H, 1, N]``."""
    total = decay.cumsum(dim=2)
    last = total[:, :, -1:]
    ended = state * last.exp() + ((last - total).exp() * b).mT.matmul(tokens).mT
    if tokens.shape[2] == 1:
        return ended, (ended @ c.mT).mT
    hidden = torch.ones(tokens.shape[2], tokens.shape[2], dtype=torch.bool, device=tokens.device).triu(1)
    # Not the quotient of two exponentials: each could be too large, or 0, where their quotient is neither.
    between = (total - total.mT).masked_fill(hidden, -math.inf).exp()
    return ended, (c * total.exp()) @ state.mT + (c @ b.mT * between) @ tokens


@kernel_of(selective_scan, "CUDA")
def _cuda(args: SelectiveScan) -> Tensor:
    _check(args)
    out = args.tokens.new_empty(args.tokens.shape)
    with torch.cuda.device(args.tokens.device):  # Triton launches on the current one
        _launcher(args)(args, out)
    return out


def _launcher(args: SelectiveScan) -> Callable[[SelectiveScan, Tensor], None]:
    """Return what launches the kernels for these shapes, into ``out``."""
    from compiled_llm_ops.recurrent.kernels.chunked_scan import scan_in_chunks
    from compiled_llm_ops.recurrent.kernels.chunking import takes_chunks
    from compiled_llm_ops.recurrent.kernels.number_scan import scan_numbers, scans_numbers
    from compiled_llm_ops.recurrent.kernels.selective_scan import scan

    if args.invariant or not takes_chunks(len(args.tokens), len(args.read), args.b.shape[2]):
        return scan
    if args.a.dim() == 1:
        return scan_in_chunks
    return scan_numbers if scans_numbers(args) else scan
