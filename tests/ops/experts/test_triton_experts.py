"""Kernels of experts under Triton's interpreter on the CPU, and compiled for Hopper without a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm_ops.contracts.experts import EXPERT_ACTIVATIONS, ExpertsLinear, FusedExperts
from support.ops.compiling import compiled, resources_of
from support.ops.expert_rows import CHOICES, ExpertRows, fused_expected, linear_expected
from support.ops.interpreting import interpreted, needs_triton, not_interpreted

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]

CHOICE = pytest.mark.parametrize("choice", CHOICES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # bfloat16 it multiplies as integers
TOLERANCE: dict[torch.dtype, Any] = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}}
TOLERANCE[torch.float16] = {"rtol": 3e-2, "atol": 3e-2}


def as_outputs_by_inputs(weight: Tensor, transposed: bool) -> Tensor:
    return weight.mT if transposed else weight


def fused(args: FusedExperts) -> Tensor:
    """What the op's CUDA launcher does, on the CPU."""
    from compiled_llm_ops.kernels.experts.products import Epilogue, add_by_weight, multiply, routed

    up, down = (as_outputs_by_inputs(weight, args.transposed) for weight in (args.up, args.down))
    ids, nan = args.topk_ids, torch.nan
    out, answers = torch.full_like(args.states, nan), args.states.new_full((ids.numel(), len(args.states[0])), nan)
    between = args.states.new_full((ids.numel(), down.shape[2]), nan)
    routing = routed(ids, len(up))
    multiply(args.states, routing, up, args.up_bias, between, Epilogue(args.activation, args.gated))
    multiply(between, routing, down, args.down_bias, answers)
    add_by_weight(answers, ids, args.topk_weights, out, len(up))
    return out


def linear(args: ExpertsLinear) -> Tensor:
    from compiled_llm_ops.kernels.experts.products import multiply, routed

    weight = as_outputs_by_inputs(args.weight, args.transposed)
    out = args.rows.new_zeros(args.topk_ids.numel(), weight.shape[1])
    multiply(args.rows, routed(args.topk_ids, len(weight)), weight, args.bias, out)
    return out


@pytest.mark.drawn
@interpreted
@CHOICE
@DTYPES
@pytest.mark.parametrize(("rows", "chosen", "experts"), [(1, 1, 6), (3, 6, 6), (3, 2, 40), (20, 2, 3), (64, 1, 4)])
def test_steps(choice: str, dtype: Any, rows: int, chosen: int, experts: int, seed: int) -> None:
    args = ExpertRows(rows, chosen, experts, choice=choice, seed=seed, dtype=dtype).fused()
    torch.testing.assert_close(fused(args).double(), fused_expected(args), **TOLERANCE[dtype])


