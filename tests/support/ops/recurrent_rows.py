"""Rows with states of fixed size, and what recurrent ops make of them, token by token, in float64.

Shapes: T packed tokens, B rows, E entries, K heads of queries and keys, H heads, D size of a key, V size of a value, P
size of a head, N size of a state, G groups, C channels, W width of a convolution.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_llm_ops.recurrent.contracts import CausalConv1d, GatedDeltaRule, SelectiveScan

COUNTS = {
    "decode": [1, 1, 1, 1],
    "one token": [1],
    "mixed": [1, 7, 0, 3, 70],
    "chunks": [64, 65, 128, 16, 17],
    "no tokens": [0, 0],
}
"""Tokens of each row."""


class RecurrentRows:
    """Rows whose states lie in random entries of a pool; some begin with none, and some drop theirs."""

    def __init__(self, counts: Sequence[int], padding: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32):
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype
        self.counts, self.total = list(counts), sum(counts) + padding
        self.entries = 2 * len(counts) + 2
        order = torch.randperm(self.entries, generator=self.generator).int()
        self.read, self.write = order[: len(counts)].clone(), order[len(counts) :][: len(counts)].clone()
        self.read[1::3], self.write[2::4] = -1, -1
        self.starts = [sum(counts[:row]) for row in range(len(counts) + 1)]
        rows = [row for row, count in enumerate(counts) for _ in range(count)]
        self.token_rows = torch.tensor([*rows, *[len(counts) - 1] * padding], dtype=torch.int32)

    @property
    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tensor(self.starts, dtype=torch.int32), self.read, self.write

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def conv(self, channels: int = 6, width: int = 4, bias: bool = True, activation: str = "silu") -> CausalConv1d:
        tokens = self.random(channels, self.total).T  # as HuggingFace's layers have them
        states, weight = self.random(self.entries, channels, width), self.random(channels, width)
        own = self.random(channels) if bias else None
        return CausalConv1d(tokens, weight, own, states, self.token_rows, *self.places, activation)

    def delta(
        self,
        key_heads: int = 2,
        heads: int = 4,
        size: int = 8,
        value: int = 12,
        of_channels: bool = False,
        normalize: bool = True,
    ) -> GatedDeltaRule:
        query, key = (self.random(key_heads, self.total, size).transpose(0, 1) for _ in range(2))
        shape = (self.total, heads, size) if of_channels else (self.total, heads)
        decay = -4 * torch.rand(shape, generator=self.generator) ** 3
        beta = torch.rand(self.total, heads, generator=self.generator)
        states = torch.randn(self.entries, heads, size, value, generator=self.generator)
        given = query, key, self.random(self.total, heads, value), decay, beta, states
        return GatedDeltaRule(*given, *self.places, size**-0.5 if normalize else 0.1, normalize)

    def scan(self, heads: int = 4, size: int = 6, numbers: int = 8, groups: int = 2, of_numbers: bool = False) -> Any:
        tokens = self.random(heads * size, self.total).T.unflatten(1, (heads, size))
        dt = 2 * torch.rand(self.total, heads, generator=self.generator)
        a = -2 * torch.rand((heads, numbers) if of_numbers else (heads,), generator=self.generator)
        b, c = (self.random(self.total, groups, numbers) for _ in range(2))
        states = torch.randn(self.entries, heads, size, numbers, generator=self.generator)
        return SelectiveScan(tokens, dt, a, b, c, states, *self.places)

    def expected(self, args: Any, width: int, step: Callable[[Tensor, int], tuple[Tensor, Tensor]]) -> Any:
        """The results ``[T, width]`` in float64, and the pool afterwards; ``step`` takes a state and a token."""
        out, states = torch.zeros(self.total, width, dtype=torch.float64), args.states.double()
        before = states.clone()
        for row, count in enumerate(self.counts):
            entry = int(self.read[row])
            state = before[entry] if entry >= 0 else torch.zeros_like(before[0])
            for token in range(self.starts[row], self.starts[row] + count):
                state, out[token] = step(state, token)
            if count and self.write[row] >= 0:
                states[int(self.write[row])] = state
        return out, states


OF_TOKENS = ("tokens", "query", "key", "value", "decay", "beta", "dt", "b", "c")


def pieces(
    rows: RecurrentRows, args: Any, launch: Callable[[Any], Tensor], cuts: Sequence[Sequence[tuple[int, int]]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Each row's results and last state, computed from nothing by launches of ``(row, count)``: its next tokens."""
    device, done = args.states.device, [0] * len(rows.counts)
    results: list[list[Tensor]] = [[] for _ in rows.counts]
    states = torch.full_like(args.states, torch.nan)[
        : 2 * len(rows.counts)
    ]  # a row reads one entry, and writes another
    for launched in cuts:
        spans = [(row, rows.starts[row] + done[row], count) for row, count in launched]
        own = {
            name: torch.cat([getattr(args, name)[begin : begin + count] for _, begin, count in spans])
            for name in OF_TOKENS
            if name in args._fields
        }
        numbers = [
            [0, *itertools.accumulate(count for *_, count in spans)],
            [-1 if not done[row] else 2 * row + len(results[row]) % 2 for row, *_ in spans],
            [2 * row + 1 - len(results[row]) % 2 for row, *_ in spans],
        ]
        if "token_rows" in args._fields:
            numbers += [[number for number, (*_, count) in enumerate(spans) for _ in range(count)]]
        places = (torch.tensor(own, dtype=torch.int32, device=device) for own in numbers)
        placed = zip(("qo_indptr", "read", "write", "token_rows"), places, strict=False)
        out = launch(args._replace(**own, **dict(placed), states=states))
        for (row, _, count), part in zip(spans, out.split([count for *_, count in spans]), strict=True):
            results[row].append(part)
            done[row] += count
    ends = [states[2 * row + len(own) % 2] for row, own in enumerate(results)]
    return [torch.cat(own) for own in results], ends


