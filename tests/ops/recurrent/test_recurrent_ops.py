"""Ops of recurrent layers on the CPU: against the recurrence token by token, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm_ops import causal_conv1d, gated_delta_rule, selective_scan
from support.ops.recurrent_rows import (
    COUNTS,
    RecurrentRows,
    check_pieces,
    conv_expected,
    delta_expected,
    scan_expected,
)

pytestmark = pytest.mark.core


def check(rows: RecurrentRows, args: Any, op: Callable[..., Tensor], expected: Any, tolerance: float = 1e-4) -> None:
    before = args.states.clone()
    out = op(*args)
    assert out.is_contiguous()
    assert out.dtype == args[0].dtype
    torch.testing.assert_close(out.flatten(1).double(), expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(args.states.double(), expected[1], rtol=tolerance, atol=tolerance)
    untouched = sorted({*range(rows.entries)} - {*rows.write.tolist()})
    assert torch.equal(args.states[untouched], before[untouched]), "what was read stays as it was"


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("width", [4, 3, 1])
@pytest.mark.parametrize(("bias", "activation"), [(True, "silu"), (False, "none")])
def test_convolutions(counts: str, width: int, bias: bool, activation: str, seed: int) -> None:
    rows = RecurrentRows(COUNTS[counts], seed=seed)
    args = rows.conv(width=width, bias=bias, activation=activation)
    check(rows, args, causal_conv1d, conv_expected(rows, args))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("of_channels", [False, True], ids=["gated delta net", "Kimi's"])
@pytest.mark.parametrize(("key_heads", "normalize"), [(4, False), (2, True), (1, True)])
def test_delta_rules(counts: str, of_channels: bool, key_heads: int, normalize: bool, seed: int) -> None:
    rows = RecurrentRows(COUNTS[counts], seed=seed)
    args = rows.delta(key_heads, of_channels=of_channels, normalize=normalize)
    if not normalize:  # what is not of length 1 may grow without end
        args = args._replace(key=args.key / args.key.norm(dim=-1, keepdim=True))
    check(rows, args, gated_delta_rule, delta_expected(rows, args))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("sizes", [(4, 6, 8, 2, False), (12, 1, 16, 1, True), (3, 5, 7, 3, False), (3, 5, 7, 3, True)])
def test_selective_scans(counts: str, sizes: Any, seed: int) -> None:
    rows = RecurrentRows(COUNTS[counts], seed=seed)
    args = rows.scan(*sizes)
    check(rows, args, selective_scan, scan_expected(rows, args))


def test_16_bits_are_computed_in_32(seed: int) -> None:
    rows = RecurrentRows(COUNTS["mixed"], seed=seed, dtype=torch.bfloat16)
    args = rows.delta()
    check(rows, args, gated_delta_rule, delta_expected(rows, args), 1e-2)
    args = rows.scan()
    check(rows, args, selective_scan, scan_expected(rows, args), 2e-2)


@pytest.mark.parametrize("exact", ["tokens", "dt", "b"])
def test_models_turn_some_of_a_scans_states_to_32_bits_first(exact: str, seed: int) -> None:
    rows = RecurrentRows(COUNTS["mixed"], seed=seed, dtype=torch.bfloat16)
    args = rows.scan()
    args = args._replace(**{exact: getattr(args, exact).float()})
    check(rows, args, selective_scan, scan_expected(rows, args), 2e-2)


def test_decays_that_leave_nothing_give_no_nan() -> None:
    rows = RecurrentRows([130, 1])
    args = rows.delta()
    args = args._replace(decay=torch.full_like(args.decay, -300.0))
    check(rows, args, gated_delta_rule, delta_expected(rows, args))
    scanned = rows.scan()
    scanned = scanned._replace(a=torch.full_like(scanned.a, -300.0))
    check(rows, scanned, selective_scan, scan_expected(rows, scanned))


def test_a_row_in_pieces_ends_as_it_does_in_one(seed: int) -> None:
    whole, generator = RecurrentRows([40], padding=0, seed=seed), torch.Generator().manual_seed(seed)
    args = whole.delta()._replace(read=torch.tensor([-1], dtype=torch.int32))
    expected = gated_delta_rule(*args)
    ended, begin, entry, entries = args.states[int(whole.write)].clone(), 0, -1, [0, 1]
    out = []
    while begin < 40:
        end = min(40, begin + int(torch.randint(1, 9, (), generator=generator)))
        places = torch.tensor([0, end - begin]), torch.tensor([entry]), torch.tensor(entries[:1])
        tokens = (each[begin:end] for each in args[:5])
        out.append(gated_delta_rule(*tokens, args.states, *(each.int() for each in places), *args[9:]))
        entry, entries, begin = entries[0], entries[::-1], end
    torch.testing.assert_close(torch.cat(out), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(args.states[entry], ended, rtol=1e-4, atol=1e-5)


INVARIANT: dict[str, Callable[[RecurrentRows], Any]] = {
    "conv": lambda rows: rows.conv(),
    "conv without bias": lambda rows: rows.conv(bias=False, activation="none"),
    "gated delta net": lambda rows: rows.delta(2),
    "Kimi's": lambda rows: rows.delta(4, of_channels=True),
    "Mamba 1": lambda rows: rows.scan(12, 1, 16, 1, True),
    "Mamba 2": lambda rows: rows.scan(3, 5, 7, 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", INVARIANT)
def test_invariant_bits_depend_on_a_rows_tokens_alone(name: str, dtype: torch.dtype, seed: int) -> None:
    rows = RecurrentRows(COUNTS["mixed"], seed=seed, dtype=dtype)
    args = INVARIANT[name](rows)._replace(invariant=True)
    ops = {"conv": (causal_conv1d, conv_expected), "scan": (selective_scan, scan_expected)}
    kind = "conv" if name.startswith("conv") else "scan" if name.startswith("Mamba") else "delta"
    op, expected = ops.get(kind, (gated_delta_rule, delta_expected))
    check(rows, args, op, expected(rows, args), 1e-4 if dtype == torch.float32 else 2e-2)
    rows = RecurrentRows([1, 23, 70, 5], padding=0, seed=seed, dtype=dtype)
    check_pieces(rows, INVARIANT[name](rows)._replace(invariant=True), lambda own: op(*own), seed)


@pytest.mark.parametrize("name", ["conv", "delta", "scan"])
def test_they_compile_whole_and_once_for_all_shapes(name: str, seed: int) -> None:
    op = {"conv": causal_conv1d, "delta": gated_delta_rule, "scan": selective_scan}[name]
    torch._dynamo.reset()  # or what the last case compiled counts as this one's
    compiled = torch.compile(lambda *args: op(*args) * 2, fullgraph=True, dynamic=True, backend="aot_eager")
    no_guards_on_equal_sizes = torch.fx.experimental._config.patch(use_duck_shape=False)
    with torch._dynamo.config.patch(error_on_recompile=True), no_guards_on_equal_sizes:
        for counts in ([3, 5, 2], [7, 9]):
            rows = RecurrentRows(counts, seed=seed)
            args = getattr(rows, name)()
            copy = args.states.clone()
            assert torch.equal(compiled(*args), op(*args._replace(states=copy)) * 2)
            assert torch.equal(args.states, copy)


INT = torch.int32


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("conv", {"tokens": torch.zeros(3)}, r"\[T, C\] and \[C, W\]"),
        ("conv", {"weight": torch.zeros(5, 4)}, r"weight must be \[C, W\], here \(6, 4\); got \(5, 4\)"),
        ("conv", {"states": torch.zeros(3, 6, 3)}, r"states must be \[E, C, W\], here \(3, 6, 4\)"),
        ("conv", {"states": torch.zeros(3, 4, 6).mT}, "states must be contiguous"),
        ("conv", {"states": torch.zeros(3, 6, 4).half()}, r"states must be torch\.float32, as tokens"),
        ("conv", {"bias": torch.zeros(5)}, r"bias must be \[C\]"),
        ("conv", {"activation": "gelu"}, "activation must be one of none, silu; got 'gelu'"),
        ("conv", {"token_rows": torch.zeros(9)}, "token_rows must be int32"),
        ("delta", {"value": torch.zeros(9, 3, 12)}, "H a multiple of K"),
        ("delta", {"key": torch.zeros(9, 2, 9)}, r"key must be \[T, K, D\]"),
        ("delta", {"decay": torch.zeros(9, 4, 3)}, r"decay must be \[T, H\] or \[T, H, D\], here \(9, 4, 8\)"),
        ("delta", {"beta": torch.zeros(9, 2)}, r"beta must be \[T, H\]"),
        ("delta", {"states": torch.zeros(4, 4, 8, 12).half()}, "states must be float32"),
        ("delta", {"value": torch.zeros(9, 4, 12).half()}, r"value must be torch\.float32; got"),
        ("delta", {"decay": torch.zeros(9, 4).half()}, r"decay must be torch\.float32 or float32; got torch\.float16"),
        ("scan", {"b": torch.zeros(9, 3, 8)}, "H a multiple of G"),
        ("scan", {"c": torch.zeros(9, 2, 7)}, r"c must be \[T, G, N\]"),
        ("scan", {"a": torch.zeros(4, 7)}, r"a must be \[H\] or \[H, N\]"),
        ("scan", {"dt": torch.zeros(8, 4)}, r"dt must be \[T, H\]"),
        ("scan", {"states": torch.zeros(4, 4, 6, 7)}, r"states must be \[E, H, P, N\]"),
        ("scan", {"read": torch.zeros(3, dtype=INT)}, r"qo_indptr, read and write must be \[B \+ 1\], \[B\] and \[B\]"),
        ("scan", {"write": torch.zeros(2)}, "write must be int32"),
    ],
)
def test_wrong_arguments_raise(name: str, change: dict[str, Any], message: str) -> None:
    op = {"conv": causal_conv1d, "delta": gated_delta_rule, "scan": selective_scan}[name]
    args = getattr(RecurrentRows([3, 4]), name)()
    before = args.states.clone()
    with pytest.raises(ValueError, match=message):
        op(*args._replace(**change))
    assert torch.equal(args.states, before)
