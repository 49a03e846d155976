"""`manager.logit_processor`: HuggingFace's list of processors, which its users clear and replace, counts over ours."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList

import compiled_llm
from compiled_llm.huggingface.batch.continuous_batching import EngineManager
from support.parity import assert_account_is_empty
from support.tiny_models import tiny_qwen3

PROMPT = [5, 6, 7]
SAMPLED = {"do_sample": True, "temperature": 3.0, "top_k": 1, "max_new_tokens": 9, "eos_token_id": -1}


@pytest.fixture(scope="module")
def wrapped() -> Iterator[Any]:
    model = compiled_llm.wrap(
        tiny_qwen3(), progress=False, mode="eager", page_size=4, kv_memory="2000 tokens", max_batch_size=8
    )
    yield model
    assert_account_is_empty(model)


def managed(wrapped: Any, batching: ContinuousBatchingConfig | None = None, **options: Any) -> EngineManager:
    manager = wrapped.init_continuous_batching(GenerationConfig(**{**SAMPLED, **options}), batching)
    assert isinstance(manager, EngineManager)
    return manager


def answer(manager: EngineManager, **options: Any) -> Any:
    return list(manager.request_id_iter(manager.add_request(PROMPT, **options)))[-1]


def greedy(**options: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    return tiny_qwen3().generate(ids, max_new_tokens=9, **settings, **options)[0, 3:].tolist()


@pytest.mark.core
def test_a_cleared_list_leaves_nothing(wrapped: Any) -> None:
    """As transformers' own tests of streamed requests begin."""
    manager = managed(wrapped)
    assert isinstance(manager.logit_processor, ContinuousBatchingLogitsProcessorList)
    assert manager.logit_processor.do_processing
    manager.start()
    assert answer(manager).generated_tokens == greedy()  # of the likeliest one
    manager.logit_processor.clear()
    drawn = {tuple(answer(manager).generated_tokens) for _ in range(4)}
    assert len(drawn) == 4
    name = manager.add_request(PROMPT, max_new_tokens=3, streaming=True)
    assert [len(next(manager.request_id_iter(name)).generated_tokens) for _ in range(3)] == [1, 2, 3]
    assert len(next(manager.request_id_iter(manager.add_request(PROMPT, max_new_tokens=3))).generated_tokens) == 3
    manager.stop(block=True)


def test_a_handler_gets_outputs_after_the_list_was_cleared(wrapped: Any) -> None:
    manager = managed(wrapped)
    manager.logit_processor.clear()
    manager.start()

    async def counts() -> list[int]:
        found, ended = [], asyncio.get_running_loop().create_future()

        def take(output: Any) -> None:
            found.append(len(output.generated_tokens))
            if output.is_finished():
                ended.set_result(None)

        name = manager.add_request(PROMPT, max_new_tokens=3, streaming=True)
        manager.register_result_handler(name, take)
        await asyncio.wait_for(ended, timeout=30)
        return found

    assert asyncio.run(counts()) == [1, 2, 3]
    assert manager.output_router.output_queue.empty()
    manager.stop(block=True)


def test_another_list_counts_from_the_next_request_on(wrapped: Any) -> None:
    manager = managed(wrapped, do_sample=False)
    manager.start()
    assert answer(manager).generated_tokens == greedy()
    manager.logit_processor = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4)])
    assert answer(manager).generated_tokens == greedy(repetition_penalty=1.4) != greedy()
    manager.logit_processor = LogitsProcessorList()
    assert answer(manager).generated_tokens == greedy()
    with pytest.raises(ValueError, match="logit_processor: these run in HuggingFace's own manager alone: Odd"):
        manager.logit_processor = LogitsProcessorList([Odd()])
    assert answer(manager).generated_tokens == greedy()
    manager.stop(block=True)


class Odd(TemperatureLogitsWarper):
    """One that the graph does not have."""

    def __init__(self) -> None:
        super().__init__(2.0)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return -scores  # type: ignore[return-value]


def test_requests_bring_settings_that_the_list_has(wrapped: Any) -> None:
    """Without sampling, which transformers' test turns off in the manager's config, settings change no token."""
    manager = managed(wrapped, ContinuousBatchingConfig(per_request_processors=True), top_k=50)
    manager.start()
    drawn = {tuple(answer(manager, temperature=2.0).generated_tokens) for _ in range(4)}
    assert len(drawn) == 4
    assert answer(manager, temperature=2.0, top_k=1).generated_tokens == greedy()
    assert "Unknown logit_processor_kwargs: {'top_p'}" in answer(manager, top_p=0.5).error
    manager.generation_config.do_sample = False
    assert answer(manager, temperature=2.0, top_k=10).generated_tokens == greedy()
    manager.logit_processor = LogitsProcessorList([TopKLogitsWarper(3)])
    assert "temperature" not in manager.logit_processor.supported_keys
    manager.stop(block=True)
