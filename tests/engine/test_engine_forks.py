"""In a forked process an engine does not exist: it refuses and ends there, and goes on in the process that has it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.engine.engine import Engine
from compiled_llm.model import checks
from compiled_llm.requests.sampling_params import SamplingParams
from support.forking import forked
from support.parity import assert_account_is_empty
from support.tiny_models import tiny_qwen3

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here"),
]

PROMPT = list(range(3, 23))
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
OTHER_PROCESS = "belongs to the process that made it; make one in this process"


@pytest.fixture
def model() -> PreTrainedModel:
    options: dict[str, Any] = {"page_size": 4, "kv_memory": "500 tokens", "max_batch_size": 4, "progress": False}
    return compiled_llm.wrap(tiny_qwen3(eos_token_id=None, num_hidden_layers=1), mode="eager", **options)


@pytest.fixture
def engine(model: PreTrainedModel) -> Iterator[Engine]:
    with Engine(model) as engine:
        yield engine
    assert_account_is_empty(model)


def alone(model: PreTrainedModel, new: int) -> list[int]:
    ids = torch.tensor([PROMPT])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return out[0, len(PROMPT) :].tolist()


def check_child(model: PreTrainedModel, engine: Engine, handle: Any, expected: list[int]) -> None:
    with pytest.raises(RuntimeError, match="in the process that this one was forked from"):
        handle.result(timeout=5)
    for call in (lambda: engine.submit(PROMPT), lambda: engine.generate(PROMPT), engine.warmup, engine.describe):
        with pytest.raises(RuntimeError, match=OTHER_PROCESS):
            call()
    with pytest.raises(RuntimeError, match=OTHER_PROCESS), engine.paused():
        pass
    handle.cancel()
    engine.stats()
    engine.close()
    assert alone(model, 200) == expected  # nothing holds pages here
    with Engine(model) as own:
        assert own.submit(PROMPT, LONG).result(timeout=20).token_ids == expected


def test_an_engine_belongs_to_its_process(model, engine):
    expected = alone(model, 200)
    handle = engine.submit(PROMPT, LONG)
    next(iter(handle))
    forked(lambda: check_child(model, engine, handle, expected))  # while its thread runs a step, mostly
    assert handle.result(timeout=60).token_ids == expected
    handle = engine.submit(PROMPT, LONG)
    next(iter(handle))
    with engine.paused(weights_stay=True):
        forked(lambda: check_child(model, engine, handle, expected))  # while requests have pages
    assert handle.result(timeout=60).token_ids == expected


def test_a_forked_process_cannot_use_cuda(model, monkeypatch):
    """As if the model were there, and CUDA had been used."""
    expected = alone(model, 5)

    def is_refused() -> None:
        for call in (lambda: alone(model, 5), lambda: model(torch.tensor([PROMPT])), lambda: Engine(model).submit([5])):
            with pytest.raises(RuntimeError, match="start processes by multiprocessing"):
                call()

    with monkeypatch.context() as patch:
        patch.setattr(model.compiled.device_model(), "device", torch.device("cuda"))
        patch.setattr(type(model), "device", torch.device("cuda"))
        patch.setattr(checks, "cuda_is_lost", lambda: True)
        forked(is_refused)
    assert alone(model, 5) == expected