def check_pieces(rows: RecurrentRows, args: Any, launch: Callable[[Any], Tensor], seed: int, times: int = 4) -> None:
    """Rows in random pieces, beside others in any batch, have the bits and the last state of each row alone."""
    chance = random.Random(seed)
    wanted = pieces(rows, args, launch, [[(row, count)] for row, count in enumerate(rows.counts)])
    for _ in range(times):
        left, cuts = list(rows.counts), []
        while any(left):
            some = [row for row, count in enumerate(left) if count and chance.random() < 0.7]
            launched = [(row, chance.choice([1, 1, chance.randint(1, left[row])])) for row in some]
            cuts += [launched] if launched else []
            for row, count in launched:
                left[row] -= count
        for found, expected in zip(pieces(rows, args, launch, cuts), wanted, strict=True):
            for own, alone in zip(found, expected, strict=True):
                assert torch.equal(own, alone), cuts


def conv_expected(rows: RecurrentRows, args: CausalConv1d) -> Any:
    def step(state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        state = torch.cat([state[:, 1:], args.tokens[token].double()[:, None]], dim=1)
        out = (state * args.weight.double()).sum(1) + (0 if args.bias is None else args.bias.double())
        return state, torch.nn.functional.silu(out) if args.activation == "silu" else out

    return rows.expected(args, args.weight.shape[0], step)


def delta_expected(rows: RecurrentRows, args: GatedDeltaRule) -> Any:
    heads = args.value.shape[1]
    group = heads // args.query.shape[1]

    def step(state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        state, out = state.clone(), []
        for head in range(heads):
            query, key = (states[token, head // group].double() for states in (args.query, args.key))
            if args.normalize:
                query, key = (each / (each @ each + 1e-6).sqrt() for each in (query, key))
            state[head] *= args.decay[token, head].double().exp().reshape(-1, 1)
            wrong = args.value[token, head].double() - key @ state[head]
            state[head] += torch.outer(key, args.beta[token, head].double() * wrong)
            out.append(args.scale * query @ state[head])
        return state, torch.cat(out)

    return rows.expected(args, args.value[0].numel(), step)


def scan_expected(rows: RecurrentRows, args: SelectiveScan) -> Any:
    heads = args.tokens.shape[1]
    group = heads // args.b.shape[1]

    def step(state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        state, out = state.clone(), []
        for head in range(heads):
            dt, b, c = (
                args.dt[token, head].double(),
                *(each[token, head // group].double() for each in (args.b, args.c)),
            )
            state[head] *= (dt * args.a[head].double()).exp()
            state[head] += dt * torch.outer(args.tokens[token, head].double(), b)
            out.append(state[head] @ c)
        return state, torch.cat(out)

    return rows.expected(args, args.tokens[0].numel(), step)
