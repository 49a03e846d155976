"""Ops of recurrent layers on a GPU: as on the CPU, and in a CUDA graph with other rows and entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm_ops import causal_conv1d, gated_delta_rule, selective_scan
from support.gpu import captured, on_gpu
from support.ops.recurrent_rows import COUNTS, RecurrentRows, check_pieces

pytestmark = pytest.mark.gpu

LONG = {"prompts": [1000, 64, 1, 129]}

CASES: dict[str, tuple[Callable[..., Tensor], Callable[[RecurrentRows], Any]]] = {
    "convolution": (causal_conv1d, lambda rows: rows.conv(channels=8192)),
    "gated delta net": (gated_delta_rule, lambda rows: rows.delta(16, 32, 128, 128)),
    "Kimi's": (gated_delta_rule, lambda rows: rows.delta(32, 32, 128, 128, of_channels=True)),
    "Mamba 1": (selective_scan, lambda rows: rows.scan(4096, 1, 16, 1, True)),
    "Mamba 2": (selective_scan, lambda rows: rows.scan(64, 64, 128, 8)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("counts", ["decode", "mixed", "chunks", "prompts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_and_states_are_those_of_the_cpu(name: str, counts: str, dtype: torch.dtype, seed: int) -> None:
    op, made = CASES[name]
    args = made(RecurrentRows({**COUNTS, **LONG}[counts], seed=seed, dtype=dtype))
    there = on_gpu(args)
    before = there.states.clone()
    out, expected = op(*there), op(*args)
    tolerance = 1e-3 if dtype == torch.float32 else 2e-2
    size = max(1.0, float(expected.float().abs().max()))
    torch.testing.assert_close(out.cpu().float() / size, expected.float() / size, rtol=tolerance, atol=tolerance)
    size = max(1.0, float(args.states.abs().max()))
    torch.testing.assert_close(there.states.cpu() / size, args.states / size, rtol=tolerance, atol=tolerance)
    untouched = sorted({*range(len(before))} - {*args.write.tolist()})
    assert torch.equal(there.states[untouched], before[untouched])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_invariant_bits_depend_on_a_rows_tokens_alone(name: str, dtype: torch.dtype, seed: int) -> None:
    op, made = CASES[name]
    rows = RecurrentRows([300, 1, 64, 17, 5], padding=0, seed=seed, dtype=dtype)
    check_pieces(rows, on_gpu(made(rows)._replace(invariant=True)), lambda own: op(*own), seed)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("total", [18, 400], ids=["token by token", "in chunks"])
def test_replays_follow_entries_and_lengths(name: str, total: int, seed: int) -> None:
    op, made = CASES[name]
    each = total // 18
    counts = [[each * count for count in own] for own in ([3, 5, 1, 7], [1, 1, 1, 1], [9, 0, 4, 3], [16, 0, 0, 0])]

    def rows_of(number: int) -> Any:
        own = counts[number]
        rows = RecurrentRows(own, padding=total - sum(own), seed=seed + number, dtype=torch.bfloat16)
        return on_gpu(made(rows))

    first = rows_of(0)
    graph, out = captured(lambda: op(*first))
    for number in range(1, len(counts)):
        other = rows_of(number)
        for own, new in zip(first, other, strict=True):
            if isinstance(own, Tensor):
                own.copy_(new)
        graph.replay()
        expected = op(*other)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        torch.testing.assert_close(first.states, other.states, rtol=0, atol=0)
