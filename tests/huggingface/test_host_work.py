"""The host's work in a warm call, counted: of short texts and small models it is most of the time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import compiled_llm
from compiled_llm.compilation import programs
from compiled_llm.compilation.bounded import Bounded
from compiled_llm.compilation.tracing import outline
from compiled_llm.execution.threads import interrupts
from compiled_llm_ops.sampling import launches
from support.noting import note_calls
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.usefixtures("without_inductor")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often parts of the work were done, by name."""
    counts: dict[str, int] = dict.fromkeys(
        ("guards", "through Dynamo", "sampled by the table", "handlers of signals"), 0
    )

    def count(name: str) -> Any:
        return lambda *_, **__: counts.__setitem__(name, counts[name] + 1)

    for module in (outline, programs):
        note_calls(monkeypatch, module, "compiled_code", count("guards"))
    note_calls(monkeypatch, Bounded, "__call__", count("through Dynamo"))
    note_calls(monkeypatch, launches, "_sample_rows", count("sampled by the table"))
    note_calls(monkeypatch, interrupts, "set_handler", count("handlers of signals"))
    return counts


@torch.no_grad()
def test_a_forward_checks_guards_once_and_defers_interrupts_once(counts: dict[str, int], seed: int) -> None:
    model = compiled_llm.wrap(tiny_qwen3(num_hidden_layers=1))
    texts = torch.randint(3, 128, (4, 1, 9))
    model(texts[0], use_cache=False)
    counts |= dict.fromkeys(counts, 0)
    for text in texts[1:]:
        model(text, use_cache=False)
    assert counts["guards"] == 3
    assert counts["through Dynamo"] == 0, "it would check them again"
    assert counts["sampled by the table"] == 0, "nothing is sampled"
    assert counts["handlers of signals"] == 3 * 2, "ours, and Python's again"


@pytest.mark.whole
def test_repeated_steps_check_no_guards(counts: dict[str, int], seed: int) -> None:
    model = compiled_llm.wrap(tiny_qwen3(num_hidden_layers=1, eos_token_id=None))
    text = torch.randint(3, 128, (1, 9))
    model.generate(text, do_sample=False, max_new_tokens=2)
    few, many = counts.copy(), counts.copy()
    for found, new in ((few, 4), (many, 7)):  # on one page
        counts |= dict.fromkeys(counts, 0)
        model.generate(text, do_sample=False, max_new_tokens=new)
        found |= counts
    assert few == many
    assert many["guards"] == 2, "of the prefill, and of the decode step that is made"
    assert many["sampled by the table"] == 0
