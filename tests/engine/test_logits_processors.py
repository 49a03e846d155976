"""Logits processors of the user's own, each for its request alone."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from compiled_llm.requests.sampling_params import SamplingParams
from support.engine.tiny_engines import tiny, wrapped
from support.parity import alone

pytestmark = pytest.mark.usefixtures("one_thread", "reading")

VOCABULARY = 128


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return tiny(eos_token_id=2)


@pytest.fixture
def model() -> PreTrainedModel:
    return wrapped(plain=tiny(eos_token_id=2))


class Rotating(LogitsProcessor):
    """Looks at all tokens so far, as HuggingFace gives them."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        return scores.roll(int(input_ids.sum()) % 7, dims=-1) * 1.5 + 0.1


def rotating(prompt: list[int], answer: list[int], logits: Tensor) -> Tensor:
    assert logits.dtype == torch.float32
    return Rotating()(torch.tensor([prompt + answer]), logits[None])[0]  # type: ignore[no-any-return]


def test_tokens_equal_huggingface_with_the_same_processor(plain, engine, seed):
    draw = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, VOCABULARY, (length,), generator=draw).tolist() for length in (4, 17, 1, 30)]
    expected = [alone(plain, prompt, 20, logits_processor=LogitsProcessorList([Rotating()])) for prompt in prompts]
    others = [alone(plain, prompt, 20) for prompt in prompts]
    own, none = (SamplingParams(temperature=0, max_tokens=20, logits_processors=each) for each in ([rotating], None))
    outputs = engine.generate([*prompts, *prompts], [own] * 4 + [none] * 4)
    assert [output.token_ids for output in outputs] == expected + others
    assert expected != others


def only(token: int) -> Any:
    def processor(answer: list[int], logits: Tensor) -> Tensor:
        logits.fill_(-torch.inf)
        logits[token + len(answer)] = 0
        return logits

    return processor


def test_objects_that_cannot_be_hashed_and_functions_of_c(engine):
    class Unhashable(list[int]):
        def __call__(self, answer: list[int], logits: Tensor) -> Tensor:
            return only(50)(answer, logits)  # type: ignore[no-any-return]

    (output,) = engine.generate([5], SamplingParams(max_tokens=3, logits_processors=[Unhashable()]))
    assert output.token_ids == [50, 51, 52]
    (output,) = engine.generate([5], SamplingParams(max_tokens=3, logits_processors=[torch.roll]))
    assert "logits_processors: roll has failed: TypeError" in str(output.error)


def test_they_come_first_and_one_after_the_other(engine):
    def doubled(answer: list[int], logits: Tensor) -> Tensor:
        return logits.roll(1)

    params = SamplingParams(seed=1, max_tokens=4, logits_processors=[only(50), doubled], n=2, logprobs=1)
    for answer in engine.generate([5], params)[0].outputs:
        assert answer.token_ids == [51, 52, 53, 54]
        assert answer.logprobs is not None
        assert all(
            -20 < entries[token].logprob < 0 for token, entries in zip(answer.token_ids, answer.logprobs, strict=True)
        )
    barred = SamplingParams(max_tokens=4, logits_processors=[only(50)], allowed_token_ids=[7])
    assert "no token can be drawn after 0 new ones" in str(engine.generate([5], barred)[0].error)


def failing(answer: list[int], logits: Tensor) -> Tensor:
    if len(answer) == 3:
        raise KeyError("gone")
    return logits


def short(answer: list[int], logits: Tensor) -> Tensor:
    return logits[:5]


def nothing(answer: list[int], logits: Tensor) -> None:
    logits.zero_()


def sparse(answer: list[int], logits: Tensor) -> Tensor:
    return logits.to_sparse()


def nan(answer: list[int], logits: Tensor) -> Tensor:
    return logits * torch.nan


WRONG = [
    (failing, "failing has failed: KeyError: 'gone'"),
    (short, "short has returned [5], and it must return logits [128]"),
    (nothing, "nothing has returned NoneType, and it must return logits [128]"),
    (sparse, "sparse has returned a tensor of layout torch.sparse_coo"),
    (nan, "no token can be drawn after 0 new ones, because what they return is NaN"),
]


@pytest.mark.drawn
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("processor", "message"), WRONG, ids=lambda value: getattr(value, "__name__", ""))
def test_one_that_fails_ends_its_request_alone(engine, processor, message, temperature):
    settings: dict[str, Any] = {"max_tokens": 8, "seed": 3, "temperature": temperature, "ignore_eos": True}
    (expected,) = engine.generate([9, 10], SamplingParams(**settings))
    bad, good = engine.generate(
        [[5, 6], [9, 10]], [SamplingParams(**settings, logits_processors=[processor]), SamplingParams(**settings)]
    )
    assert bad.finish_reason == "error"
    assert re.search("^logits_processors: .*" + re.escape(message), str(bad.error))
    assert len(bad.token_ids) == (3 if processor is failing else 0)
    assert good.token_ids == expected.token_ids


def test_they_are_logged_once_and_counted(engine, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            engine.generate([5], SamplingParams(max_tokens=2, logits_processors=[rotating]))
    assert engine._model.compiled.stats().slow_paths == {"processors": 3}
    (message,) = [record.getMessage() for record in caplog.records if "slower path" in record.getMessage()]
    assert "a logits processor has to see each step (rotating)" in message


@pytest.mark.parametrize("value", [5, "x", [5], [Rotating]])
def test_what_is_no_function_is_refused(value):
    with pytest.raises(ValueError, match=r"logits_processors=.* must be functions of tokens and logits"):
        SamplingParams(logits_processors=value)
