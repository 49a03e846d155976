"""The host's work in a warm call, counted: of short texts and small models it is most of the time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import pytest
import torch

import compiled_llm
from compiled_llm import Engine, SamplingParams, WrapConfig
from compiled_llm.compilation import programs
from compiled_llm.compilation.bounded import Bounded
from compiled_llm.compilation.tracing import outline
from compiled_llm.execution.threads import interrupts
from compiled_llm_ops.sampling import launches
from support.execution.stand_in_cuda_graphs import OPTIONS, StandIn, let_a_cpu_capture
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


# ---- the first token of a captured prefill


class Calls:
    """Counts the calls of our own functions in threads that begin meanwhile, too, but for those in programs."""

    def __init__(self) -> None:
        self.count = 0
        self._inside: set[int] = set()

    def __enter__(self) -> Calls:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        code, here = frame.f_code, threading.get_ident()
        if code is StandIn.launch.__code__ and event in ("call", "return"):  # a CUDA graph calls none
            self._inside ^= {here}
        elif event == "call" and here not in self._inside and code.co_filename.startswith(OURS):
            self.count += 1

    def of(self, call: Callable[[], object]) -> float:
        """Return how many most of ten further calls make."""
        counts = []
        for _ in range(10):
            before = self.count
            call()
            counts.append(self.count - before)
        return median(counts)


OURS = str(Path(compiled_llm.__file__).parent)


def captured(monkeypatch: pytest.MonkeyPatch, layers: int) -> Any:
    let_a_cpu_capture(monkeypatch)
    monkeypatch.setattr(WrapConfig, "graph_budget", property(lambda self: (None, None)))
    return compiled_llm.wrap(tiny_qwen3(num_hidden_layers=layers, eos_token_id=None), **{**OPTIONS, "mode": "eager"})


def of_generate(model: Any) -> float:
    text = torch.randint(3, 128, (1, 9))

    def generate() -> None:
        model.generate(text, do_sample=False, max_new_tokens=1)

    for _ in range(5):
        generate()
    with Calls() as calls:
        return calls.of(generate)


def of_an_engine(model: Any) -> float:
    texts = iter(torch.randint(3, 128, (20, 9)).tolist())  # none is cached
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    with Calls() as calls, Engine(model) as engine:

        def submit() -> None:
            engine.submit(next(texts), params).result(60)

        for _ in range(5):
            submit()
        return calls.of(submit)


@pytest.mark.parametrize(("of", "most"), [(of_generate, 800), (of_an_engine, 930)], ids=["generate", "engine"])
def test_a_first_token_calls_few_functions_and_more_layers_add_none(
    of: Callable[[Any], float], most: int, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Or one: a layer's place in the cache that HuggingFace's loop is given."""
    few, many = (of(captured(monkeypatch, layers)) for layers in (2, 12))
    assert few <= most
    assert many - few <= 10
