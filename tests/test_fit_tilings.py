"""`tools/fit_tilings.py`: its cases, its table and its command line, all without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

import compiled_llm
from support.imports import CHECKOUT, module_at
from support.tiny_models import tiny_qwen3


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CHECKOUT / "tools"))  # as for a script, which Python is given by its path
        yield module_at(CHECKOUT / "tools" / "fit_tilings.py")


RULES = ["linear", "normed", "chained", "attention", "cascade", "cascade-rule", "splitting", "captured"]
RULES += ["invariant-linear", "invariant-attention", "packed-attention", "packed", "drafts"]
RULES += ["latent-decode", "latent-prefill", "latent-ragged", "latent-backend", "block-sparse", "cpu-linear"]


def made_of(times: dict[str, float], chosen: str, tool: ModuleType) -> Any:
    """A case whose candidates are their own times."""
    prepare: Callable[[], Callable[[Any], float]] = lambda: float  # noqa: E731
    return tool.Case("linear", f"best {min(times.values())}", times, chosen, prepare)


def test_all_rules_are_swept(tool: ModuleType) -> None:
    assert list(tool.SWEEPS) == RULES


@pytest.mark.parametrize("rule", RULES)
def test_cases_have_the_rules_choice_among_others(tool: ModuleType, rule: str) -> None:
    cases = {quick: list(tool.SWEEPS[rule](tool.Machine(), quick)) for quick in (False, True)}
    assert len(cases[False]) > len(cases[True]) > 1
    for case in cases[False]:
        assert case.rule == rule
        assert case.chosen in case.candidates
    assert any(len(case.candidates) > 1 for case in cases[False])
    assert len({case.name for case in cases[False]}) == len(cases[False])


def test_packed_tilings_of_16_bits_are_measured_in_four_minutes(tool: ModuleType) -> None:
    """Of a compiled kernel all cases of its heads make use. At 3 seconds for each, and half a second for a time."""
    cases = [case for case in tool.packed_cases(tool.Machine(), True) if "bfloat16" in case.name]
    kernels = {(case.name.split(",")[0], name) for case in cases for name in case.candidates}
    assert 3 * len(kernels) + 0.5 * sum(len(case.candidates) for case in cases) < 240
    assert {case.name.split(",")[0] for case in cases} == {"D=64", "D=128", "D=256", "D=512"}


def test_other_machines_get_other_choices(tool: ModuleType) -> None:
    half = tool.Machine(processors=66, shared_memory=100 * 1024)
    for rule in ("linear", "attention", "latent-decode"):
        chosen = [[case.chosen for case in tool.SWEEPS[rule](machine, True)] for machine in (tool.Machine(), half)]
        assert chosen[0] != chosen[1], rule


def test_a_fit_says_how_much_slower_the_rule_is(tool: ModuleType) -> None:
    fit = tool.measure(made_of({"a": 10.0, "b": 12.5}, "b", tool))
    assert (fit.best, fit.chosen, fit.slower) == ("a", "b", 0.25)
    assert tool.measure(made_of({"a": 10.0, "b": 12.5}, "a", tool)).slower == 0


def test_the_table_counts_what_is_close_and_has_the_worst_first(tool: ModuleType) -> None:
    times = [({"a": 10.0, "b": 10.2}, "b"), ({"a": 20.0, "b": 30.0}, "b"), ({"a": 30.0, "b": 30.0}, "a")]
    fits = [tool.measure(made_of(*given, tool)) for given in times]
    console = Console(width=120, record=True)
    console.print(tool.table_of("linear", fits))
    lines = console.export_text().splitlines()
    assert "linear: 2 of 3 choices within 3% of the best" in lines[0]
    rows = [line for line in lines if "best" in line][2:]
    assert "50.0%" in rows[0]
    assert "2.0%" in rows[1]


def test_times_are_written(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [made_of({"left": 2.0, "right": 1.0}, "left", tool)._replace(rule="cpu-linear")]
    monkeypatch.setitem(tool.SWEEPS, "cpu-linear", lambda machine, quick: cases)
    path = tmp_path / "fit.json"
    tool.main(["--only", "cpu-linear", "--json", str(path)])
    (fit,) = json.loads(path.read_text())["fits"]
    assert (fit["slower"], fit["times"]) == (1.0, {"left": 2.0, "right": 1.0})


def test_the_cpus_rule_is_measured_without_a_gpu(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fitting.cpu_linear.by_the_clock", lambda run, synchronize, seconds: float(run().numel()))
    case = next(iter(tool.cpu_linear_cases(tool.Machine(), True)))
    assert set(tool.measure(case).times) >= {"rows_left", "weight_left", case.chosen}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--only", "linear,nosuch"], "nosuch: not among linear"), (["--only", "linear"], "no CUDA device")],
)
def test_what_cannot_be_measured_is_refused(
    tool: ModuleType, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        tool.main(arguments)
    assert message in capsys.readouterr().err


def test_steps_that_draft_are_measured_without_a_gpu(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny model; the constants are what a step of q tokens takes, whatever share of drafts is right."""
    from fitting import drafts

    monkeypatch.setattr(drafts, "WARM", 2)
    monkeypatch.setattr(drafts, "STEPS", 3)
    model = compiled_llm.wrap(tiny_qwen3(eos_token_id=None), mode="eager", progress=False, kv_memory="1024 tokens")
    monkeypatch.setattr(drafts, "step_time", lambda name, rows, size: drafts.steps_of(model, rows, size))
    case = next(drafts.draft_cases(tool.Machine(), True))
    assert all(time > 0 for time in tool.measure(case).times.values())
    monkeypatch.setattr(drafts, "step_time", lambda name, rows, size: 900.0 + 100 * size)
    fits = [tool.measure(case) for case in drafts.draft_cases(tool.Machine(), False)]
    expected = {rows: {2: 1.1, 4: 1.3, 8: 1.7} for rows in drafts.ROWS}
    found: dict[str, Any] = {}
    exec(drafts.constants_of(fits).replace(": _Costs", ""), found)
    assert found["_SMALL"] == found["_LARGE"] == expected
