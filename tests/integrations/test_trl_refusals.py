"""Trainers that an engine cannot sample for are refused before anything changes; TRL need not be here.

`tests/trainers/test_sample_with.py` has its trainers.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

import compiled_llm
from compiled_llm import Engine, SamplingParams
from compiled_llm.trl import sample_with
from support.tiny_models import tiny_qwen3


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    model = compiled_llm.wrap(tiny_qwen3(num_hidden_layers=1), mode="eager", kv_memory="1000 tokens", progress=False)
    with Engine(model) as engine:
        yield engine


class Trainer(SimpleNamespace):
    def _generate(self, prompts: list[str]) -> list[str]:
        return prompts


def trainer(model: Any, **others: Any) -> Any:
    """What is read of a trainer."""
    accelerator = SimpleNamespace(num_processes=others.pop("processes", 1), unwrap_model=lambda model: model)
    args = SimpleNamespace(use_vllm=others.pop("use_vllm", False), generation_kwargs=others.pop("settings", None))
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    asked = {"use_vllm": args.use_vllm, "vllm_mode": "server", "max_completion_length": 8, "eos_token_ids": [1]}
    given = {"model": model, "accelerator": accelerator, "args": args, **plain, **asked, **others}
    return Trainer(**given, vllm_importance_sampling_correction=True)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"use_vllm": True}, "use_vllm=True: vLLM samples for this trainer"),
        ({"processes": 2}, "trains in 2 processes"),
        ({"temperature": 0.7}, r"temperature=0\.7: the trainer corrects by .*logprobs_mode='processed_logprobs'"),
        ({"top_p": 0.9, "top_k": 5}, r"top_p=0\.9, top_k=5: the trainer corrects"),
        ({"settings": {"max_new_tokens": 3}}, "max_new_tokens"),
    ],
    ids=str,
)
def test_a_trainer_is_refused(engine: Engine, others: dict[str, Any], said: str) -> None:
    refused = trainer(engine.model, **others)
    before = dict(vars(refused))
    with pytest.raises((ValueError, TypeError), match=said):
        sample_with(engine, refused)
    assert vars(refused) == before


def test_another_model_or_engine_or_trainer_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="answers by another Qwen3ForCausalLM than the one that is trained"):
        sample_with(engine, trainer(tiny_qwen3(num_hidden_layers=1)))
    with pytest.raises(TypeError, match="must be an Engine of the model that is trained"):
        sample_with(SimpleNamespace(), trainer(engine.model))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"trainer=SimpleNamespace: has no use_vllm, .* TRL 1\.16 sample"):
        sample_with(engine, SimpleNamespace())


def test_an_engine_may_be_given_again_and_sleeps_between_rollouts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compiled_llm.compat.training.trl.without_checkpointing", nullcontext)  # which is TRL's
    taken = trainer(engine.model)
    for _ in range(2):
        sample_with(engine, taken, sleep=True)
    assert (taken.use_vllm, taken.vllm_mode, taken._last_loaded_step) == (True, "colocate", -1)
    assert taken.vllm_generation.llm.llm_engine.model_config.max_model_len == engine.describe().max_tokens
    assert taken._generate(["a"]) == ["a"]
    assert engine.asleep
    engine.wake()


def test_tokens_of_rollouts_leave_nothing_for_the_garbage_collector(engine: Engine) -> None:
    """TRL takes lists of one for each token; as lists that stay, those of a rollout cost it half a second."""
    few, many = (tracked_after(engine, tokens) for tokens in (4, 64))
    assert many - few < 60


def tracked_after(engine: Engine, tokens: int) -> int:
    """Return how many objects more the collector looks at while a rollout's answer is held, which is as it should be.

    Steps are held with answers, and with each what it has sampled for all rows.
    """
    taken = trainer(engine.model, max_completion_length=tokens, eos_token_ids=[], settings={"ignore_eos": True})
    sample_with(engine, taken)
    gc.collect()
    gc.disable()  # or it takes part of them out of the count
    try:
        before = len(gc.get_objects())
        held = taken.vllm_generation.generate(prompts=[[5, 6]] * 8, images=None, num_generations=8)
        found = len(gc.get_objects()) - before
    finally:
        gc.enable()
    _, answers, values, ids = held
    assert [[token for (token,) in each] for each in ids] == answers
    assert [len(each) for each in values] == [tokens] * 8
    prompt = [5, 6]
    (output,) = engine.generate([prompt + answers[0][:-1]], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    scored = [next(iter(entries.values())).logprob for entries in output.prompt_logprobs[len(prompt) :] if entries]
    assert [value for (value,) in values[0][:-1]] == pytest.approx(scored, abs=1e-4)
    return found


def test_images_without_a_processor_are_refused_with_the_way_that_works(engine: Engine) -> None:
    taken = trainer(engine.model)
    sample_with(engine, taken)
    with pytest.raises(ValueError, match=r"make it Engine\(model, processor=...\) with the trainer's processing_class"):
        taken.vllm_generation.generate(prompts=[[5]], images=[[object()]], num_generations=1)
