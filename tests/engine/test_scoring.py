"""Prompts that are scored and not answered: `max_tokens=0`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from compiled_llm.engine.engine import Engine
from compiled_llm.engine.logprobs import prompt_launches
from compiled_llm.execution.prefill.launches import PrefillLaunches
from compiled_llm.execution.prefill.packing import token_count
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.requests.structured_outputs import StructuredOutputsParams
from support.engine.text_tokenizers import byte_level
from support.engine.tiny_engines import wrapped
from support.parity import assert_account_is_empty
from support.tiny_models import tiny_qwen3

POSITIONS = 512
LENGTHS = [1, 2, 17, 64, 300, POSITIONS]


def tiny() -> PreTrainedModel:
    return tiny_qwen3(vocab_size=len(byte_level()), max_position_embeddings=POSITIONS, eos_token_id=2)


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return tiny()


pytestmark = pytest.mark.usefixtures("reading")


@pytest.fixture
def model() -> PreTrainedModel:
    return wrapped(3000, tiny(), prefill_tokens=64)


@pytest.fixture
def engine(model: PreTrainedModel) -> Iterator[Engine]:
    with Engine(model, tokenizer=byte_level()) as engine:
        yield engine
    assert_account_is_empty(model)


def scoring(**others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=0, **{"prompt_logprobs": 1, **others})


def prompt(length: int) -> list[int]:
    return [5 + 7 * place % 90 for place in range(length)]


def test_prompts_are_scored_and_nothing_follows(engine: Engine, plain: PreTrainedModel) -> None:
    prompts = [prompt(length) for length in LENGTHS]
    beside = engine.submit([9, 8, 7], SamplingParams(max_tokens=40, seed=1, ignore_eos=True))
    for ids, output in zip(prompts, engine.generate(prompts, scoring()), strict=True):
        assert (output.token_ids, output.text, output.finish_reason) == ([], "", "length")
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(ids)
        with torch.no_grad():
            expected = torch.log_softmax(plain(torch.tensor([ids])).logits[0].float(), dim=-1)
        for place, token in enumerate(ids[1:]):
            entry = (output.prompt_logprobs[place + 1] or {})[token]
            assert entry.logprob == pytest.approx(float(expected[place, token]), abs=2e-5)
    assert len(beside.result().token_ids) == 40
    assert engine.stats().new_tokens == 40
    assert engine.stats().finished == len(LENGTHS) + 1


def test_what_is_scored_may_be_answered_later_from_its_pages(engine: Engine) -> None:
    alone = engine.generate([prompt(63)], SamplingParams(max_tokens=6, temperature=0.0))[0]
    engine.reset_prefix_cache()
    engine.generate([prompt(63)], SamplingParams(max_tokens=0))
    again = engine.generate([prompt(63)], SamplingParams(max_tokens=6, temperature=0.0))[0]
    assert again.token_ids == alone.token_ids
    assert again.cached_tokens == 60


@pytest.mark.parametrize(
    "others",
    [
        {"n": 3},
        {"logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"stop": "a", "stop_token_ids": [7]},
        {"structured_outputs": StructuredOutputsParams(choice=["a", "b"])},
        {"logits_processors": [lambda tokens, logits: logits]},
    ],
)
def test_other_settings_change_nothing(engine: Engine, others: dict[str, Any]) -> None:
    one = engine.generate([prompt(20)], scoring())[0]
    other = engine.generate([prompt(20)], scoring(**others))[0]
    assert [list(place or {}) for place in other.prompt_logprobs or ()] == [
        list(place or {}) for place in one.prompt_logprobs or ()
    ]
    assert [answer.token_ids for answer in other.outputs] == [[]] * others.get("n", 1)
    assert {answer.finish_reason for answer in other.outputs} == {"length"}
    assert all(len(answer.logprobs or ()) == 0 for answer in other.outputs)


def test_a_prompt_that_is_too_long_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match=f"prompt: {POSITIONS + 1} tokens"):
        engine.generate([prompt(POSITIONS + 1)], scoring())
    with pytest.raises(ValueError, match=f"prompt: {POSITIONS} tokens leave no room for an answer"):
        engine.generate([prompt(POSITIONS)], SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match="min_tokens=1 must be at most max_tokens=0"):
        scoring(min_tokens=1)


def entries_of(engine: Engine, ids: list[int], **others: Any) -> list[dict[int, Any] | None]:
    (output,) = engine.generate([ids], scoring(**others))
    return list(output.prompt_logprobs or ())


@pytest.mark.parametrize("start", [0, 1, 2, 16, 17, 299, 300, 301, 400])
def test_log_probabilities_from_a_token_on_are_those_of_the_whole_prompt(engine: Engine, start: int) -> None:
    ids = prompt(300)
    whole = entries_of(engine, ids)
    for _ in range(2):  # the second time, the prefix cache has the beginning
        entries = entries_of(engine, ids, prompt_logprobs_start=start)
        assert entries[: max(1, start)] == [None] * min(max(1, start), len(ids))
        assert len(entries) == len(ids)
        for mine, theirs in zip(entries[max(1, start) :], whole[max(1, start) :], strict=True):
            assert mine is not None
            assert theirs is not None
            assert list(mine) == list(theirs)
            assert [each.logprob for each in mine.values()] == pytest.approx(
                [each.logprob for each in theirs.values()], abs=2e-5
            )


def test_texts_that_begin_alike_are_computed_once_if_their_ends_alone_are_scored(
    model: PreTrainedModel, engine: Engine
) -> None:
    """As a multiple choice asks: examples and question once, then each answer."""
    shots, answers = prompt(200), [[11, 12], [13, 14, 15], [16]]
    texts = [shots + answer for answer in answers]
    asked = scoring(prompt_logprobs_start=len(shots))
    outputs = [engine.generate([text], asked)[0] for text in texts]
    cached = [output.cached_tokens for output in outputs]
    assert cached[0] == 0
    # All full pages before the token whose logits are wanted first, the last of the examples.
    page_size = model.compiled.config.page_size
    assert set(cached[1:]) == {(len(shots) - 1) // page_size * page_size}
    assert engine.generate([texts[0]], scoring())[0].cached_tokens == 0  # nobody has scored the beginning yet
    for text, output in zip(texts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        scored = list(output.prompt_logprobs)[len(shots) :]
        assert [next(iter(place or {})) for place in scored] == text[len(shots) :]


QUESTIONS, CHOICES, SHARED, OWN = 6, 4, 100, 5


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Tokens, rows and logits of each launch of prompts from now on."""
    found: list[tuple[int, int, int]] = []

    def noted(self: PrefillLaunches, chunk: Any, exact: bool) -> Any:
        found.append((token_count(chunk.rows), len(chunk.rows), len(chunk.keep)))
        return run(self, chunk, exact)

    run = PrefillLaunches.run
    monkeypatch.setattr(PrefillLaunches, "run", noted)
    return found


