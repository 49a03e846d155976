"""Kernels of recurrent layers under Triton's interpreter on the CPU, and compiled for Hopper without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from support.ops.compiling import compiled, resources_of
from support.ops.interpreting import interpreted, needs_triton, not_interpreted
from support.ops.recurrent_rows import RecurrentRows, check_pieces, conv_expected, delta_expected, scan_expected

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]

COUNTS = pytest.mark.parametrize("counts", [[1, 1, 1, 1], [1, 7, 0, 3, 5], [0, 0]], ids=["decode", "mixed", "nothing"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def check(rows: RecurrentRows, args: Any, launch: Callable[[Any, Tensor], None], width: int, expected: Any) -> None:
    before, out = args.states.clone(), torch.full((rows.total, width), torch.nan, dtype=rows.dtype)
    launch(args, out)
    tolerance = 1e-4 if rows.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(args.states.double(), expected[1], rtol=tolerance, atol=tolerance)
    untouched = sorted({*range(rows.entries)} - {*rows.write.tolist()})
    assert torch.equal(args.states[untouched], before[untouched])


@pytest.mark.drawn
@interpreted
@COUNTS
@DTYPES
@pytest.mark.parametrize("width", [4, 2])
@pytest.mark.parametrize(("bias", "activation"), [(True, "silu"), (False, "none")])
def test_convolution(counts: Any, dtype: Any, width: int, bias: bool, activation: str, seed: int) -> None:
    from compiled_llm_ops.recurrent.kernels.conv import convolve

    rows = RecurrentRows(counts, seed=seed, dtype=dtype)
    args = rows.conv(channels=300, width=width, bias=bias, activation=activation)
    check(rows, args, convolve, 300, conv_expected(rows, args))


@pytest.mark.drawn
@interpreted
@COUNTS
@DTYPES
@pytest.mark.parametrize("of_channels", [False, True], ids=["gated delta net", "Kimi's"])
@pytest.mark.parametrize(("key_heads", "size", "value"), [(1, 16, 40), (2, 12, 8)])
def test_delta_rule(
    counts: Any, dtype: Any, of_channels: bool, key_heads: int, size: int, value: int, seed: int
) -> None:
    from compiled_llm_ops.recurrent.kernels.delta_rule import apply

    rows = RecurrentRows(counts, seed=seed, dtype=dtype)
    args = rows.delta(key_heads, 2, size, value, of_channels)
    check(rows, args, apply, 2 * value, delta_expected(rows, args))


@pytest.mark.drawn
@interpreted
@COUNTS
@DTYPES
@pytest.mark.parametrize("sizes", [(4, 6, 8, 2), (80, 1, 16, 1), (6, 48, 20, 3)], ids=str)
@pytest.mark.parametrize("of_numbers", [False, True], ids=["Mamba 2", "Mamba 1"])
def test_selective_scan(counts: Any, dtype: Any, sizes: Any, of_numbers: bool, seed: int) -> None:
    from compiled_llm_ops.recurrent.kernels.selective_scan import scan

    rows = RecurrentRows(counts, seed=seed, dtype=dtype)
    args = rows.scan(*sizes, of_numbers)
    check(rows, args, scan, sizes[0] * sizes[1], scan_expected(rows, args))


@pytest.mark.drawn(most=2)
@interpreted
@pytest.mark.parametrize("name", ["convolution", "gated delta net", "Kimi's", "Mamba 1", "Mamba 2"])
def test_invariant_bits_depend_on_a_rows_tokens_alone(name: str, seed: int) -> None:
    """One kernel serves all batches; whether its compiler keeps to one order is seen on a GPU."""
    from compiled_llm_ops.recurrent.kernels.conv import convolve
    from compiled_llm_ops.recurrent.kernels.delta_rule import apply
    from compiled_llm_ops.recurrent.kernels.selective_scan import scan

    rows = RecurrentRows([1, 9, 4], padding=0, seed=seed)
    made: dict[str, tuple[Callable[..., None], Any]] = {
        "convolution": (convolve, rows.conv(channels=20)),
        "gated delta net": (apply, rows.delta(1, 2, 12, 8)),
        "Kimi's": (apply, rows.delta(2, 2, 12, 8, of_channels=True)),
        "Mamba 1": (scan, rows.scan(24, 1, 16, 1, True)),
        "Mamba 2": (scan, rows.scan(4, 6, 8, 2)),
    }
    launch, args = made[name]

    def launched(own: Any) -> Tensor:
        states = own.value if "value" in own._fields else own.tokens
        out = torch.full(states.shape, torch.nan)
        launch(own, out)
        return out

    check_pieces(rows, args._replace(invariant=True), launched, seed, times=1)


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("counts", [[1, 7, 0, 3, 8], [9, 16], [0, 0]], ids=["mixed", "borders", "nothing"])
@DTYPES
@pytest.mark.parametrize("sizes", [(80, 1, 16, 1), (64, 1, 12, 2), (16, 4, 8, 2)], ids=str)
def test_prompts_through_a_scan_with_decays_of_numbers(counts: Any, dtype: Any, sizes: Any, seed: int) -> None:
    from compiled_llm_ops.recurrent.kernels.number_scan import scan_numbers, scans_numbers

    rows = RecurrentRows(counts, padding=10, seed=seed, dtype=dtype)
    args = rows.scan(*sizes, True)
    assert scans_numbers(args)
    check(rows, args, scan_numbers, sizes[0] * sizes[1], scan_expected(rows, args))


def test_programs_have_channels_of_one_group() -> None:
    from compiled_llm_ops.recurrent.kernels.number_scan import scans_numbers

    rows = RecurrentRows([40])
    assert not scans_numbers(rows.scan(8, 1, 16, 2, True))
    assert not scans_numbers(rows.scan(64, 1, 16, 1, False))


KERNELS: dict[str, tuple[str, dict[str, Any]]] = {
    "conv": ("_causal_conv1d", {"WIDTH": 4, "BIASED": True, "SILU": True, "BLOCK": 256}),
    "delta_rule": (
        "_gated_delta_rule",
        {"GROUP": 2, "SIZE": 128, "VALUE": 128, "BLOCK": 128, "VALUES": 32, "OF_CHANNELS": True, "NORMALIZE": True},
    ),
    "number_scan": ("_scan_numbers", {"HEAD": 1, "GROUP": 8192, "SIZE": 16, "BLOCK": 16, "CHANNELS": 32, "AHEAD": 8}),
    "selective_scan": ("_selective_scan", {"HEAD": 64, "GROUP": 8192, "SIZE": 128, "BLOCK": 128, "CHANNELS": 16}),
}


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_fit_registers(name: str, tmp_path: Any) -> None:
    import importlib

    kernel_name, constants = KERNELS[name]
    kernel = getattr(importlib.import_module(f"compiled_llm_ops.recurrent.kernels.{name}"), kernel_name)
    in_16 = {"tokens", "weight", "bias", "query", "key", "value", "dt", "b", "c", "out"}
    numbers = {"token_rows", "qo_indptr", "read", "write"}

    def type_of(argument: str) -> str:
        if argument in in_16 or (argument == "states" and name == "conv"):
            return "*bf16"
        if argument in numbers:
            return "*i32"
        if argument in {"decay", "beta", "a", "states"}:
            return "*fp32"
        return "fp32" if argument == "scale" else "i32"

    types = {argument: type_of(argument) for argument in kernel.arg_names if argument not in constants}
    made = compiled(kernel, constants, types, warps={"conv": 2, "number_scan": 1}.get(name, 4))
    used = resources_of(made.asm["cubin"], tmp_path / "kernel.cubin")
    assert re.search(r"LOCAL:0\b", used), f"registers spill: {used}"
    assert int(re.search(r"REG:(\d+)", used)[1]) <= (255 if name == "number_scan" else 168)  # type: ignore[index]
