"""Ops of experts on the CPU: against each pair of a row and an expert by itself, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_llm_ops import experts_linear, fused_experts
from compiled_llm_ops.contracts.experts import EXPERT_ACTIVATIONS
from support.ops.expert_rows import ACTIVATIONS, CHOICES, ExpertRows, fused_expected, linear_expected

pytestmark = pytest.mark.core

ROWS = [(0, 2), (1, 1), (1, 6), (3, 2), (64, 2), (65, 6), (200, 3)]
"""Rows, and how many of 6 experts each chooses."""


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("rows", "chosen"), ROWS)
@pytest.mark.parametrize("transposed", [False, True], ids=["outputs first", "inputs first"])
def test_products(choice: str, rows: int, chosen: int, transposed: bool, seed: int) -> None:
    made = ExpertRows(rows, chosen, choice=choice, seed=seed)
    for of_pairs in (False, True):
        args = made.linear(of_pairs=of_pairs, bias=of_pairs, transposed=transposed)
        out = experts_linear(*args)
        assert out.is_contiguous()
        torch.testing.assert_close(out.double(), linear_expected(args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("rows", "chosen"), ROWS)
def test_layers(choice: str, rows: int, chosen: int, seed: int) -> None:
    args = ExpertRows(rows, chosen, choice=choice, seed=seed, ids=torch.int32).fused()
    out = fused_experts(*args)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), fused_expected(args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("transposed", [False, True], ids=["outputs first", "inputs first"])
def test_kinds_of_layers(activation: str, gated: bool, transposed: bool, seed: int) -> None:
    args = ExpertRows(7, 3, seed=seed).fused(activation, gated, transposed, bias=True)
    torch.testing.assert_close(fused_experts(*args).double(), fused_expected(args), rtol=1e-4, atol=1e-4)


def test_each_activation_has_an_expectation() -> None:
    assert set(ACTIVATIONS) == set(EXPERT_ACTIVATIONS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits(dtype: torch.dtype, seed: int) -> None:
    args = ExpertRows(9, 3, seed=seed, dtype=dtype).fused(bias=True)
    out = fused_experts(*args)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), fused_expected(args), rtol=3e-2, atol=3e-2)


def test_rows_and_weights_of_any_strides(seed: int) -> None:
    args = ExpertRows(9, 3, seed=seed).fused()
    wide, up = torch.randn(9, 48), torch.randn(6, 40, 48)
    wide[:, ::2], up[:, :, ::2] = args.states, args.up
    strided = args._replace(states=wide[:, ::2], up=up[:, :, ::2])
    torch.testing.assert_close(fused_experts(*strided), fused_experts(*args))


def test_a_row_does_not_depend_on_the_others(seed: int) -> None:
    args = ExpertRows(8, 2, seed=seed).fused()
    alone = [
        fused_experts(args.states[[row]], args.topk_ids[[row]], args.topk_weights[[row]], *args[3:]) for row in range(8)
    ]
    torch.testing.assert_close(torch.cat(alone), fused_experts(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "backend"), [("linear", "aot_eager"), ("fused", "inductor")])
def test_they_compile_whole_and_once_for_all_shapes(name: str, backend: str, seed: int) -> None:
    """By Inductor, too, which compiles whole models of them with --whole."""
    op: Any = {"linear": experts_linear, "fused": fused_experts}[name]
    torch._dynamo.reset()  # or what the last case compiled counts as this one's
    compiled = torch.compile(lambda *args: op(*args) * 2, fullgraph=True, dynamic=True, backend=backend)
    no_guards_on_equal_sizes = torch.fx.experimental._config.patch(use_duck_shape=False)
    with torch._dynamo.config.patch(error_on_recompile=True), no_guards_on_equal_sizes:
        for rows in (5, 64, 65, 100):
            args = getattr(ExpertRows(rows, 3, seed=seed), name)()
            assert torch.equal(compiled(*args), op(*args) * 2)


def of(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("linear", {"rows": of(5)}, r"rows must be two-dimensional and topk_ids \[T, k\]"),
        ("linear", {"topk_ids": of(5, 2)}, r"int32 or int64; got .* torch\.float32"),
        ("linear", {"rows": of(4, 24)}, r"one for each of 5 rows of topk_ids, or for each of its 10 numbers; got 4"),
        ("linear", {"rows": of(5, 24).double()}, r"no kernel for torch\.float64"),
        ("linear", {"weight": of(6, 20, 23)}, r"weight must be \[E, O, 24\].*got \(6, 20, 23\)"),
        ("linear", {"weight": of(6, 20, 24).half()}, r"must be torch\.float32, as rows; got torch\.float16"),
        ("linear", {"bias": of(6, 19)}, r"the bias of weight must be \[6, 20\]"),
        ("linear", {"transposed": True}, r"weight must be \[E, O, 24\]"),
        ("fused", {"topk_weights": of(5, 3)}, r"\[T, H\], \[T, k\] and \[T, k\]"),
        ("fused", {"activation": "swish"}, "activation must be one of none, silu, .*; got 'swish'"),
        ("fused", {"gated": False}, r"down must be \[E, 24, 40\]"),
        ("fused", {"down": of(5, 24, 20)}, "not of the same experts"),
        ("fused", {"up": of(6, 41, 24)}, "not of the same experts"),
        ("fused", {"down_bias": of(6, 24).half()}, r"down and its bias must be torch\.float32"),
    ],
)
def test_wrong_arguments_raise(name: str, change: dict[str, Any], message: str) -> None:
    op: Any = {"linear": experts_linear, "fused": fused_experts}[name]
    args = getattr(ExpertRows(), name)()
    with pytest.raises(ValueError, match=message):
        op(*args._replace(**change))
