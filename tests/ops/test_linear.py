"""`skinny_linear` on the CPU: its products, and which of them it chooses on whose processors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compiled_llm_ops import skinny_linear
from compiled_llm_ops.linear import linear, onednn

pytestmark = pytest.mark.core

PRODUCTS = ("aten::mm", "mkldnn::_linear_pointwise")


@pytest.mark.parametrize("mkl_is_slow", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 33, 129])
@pytest.mark.parametrize("outputs", [1, 48, 8200])
def test_skinny_linear_equals_a_product_in_double_precision(
    rows: int, outputs: int, mkl_is_slow: bool, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(linear, "mkl_is_slow", lambda: mkl_is_slow)
    x, weight = torch.randn(rows, 96), torch.randn(outputs, 96)
    expected = (x.double() @ weight.double().T).float()
    for rows_given in (x, x.T.contiguous().T):
        out = skinny_linear(rows_given, weight)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        assert out.is_contiguous()


def ops_below(call: Callable[[], object]) -> list[tuple[str, list[list[int]]]]:
    """Return the names of the ops that a call runs below a compiled_llm op, each with its inputs' shapes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        call()
    return [(event.name, event.input_shapes) for event in profile.events() if event.name.startswith(("aten", "mkldnn"))]


@pytest.mark.parametrize("rows", [1, 4, 40])
def test_where_mkl_is_fast_rows_are_multiplied_as_without_compiling(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Intel's processors a weight on the left takes twice as long: compiled steps were slower than eager ones."""
    monkeypatch.setattr(linear, "mkl_is_slow", lambda: False)
    x, weight = torch.randn(rows, 96), torch.randn(48, 96)
    ran = ops_below(lambda: skinny_linear(x, weight))
    assert [(name, *shapes[:2]) for name, shapes in ran if name == "aten::mm"] == [("aten::mm", [rows, 96], [96, 48])]
    assert not {name for name, _ in ran} & {"aten::cat", "aten::clone", "aten::copy_"}


@pytest.mark.parametrize(
    ("rows", "inputs", "op", "left"),
    [
        (1, 96, "aten::mm", [48, 96]),
        (5, 96, "aten::mm", [48, 96]),
        (33, 96, "mkldnn::_linear_pointwise", [33, 96]),
        (1, 2048, "mkldnn::_linear_pointwise", [1, 2048]),
    ],
)
def test_where_mkl_is_slow_it_reads_the_weight_for_few_numbers_alone(
    rows: int, inputs: int, op: str, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "mkl_is_slow", lambda: True)
    x, weight = torch.randn(rows, inputs), torch.randn(48, inputs)
    ran = ops_below(lambda: skinny_linear(x, weight))
    assert [(name, shapes[0]) for name, shapes in ran if name in PRODUCTS] == [(op, left)]


@pytest.mark.parametrize(
    ("text", "has_mkl", "slow"),
    [
        ("vendor_id\t: AuthenticAMD\n", True, True),
        ("vendor_id\t: AuthenticAMD\n", False, False),
        ("vendor_id\t: GenuineIntel\n", True, False),
        (None, True, False),
    ],
)
def test_mkl_is_slow_on_amds_processors(
    text: str | None, has_mkl: bool, slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(linear, "CPUINFO", cpuinfo)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: has_mkl)
    if text is not None:
        cpuinfo.write_text(text)
    assert linear.mkl_is_slow.__wrapped__() is slow
    monkeypatch.setattr(onednn, "is_available", lambda: False)
    assert linear.mkl_is_slow.__wrapped__() is False
