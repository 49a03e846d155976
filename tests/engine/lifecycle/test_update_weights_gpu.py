"""New weights on a GPU: what was fused, compiled and captured goes on with them, and nothing is made again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams
from support.execution.twins import OPTIONS, small_qwen3

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 6, 7, 8] * 9, [9, 10, 11] * 30, [3, 4]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def wrapped(seed: int) -> PreTrainedModel:
    return compiled_llm.wrap(small_qwen3(seed), **OPTIONS)


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    model = wrapped(0)
    yield model
    compiled_llm.unwrap(model)
    gc.collect()


def answers(engine: Engine) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("asleep", ["awake", "asleep", "weights in host memory"])
def test_tokens_are_those_of_a_model_that_was_loaded_with_them(
    model: PreTrainedModel, asleep: str, tmp_path: Path
) -> None:
    other = wrapped(1)
    with Engine(other, max_num_seqs=4) as engine:
        expected = answers(engine)
    compiled_llm.unwrap(other).save_pretrained(tmp_path)
    del other
    with Engine(model, max_num_seqs=4) as engine:
        engine.warmup([4])
        old = answers(engine)
        assert old != expected
        before = model.compiled.stats()
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        taken = torch.cuda.memory_allocated()
        if asleep != "awake":
            engine.sleep(weights=asleep != "asleep")
        engine.update_weights(tmp_path)
        if asleep == "awake":
            assert torch.cuda.memory_allocated() <= taken
            assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
        else:
            engine.wake()
        assert answers(engine) == expected
        after = model.compiled.stats()
        assert (after.graphs, after.recompiles, after.cuda_graphs) == (before.graphs, 0, before.cuda_graphs)
        if asleep == "awake":
            assert model.compiled.recaptures() == (0, [])


def test_requests_that_run_end_with_the_old_weights(model: PreTrainedModel, tmp_path: Path) -> None:
    new = small_qwen3(1)
    new.save_pretrained(tmp_path)
    long = SamplingParams(temperature=0.0, max_tokens=600, ignore_eos=True)
    with Engine(model, max_num_seqs=4) as engine:
        (expected,) = engine.generate(PROMPTS[0], long)
        engine.reset_prefix_cache()
        handle = engine.submit(PROMPTS[0], long)
        next(iter(handle))
        engine.update_weights(tmp_path)
        assert handle.done
        assert handle.result().outputs[0].token_ids == expected.outputs[0].token_ids
        (changed,) = engine.generate(PROMPTS[0], long)
        assert changed.outputs[0].token_ids != expected.outputs[0].token_ids
