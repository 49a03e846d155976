"""Ops of experts on a GPU: near what float64 gives, without waiting, and in a CUDA graph with other choices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compiled_llm_ops import experts_linear, fused_experts
from support.gpu import captured, on_gpu
from support.ops.expert_rows import ACTIVATIONS, CHOICES, ExpertRows, fused_expected, linear_expected

pytestmark = pytest.mark.gpu

ROWS = [1, 2, 16, 17, 64, 65, 200]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def check(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance, size = 1e-4 if dtype == torch.float32 else 2e-2, max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found.cpu().double() / size, expected / size, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("choice", CHOICES)
@DTYPES
def test_layers(rows: int, choice: str, dtype: torch.dtype, seed: int) -> None:
    args = ExpertRows(rows, 4, 32, choice=choice, size=256, between=192, seed=seed, dtype=dtype).fused()
    check(fused_experts(*on_gpu(args)), fused_expected(args), dtype)


@pytest.mark.parametrize("rows", [5, 100])
@pytest.mark.parametrize(("chosen", "experts"), [(1, 1), (1, 300), (8, 8), (10, 512)])
@DTYPES
def test_numbers_of_experts(rows: int, chosen: int, experts: int, dtype: torch.dtype, seed: int) -> None:
    args = ExpertRows(rows, chosen, experts, size=72, between=40, seed=seed, dtype=dtype).fused()
    check(fused_experts(*on_gpu(args)), fused_expected(args), dtype)


@pytest.mark.parametrize("rows", [7, 90])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("transposed", [False, True], ids=["outputs first", "inputs first"])
def test_kinds_of_layers(rows: int, activation: str, gated: bool, transposed: bool, seed: int) -> None:
    made = ExpertRows(rows, 3, 9, size=100, between=60, seed=seed, dtype=torch.bfloat16)  # no multiples of 16
    args = made.fused(activation, gated, transposed, bias=True)
    check(fused_experts(*on_gpu(args)), fused_expected(args), torch.bfloat16)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("of_pairs", [False, True], ids=["rows", "pairs"])
@pytest.mark.parametrize("transposed", [False, True], ids=["outputs first", "inputs first"])
@DTYPES
def test_products(rows: int, of_pairs: bool, transposed: bool, dtype: torch.dtype, seed: int) -> None:
    made = ExpertRows(rows, 2, 12, choice="some without", size=256, between=130, seed=seed, dtype=dtype)
    args = made.linear(of_pairs=of_pairs, bias=True, transposed=transposed)
    check(experts_linear(*on_gpu(args)), linear_expected(args), dtype)


@pytest.mark.parametrize("rows", ROWS)
def test_replays_follow_other_choices(rows: int, seed: int) -> None:
    """From choices that are all the same, to those that take the most tiles, to none."""
    first = on_gpu(ExpertRows(rows, 4, 32, choice="the same", size=256, seed=seed, dtype=torch.bfloat16).fused())
    graph, out = captured(lambda: fused_experts(*first))
    for number, choice in enumerate(["any", "one of them", "some without", "none at all", "the same"]):
        made = ExpertRows(rows, 4, 32, choice=choice, size=256, seed=seed + number, dtype=torch.bfloat16)
        other = made.fused()._replace(up=first.up, down=first.down)
        first.topk_ids.copy_(other.topk_ids)
        first.topk_weights.copy_(other.topk_weights)
        graph.replay()
        expected = fused_experts(*first)
        assert torch.equal(out, expected)
        in_float64 = first._replace(
            **{name: own.cpu() for name, own in first._asdict().items() if own is not None and isinstance(own, Tensor)}
        )
        check(out, fused_expected(in_float64), torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 64, 300])
def test_nothing_waits_on_the_device(rows: int, seed: int) -> None:
    args = on_gpu(ExpertRows(rows, 4, 32, size=256, seed=seed, dtype=torch.bfloat16).fused())
    fused_experts(*args)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        fused_experts(*args)
        experts_linear(args.states, args.topk_ids, args.up)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rows", [4, 64, 300])
def test_experts_that_no_row_chose_are_not_read(rows: int, seed: int) -> None:
    args = on_gpu(ExpertRows(rows, 4, 32, size=256, seed=seed, dtype=torch.bfloat16).fused())
    args = args._replace(topk_ids=args.topk_ids % 7)
    expected = fused_experts(*args)
    args.up[7:], args.down[7:] = torch.nan, torch.nan
    assert torch.equal(fused_experts(*args), expected)
