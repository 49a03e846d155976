"""What ops of recurrent layers have in common: packed rows, and the entries of their states."""

# Shapes: T packed tokens, B rows, E entries, R rows with equally many tokens, L tokens of each.

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from compiled_llm_ops.contracts import check_int32


class RecurrentRows(Protocol):
    """Arguments of an op that has rows."""

    @property
    def states(self) -> Tensor: ...
    @property
    def qo_indptr(self) -> Tensor: ...
    @property
    def read(self) -> Tensor: ...
    @property
    def write(self) -> Tensor: ...


class EqualRows(NamedTuple):
    """Rows of a batch that have equally many tokens."""

    rows: Tensor  # ``[R]`` int64, their numbers
    tokens: Tensor  # ``[R, L]`` int64, their tokens among the packed ones


def check_rows(op: str, states: Tensor, qo_indptr: Tensor, read: Tensor, write: Tensor) -> None:
    """Raise ValueError if what an op finds rows and their states ``[E, ...]`` by does not fit together."""
    if read.dim() != 1 or write.shape != read.shape or qo_indptr.shape != (len(read) + 1,):
        raise ValueError(
            f"{op}: qo_indptr, read and write must be [B + 1], [B] and [B]; got {tuple(qo_indptr.shape)}, "
            f"{tuple(read.shape)} and {tuple(write.shape)}"
        )
    check_int32(op, qo_indptr=qo_indptr, read=read, write=write)
    if not states.is_contiguous():
        raise ValueError(f"{op}: states must be contiguous; got strides {states.stride()}")


def check_shape(op: str, name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """Raise ValueError if an argument has another shape."""
    if tensor.shape != shape:
        raise ValueError(f"{op}: {name} must be {meaning}, here {shape}; got {tuple(tensor.shape)}")


def rows_by_count(qo_indptr: Tensor) -> Iterator[EqualRows]:
    """Divide rows by their number of tokens; those without any are left out."""
    starts = qo_indptr.long()
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, count in enumerate(starts.diff().tolist()):
        rows_of[count].append(row)
    for count, numbers in rows_of.items():
        if count > 0:
            rows = torch.tensor(numbers, device=starts.device)
            yield EqualRows(rows, starts[rows][:, None] + torch.arange(count, device=starts.device))


def walk_over_tokens(args: RecurrentRows, out: Tensor, step: Callable[[Tensor, int], tuple[Tensor, Tensor]]) -> None:
    """Compute each row's tokens one by one into ``out`` ``[T, ...]``, so that all are computed by the same operations.

    ``step`` takes a row's state and the number of its next token, and returns the state after that and its result.
    """
    for row, (begin, end) in enumerate(itertools.pairwise(args.qo_indptr.tolist())):
        if begin < end:
            rows = torch.tensor([row], device="cpu")
            (state,) = states_before(args.states, args.read, rows)
            for token in range(begin, end):
                state, own = step(state, token)
                out[token] = own.to(out.dtype)
            write_states(args.states, args.write, rows, state[None])


def states_before(states: Tensor, read: Tensor, rows: Tensor) -> Tensor:
    """Return copies ``[R, ...]`` of the states that rows begin with: zeros where ``read`` is negative."""
    entries = read.long()[rows]
    begun = states[entries.clamp(min=0)]
    return begun.masked_fill((entries < 0).view(-1, *[1] * (begun.dim() - 1)), 0)


def write_states(states: Tensor, write: Tensor, rows: Tensor, ended: Tensor) -> None:
    """Write the states ``[R, ...]`` that rows end with, but for those whose ``write`` is negative."""
    entries = write.long()[rows]
    kept = entries >= 0
    states[entries[kept]] = ended[kept].to(states.dtype)
