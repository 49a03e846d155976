"""Whoever watches a step is one class: it needs no change of what is watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_llm
from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.execution.batch import StepOutput, Tap, TokenSpan
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.tiny_models import tiny_qwen3

OPTIONS: dict[str, Any] = {"page_size": 4, "kv_memory": "400 tokens", "max_batch_size": 4, "progress": False}
OVERRIDES: dict[str, Any] = {"eos_token_id": None, "num_hidden_layers": 1}
PROMPTS, STEPS = ([5, 9, 3, 7, 11], [44, 2, 6]), 6


class Entropy(Tap):
    """The entropy of each token's distribution, on the device."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def sampled(self, step: StepOutput) -> None:
        assert step.logits is not None
        self.found.append(torch.distributions.Categorical(logits=step.logits.float()).entropy())


class Norms(Tap):
    """The norm of each token's last hidden state."""

    wants = ("hidden_states",)

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def launched(self, spans: Sequence[TokenSpan], outputs: StepOutputs, later: int = 0) -> None:
        self.found.append(outputs.emitted[1][: sum(span.size for span in spans)].norm(dim=1))


@pytest.fixture(params=["uncompiled", "captured"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Tap], Any]:
    """Let a tap watch two rows; returns their model."""
    if request.param == "captured":
        let_a_cpu_capture(monkeypatch)

    def watch(tap: Tap) -> Any:
        model = compiled_llm.wrap(tiny_qwen3(**OVERRIDES), mode="eager", **OPTIONS)
        loop = model.compiled.generate_loop()
        for prompt in PROMPTS:
            loop.admit(prompt, STEPS)
        with loop.watched([tap]):
            for _ in range(STEPS):
                loop.step()
        loop.close()
        return model

    return watch


def expected(row: int) -> Any:
    plain, prompt = tiny_qwen3(**OVERRIDES), torch.tensor([PROMPTS[row]])
    options: dict[str, Any] = {"max_new_tokens": STEPS, "do_sample": False, "return_dict_in_generate": True}
    return plain.generate(prompt, output_logits=True, output_hidden_states=True, **options)


def test_a_tap_that_records_entropy_sees_each_token(run: Callable[[Tap], Any]) -> None:
    tap = Entropy()
    run(tap)
    assert [len(own) for own in tap.found] == [len(PROMPTS)] * STEPS
    for row in range(len(PROMPTS)):
        wanted = torch.distributions.Categorical(logits=torch.cat(expected(row).logits)).entropy()
        torch.testing.assert_close(torch.stack(tap.found)[:, row], wanted, rtol=1e-4, atol=1e-4)


def test_outputs_that_a_tap_wants_come_from_steps_of_their_own(run: Callable[[Tap], Any]) -> None:
    tap = Norms()
    model = run(tap)
    assert [len(own) for own in tap.found] == [sum(map(len, PROMPTS)), *[len(PROMPTS)] * (STEPS - 1)]
    for row in range(len(PROMPTS)):
        wanted = torch.stack([step[-1][0, -1].norm() for step in expected(row).hidden_states[1:]])
        torch.testing.assert_close(torch.stack(tap.found[1:])[:, row], wanted, rtol=1e-4, atol=1e-4)
    keys = model.compiled.model_runner().graph_manager.table.entries
    assert {key.wants for key in keys if key.phase == "decode"} == {tap.wants}


def test_a_tap_that_wants_nothing_has_the_steps_that_there_are(run: Callable[[Tap], Any]) -> None:
    model = run(Entropy())
    assert not any(key.wants for key in model.compiled.model_runner().graph_manager.table.entries)
