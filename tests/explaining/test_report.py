"""What a report says of itself, and how it reads."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
import torch

import compiled_llm
from compiled_llm.compilation.program_list import DECODE_MANY, DECODE_ONE, PREFILL
from compiled_llm.explaining.findings import Finding
from compiled_llm.explaining.profile.kernels import Spent
from compiled_llm.explaining.profile.timings import Timing
from compiled_llm.explaining.report import Report
from compiled_llm.explaining.subject import head_rows
from compiled_llm.model.places import NOWHERE, Place
from support.tiny_models import tiny_qwen3

CAUSE = Finding(
    "graph break", Place(__file__, 1, "forward"), "Text is written.", "Delete it.", (PREFILL, DECODE_ONE, DECODE_MANY)
)
CONSEQUENCE = Finding(
    "graph break", Place("/lib/torch/noise.py", 7, "next"), "Add tp_iternext_impl.", "Report it.", follows=True
)


@pytest.fixture
def model() -> Any:
    model = tiny_qwen3()
    model.name_or_path = "/models/small"
    return model


def words(report: Report) -> str:
    """The report as text, on one line."""
    return " ".join(str(report).split())


def test_a_report_says_of_what_with_what_and_when_it_was_made(model):
    report = Report.collect(model, [])
    text = words(report)
    said = [
        "Qwen3ForCausalLM (models/small) on cpu",
        f"{sum(parameter.numel() for parameter in model.parameters()) / 1000:.1f} K parameters, float32",
        "/models/small",
        "compiled_llm",
        compiled_llm.__version__,
        f"torch {torch.__version__}, transformers {version('transformers')}, ",
    ]
    assert [what for what in said if what not in text] == []
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d [+-]\d{4}", report.data["date"])
    assert report.data["date"] in text


def test_a_model_from_nowhere_has_no_name(model):
    model.name_or_path = ""
    assert "from" not in head_rows(Report.collect(model, []).data)["weights"]


def test_programs_whose_names_have_commas_are_told_apart(model):
    said = words(Report.collect(model, [CAUSE]))
    assert "graph break in prefill; decode, batch 1; decode, larger batches" in said


def test_what_only_follows_is_counted_and_named(model):
    text = words(Report.collect(model, [CAUSE, CONSEQUENCE]))
    assert "1 x graph break" in text
    assert "1 more graph break, seen only after the above" in text
    assert "noise.py:7 in next" in text
    for noise in (CONSEQUENCE.reason, CONSEQUENCE.advice):
        assert noise not in text


@pytest.mark.parametrize(
    ("kind", "more"), [("graph break", True), ("refused", True), ("error", True), ("slow path", False)]
)
def test_where_one_fault_hides_others_it_is_said(kind, more, model):
    text = words(Report.collect(model, [Finding(kind, NOWHERE, "It is.", "Change it.")]))
    assert ("More may show once this is mended" in text) == more


def test_timings_say_what_a_step_spends_most_on_and_what_to_try(model):
    spent = [Spent("matrix products", 400.0, 14.0), Spent("norms, rotary, elementwise", 50.0, 4.0)]
    decode = Timing("decode", 2, 150, "kernels", 16, 500.0, 450.0, 90.0, spent, spent)
    said = words(Report.collect(model, [], timings=[decode]))
    assert "decode, 2 rows of about 150 tokens" in said
    assert "gaps: no kernel runs 50.0 10.0% in all 18.0 500.0 100.0%" in said
    assert "Launching a step takes the host 90 us." in said
    assert "80% of 500 us goes to matrix products. Weights are read once for all rows" in said
    waits = replace(decode, busy_us=200.0)
    assert "--mode cuda-graphs" in words(Report.collect(model, [], timings=[waits]))
