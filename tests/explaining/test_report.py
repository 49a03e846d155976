"""What a report says of itself, and how it reads: as text and as a page."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import compiled_llm
from compiled_llm.compilation.program_list import DECODE_MANY, DECODE_ONE, PREFILL
from compiled_llm.explaining.findings import Finding
from compiled_llm.explaining.report import Report
from compiled_llm.explaining.subject import head_rows
from compiled_llm.explaining.wording import speed_of
from compiled_llm.model.places import NOWHERE, Place
from support.html_text import HtmlText
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


def both(report: Report, path: Path) -> tuple[str, HtmlText]:
    """The report as text, on one line, and as a page."""
    return " ".join(str(report).split()), HtmlText(report.to_html(path / "report.html").read_text())


def test_a_report_says_of_what_with_what_and_when_it_was_made(model, tmp_path):
    report = Report.of(model, [])
    text, page = both(report, tmp_path)
    said = [
        "Qwen3ForCausalLM (models/small) on cpu",
        f"{sum(parameter.numel() for parameter in model.parameters()) / 1000:.1f} K parameters, float32",
        "/models/small",
        "compiled_llm",
        compiled_llm.__version__,
        f"torch {torch.__version__}, transformers {version('transformers')}, ",
    ]
    for words in said:
        assert words in text
        assert words in page.words
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d [+-]\d{4}", report.data["date"])
    assert report.data["date"] in page.words


def test_a_model_from_nowhere_has_no_name(model):
    model.name_or_path = ""
    assert "from" not in head_rows(Report.of(model, []).data)["weights"]


def test_programs_whose_names_have_commas_are_told_apart(model, tmp_path):
    for said in both(Report.of(model, [CAUSE]), tmp_path):
        words = said if isinstance(said, str) else said.words
        assert "graph break in prefill; decode, batch 1; decode, larger batches" in words


def test_what_only_follows_is_counted_named_and_folded(model, tmp_path):
    text, page = both(Report.of(model, [CAUSE, CONSEQUENCE]), tmp_path)
    assert "1 x graph break" in text
    assert "1 more graph break, seen only after the above" in text
    assert "noise.py:7 in next" in text
    for noise in (CONSEQUENCE.reason, CONSEQUENCE.advice):
        assert noise not in text + page.words
    assert CONSEQUENCE.reason in page.folded


@pytest.mark.parametrize(
    ("kind", "more"), [("graph break", True), ("refused", True), ("error", True), ("slow path", False)]
)
def test_where_one_fault_hides_others_it_is_said(kind, more, model, tmp_path):
    text, page = both(Report.of(model, [Finding(kind, NOWHERE, "It is.", "Change it.")]), tmp_path)
    assert [("More may show once this is mended" in words) for words in (text, page.words)] == [more, more]


@pytest.mark.parametrize(
    ("measured", "host_us", "said"),
    [("operators", None, "On a CPU, launching a step is running it"), ("kernels", 90.0, "takes the host 90 us")],
)
def test_the_bandwidth_is_explained(measured, host_us, said):
    words = speed_of({"read_bandwidth": 30.8e9, "measured": measured, "host_us": host_us})
    assert words.startswith("This memory was read at 30.8 GB/s at best, just before; the last column is a share of it")
    assert said in words