@pytest.mark.parametrize("at_once", [None, 12])
def test_choices_of_all_questions_are_scored_in_one_launch(
    launches: list[tuple[int, int, int]], plain: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, at_once: int | None
) -> None:
    """Or in as few as their logits allow; a launch for each choice would read all weights as often."""
    model = wrapped(3000, tiny(), prefill_tokens=1024)
    if at_once is not None:
        monkeypatch.setattr(prompt_launches, "_LOGITS", at_once * plain.config.vocab_size)
    shared = [[number, *prompt(SHARED - 1)] for number in range(QUESTIONS)]
    own = [[number, *range(20, 19 + OWN)] for number in range(CHOICES)]
    texts = [question + choice for question in shared for choice in own]
    with Engine(model, tokenizer=byte_level()) as engine:
        outputs = engine.generate(texts, scoring(prompt_logprobs=0, prompt_logprobs_start=SHARED))
        steps = engine.stats().steps
    assert steps == 2
    scored = OWN + 1  # the last of a question says what the first of a choice follows
    shared_again = (SHARED - 1) % model.compiled.config.page_size  # the rest lies in pages that all may read
    computed = QUESTIONS * (SHARED - 1 + (CHOICES - 1) * shared_again)
    each = CHOICES * QUESTIONS if at_once is None else at_once // scored
    assert launches[0] == (computed, QUESTIONS * CHOICES, 0), "logits of questions are not computed"
    assert launches[1:] == [(each * scored, each, each * scored)] * (CHOICES * QUESTIONS // each)
    for text, output in zip(texts, outputs, strict=True):
        with torch.no_grad():
            expected = torch.log_softmax(plain(torch.tensor([text])).logits[0].float(), dim=-1)
        found = list(output.prompt_logprobs or ())[SHARED:]
        assert [(entry or {})[token].logprob for token, entry in zip(text[SHARED:], found, strict=True)] == (
            pytest.approx([float(expected[SHARED + at - 1, token]) for at, token in enumerate(text[SHARED:])], abs=2e-5)
        )


@pytest.mark.parametrize("answers", [[[11, 12], [13, 14, 15], [16]], [[], [], [9] * 40]])
def test_texts_that_begin_alike_are_scored_once(
    model: PreTrainedModel, engine: Engine, answers: list[list[int]]
) -> None:
    """As lm-eval asks a server: all of each text, whose beginning an earlier one has computed and scored."""
    shots, size = prompt(200), model.compiled.config.page_size
    texts = [shots + answer for answer in answers]
    outputs = [engine.generate([text], scoring())[0] for text in texts]
    engine.reset_prefix_cache()
    for text, output in zip(texts, outputs, strict=True):
        engine.reset_prefix_cache()
        (alone,) = engine.generate([text], scoring())
        assert alone.cached_tokens == 0
        assert len(output.prompt_logprobs or ()) == len(text)
        for mine, theirs in zip(output.prompt_logprobs or (), alone.prompt_logprobs or (), strict=True):
            assert list(mine or {}) == list(theirs or {})
            numbers, expected = ([each.logprob for each in (entry or {}).values()] for entry in (mine, theirs))
            assert numbers == pytest.approx(expected, abs=2e-5)
    assert [output.cached_tokens for output in outputs[1:]] == [(len(shots) - 1) // size * size] * 2


def test_scores_that_are_kept_serve_requests_of_fewer_likely_tokens(engine: Engine) -> None:
    ids = prompt(100)
    five = entries_of(engine, ids, prompt_logprobs=5)
    for most, is_known in ((2, True), (5, True), (7, False), (5, True), (0, True)):
        (output,) = engine.generate([[*ids, most]], scoring(prompt_logprobs=most))
        assert bool(output.cached_tokens) is is_known
        for known, entry in zip(five[1:], list(output.prompt_logprobs or ())[1:], strict=False):
            likely = [token for token, each in (known or {}).items() if each.rank <= most]
            assert {*likely} <= {*(entry or {})}
            assert len(entry or {}) <= most + 1


def test_scores_go_with_the_pages_that_they_are_of(engine: Engine) -> None:
    ids = prompt(100)
    entries_of(engine, ids)
    engine.reset_prefix_cache()
    engine.generate([ids], SamplingParams(max_tokens=0))  # pages, and nothing of them is scored
    (output,) = engine.generate([ids], scoring())
    assert (output.cached_tokens, len(output.prompt_logprobs or ())) == (0, 100)


def test_a_start_without_log_probabilities_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt_logprobs_start=3 starts nothing without prompt_logprobs"):
        SamplingParams(prompt_logprobs_start=3)
