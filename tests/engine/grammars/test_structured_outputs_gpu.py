"""Forms on a GPU: the host looks at each token while the device computes the next one, and the others do not wait."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.requests.structured_outputs import StructuredOutputsParams
from engine.grammars.test_structured_outputs import assert_follows, schemas
from support.engine.text_tokenizers import byte_level
from support.execution.twins import OPTIONS, small_qwen3
from support.parity import assert_account_is_empty

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.gpu

END = 1


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    options = {**OPTIONS, "prefill_tokens": 64}
    plain = small_qwen3(request.config.getoption("seed"))
    plain.generation_config.eos_token_id = END
    wrapped = compiled_llm.wrap(plain, **options)
    yield wrapped
    compiled_llm.unwrap(wrapped)
    gc.collect()


@pytest.mark.parametrize("prepared", [False, True])
def test_answers_have_their_forms_beside_others(model: PreTrainedModel, prepared: bool, seed: int) -> None:
    plain = SamplingParams(temperature=0.8, seed=seed, max_tokens=60, ignore_eos=True, logprobs=2)
    each = [plain, *(form(n) for n in range(15))] * 2
    draw = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(5, 380, (5 + 7 * n,), generator=draw).tolist() for n in range(len(each))]
    with Engine(model, tokenizer=byte_level(), max_num_seqs=24) as engine:
        if prepared:
            engine.warmup([8, 24], structured=True)
        outputs = engine.generate(prompts, each)
        assert engine.stats().preemptions == 0
    for params, output in zip(each, outputs, strict=True):
        assert output.error is None
        if params.structured_outputs is None:
            assert len(output.token_ids) == 60
            continue
        assert output.finish_reason == "stop", output.text
        schema = params.structured_outputs.json
        if isinstance(schema, str):
            assert_follows(json.loads(schema), json.loads(output.text or ""))
        else:
            assert re.fullmatch("[a-f]{4,9}!", output.text or "")
        if params.logprobs is not None:
            found = output.outputs[0].logprobs
            assert found is not None
            assert len(found) == len(output.token_ids)
    assert_account_is_empty(model)


def form(number: int) -> SamplingParams:
    """Of several kinds, beside several settings."""
    beside = [{}, {"logprobs": 3}, {"presence_penalty": 1.0}, {"temperature": 0.0}, {"top_k": 20, "top_p": 0.9}]
    asked = (
        StructuredOutputsParams(regex="[a-f]{4,9}!")
        if number % 3 == 0
        else StructuredOutputsParams(json=schemas()[4 * number], disable_any_whitespace=True)
    )
    return SamplingParams(
        **{"temperature": 1.0, "seed": number, "max_tokens": 300, "structured_outputs": asked, **beside[number % 5]}
    )


def test_processors_change_logits_of_their_request_alone(model: PreTrainedModel) -> None:
    def counting(answer: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert logits.is_cuda
        logits = torch.full_like(logits, -torch.inf)
        logits[50 + len(answer)] = 0
        return logits

    plain = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    own = SamplingParams(max_tokens=20, logits_processors=[counting])
    with Engine(model, tokenizer=byte_level()) as engine:
        first, second = engine.generate([[5, 6], [7, 8, 9]], [own, plain])
    assert first.token_ids == list(range(50, 70))
    assert len(second.token_ids) == 20
    assert second.token_ids != first.token_ids