@pytest.mark.drawn
@interpreted
@CHOICE
@DTYPES
@pytest.mark.parametrize(("rows", "chosen", "experts"), [(65, 2, 40), (70, 3, 3), (150, 1, 1)])
def test_many_rows_are_sorted(choice: str, dtype: Any, rows: int, chosen: int, experts: int, seed: int) -> None:
    args = ExpertRows(rows, chosen, experts, choice=choice, seed=seed, dtype=dtype).fused(bias=True)
    torch.testing.assert_close(fused(args).double(), fused_expected(args), **TOLERANCE[dtype])


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("activation", EXPERT_ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("transposed", [False, True], ids=["outputs first", "inputs first"])
@pytest.mark.parametrize("rows", [5, 66])
def test_kinds_of_layers(activation: str, gated: bool, transposed: bool, rows: int, seed: int) -> None:
    made = ExpertRows(rows, 2, seed=seed, size=40, between=70)
    args = made.fused(activation, gated, transposed, bias=True)
    torch.testing.assert_close(fused(args).double(), fused_expected(args), **TOLERANCE[torch.float32])


@pytest.mark.drawn
@interpreted
@CHOICE
@pytest.mark.parametrize("of_pairs", [False, True], ids=["rows", "pairs"])
@pytest.mark.parametrize("transposed", [False, True], ids=["outputs first", "inputs first"])
@pytest.mark.parametrize("rows", [2, 17, 80])
def test_products(choice: str, of_pairs: bool, transposed: bool, rows: int, seed: int) -> None:
    made = ExpertRows(rows, 2, choice=choice, seed=seed, size=300, between=130, ids=torch.int32)
    args = made.linear(of_pairs=of_pairs, bias=True, transposed=transposed)
    torch.testing.assert_close(linear(args).double(), linear_expected(args), **TOLERANCE[torch.float32])


@interpreted
@pytest.mark.parametrize("rows", [10, 50])
def test_an_expert_may_be_chosen_more_often_than_a_tile_has_rows(rows: int, seed: int) -> None:
    args = ExpertRows(rows, 3, choice="one of them", seed=seed).linear(of_pairs=True)
    torch.testing.assert_close(linear(args).double(), linear_expected(args), **TOLERANCE[torch.float32])


@interpreted
@pytest.mark.parametrize("experts", [3, 40], ids=["a program for each expert", "a program for each pair"])
def test_pairs_without_an_expert_are_zeros(experts: int, seed: int) -> None:
    args = ExpertRows(5, 2, experts, choice="some without", seed=seed).linear()
    wide = torch.cat([args.weight, torch.full_like(args.weight[:1], torch.nan)])
    found = linear(args._replace(weight=wide[:-1]))  # what follows in memory is no number
    torch.testing.assert_close(found.double(), linear_expected(args), **TOLERANCE[torch.float32])


@interpreted
def test_experts_that_no_row_chose_are_not_read(seed: int) -> None:
    """Neither in a step nor among many rows; what is read shows, since it is no number."""
    for rows in (4, 64, 90):
        args = ExpertRows(rows, 2, 30, seed=seed).fused()
        ids = args.topk_ids % 7
        expected = fused_expected(args._replace(topk_ids=ids))
        up, down = args.up.clone(), args.down.clone()
        up[7:], down[7:] = torch.nan, torch.nan
        found = fused(args._replace(topk_ids=ids, up=up, down=down))
        torch.testing.assert_close(found.double(), expected, **TOLERANCE[torch.float32])


@pytest.mark.whole
@interpreted
def test_a_model_decodes_by_the_kernels(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompts go through the sorted pairs, and its steps through the others."""
    import compiled_llm
    from compiled_llm.model.layers import experts
    from support.huggingface.families import FAMILIES, make
    from support.parity import greedy, mixed_prompts

    rows: list[int] = []

    def by_triton(*arguments: Any) -> Tensor:
        args = FusedExperts(*arguments)
        rows.append(len(args.states))
        return fused(args._replace(states=args.states.contiguous()))

    inputs = mixed_prompts([60, 19], 128, seed)
    expected = greedy(make("Qwen3Moe", FAMILIES["Qwen3Moe"], 0), inputs, 4)
    model: Any = compiled_llm.wrap(make("Qwen3Moe", FAMILIES["Qwen3Moe"], 0), mode="eager", progress=False)
    monkeypatch.setattr(experts, "fused_experts", by_triton)
    with torch.no_grad():
        assert torch.equal(greedy(model, inputs, 4), expected)
    assert min(rows) <= 2
    assert max(rows) > 64


SIZES = dict.fromkeys(("pairs", "experts", "inputs", "outputs", "size"), "i32")
SIZES |= dict.fromkeys(("expert_stride", "output_stride", "input_stride", "bias_stride"), "i32")
TYPES = {**SIZES, **dict.fromkeys(("rows", "weight", "bias", "out", "answers"), "*bf16")}
TYPES |= {"ids": "*i64", "order": "*i64", "offsets": "*i32", "weights": "*fp32"}
ALIGNED = ("rows", "weight", "out", "inputs", "outputs", "expert_stride", "output_stride")

GATED = {"GATED": True, "ACTIVATION": "silu", "SHARING": 8, "input_stride": 1}
DOWN = {"GATED": False, "ACTIVATION": "none", "SHARING": 1, "input_stride": 1}
STEP = {"FEW": 16, "CHUNK": 512, "INPUTS": 128, "STAGES": 4}
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "one row": ("_experts_step", {**STEP, **GATED, "BY_EXPERT": False, "CHUNK": 128, "ROWS": 16, "OUTPUTS": 16}, 4),
    "64 rows": ("_experts_step", {**STEP, **GATED, "BY_EXPERT": True, "ROWS": 64, "OUTPUTS": 32}, 4),
    "64 rows, down": ("_experts_step", {**STEP, **DOWN, "BY_EXPERT": True, "ROWS": 64, "OUTPUTS": 64}, 4),
    "64 rows, inputs first": (
        "_experts_step",
        {**STEP, **DOWN, "BY_EXPERT": True, "ROWS": 64, "OUTPUTS": 64, "output_stride": 1, "input_stride": 2880},
        4,
    ),
    "many rows": (
        "_experts_packed", {**GATED, "EXPERTS": 256, "ROWS": 128, "OUTPUTS": 64, "INPUTS": 64, "STAGES": 3}, 8
    ),
    "many rows, down": (
        "_experts_packed", {**DOWN, "EXPERTS": 256, "ROWS": 128, "OUTPUTS": 128, "INPUTS": 64, "STAGES": 3}, 8
    ),
    "few of many": (
        "_experts_packed", {**GATED, "EXPERTS": 256, "ROWS": 16, "OUTPUTS": 32, "INPUTS": 128, "STAGES": 3}, 4
    ),
    "sums": ("_add_by_weight", {"CHOSEN": 8, "BLOCK": 1024}, 4),
}  # fmt: skip


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", CASES)
def test_kernels_fit_registers(name: str, tmp_path: Any) -> None:
    from compiled_llm_ops.kernels.experts import products

    kernel_name, constants, warps = CASES[name]
    kernel = getattr(products, kernel_name)
    types = {argument: TYPES[argument] for argument in kernel.arg_names if argument not in constants}
    if "input_stride" in constants and "bias" in types:
        del types["bias"]
    aligned = [argument for argument in ALIGNED if argument in types]
    made = compiled(kernel, constants, types, warps=warps, aligned=aligned)
    used = resources_of(made.asm["cubin"], tmp_path / "kernel.cubin")
    assert re.search(r"LOCAL:0\b", used), f"registers spill: {used}"
    assert made.metadata.shared <= 113 * 1024, "two programs fit into a multiprocessor"


@pytest.mark.whole
@not_interpreted
@pytest.mark.usefixtures("own_cache")
def test_biases_and_float32_compile() -> None:
    from compiled_llm_ops.kernels.experts.products import _experts_packed, _experts_step

    in_32 = {name: "*fp32" if type == "*bf16" else type for name, type in TYPES.items()}
    for kernel, name in ((_experts_step, "64 rows"), (_experts_packed, "many rows")):
        constants = {**CASES[name][1], "ROWS": 64, "INPUTS": 32, "STAGES": 2, "ACTIVATION": "gelu"}
        types = {argument: in_32[argument] for argument in kernel.arg_names if argument not in constants}
        assert "ptx" in compiled(kernel, constants, types).asm
