"""Each line of the table of differences from vLLM says what the engine does."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import compiled_llm
from compiled_llm.compilation.sampling.logprobs import ScoredTokens, score_tokens
from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.steps.logprobs import logprobs_of
from compiled_llm.engine.steps.scores import Scores
from compiled_llm.requests.detokenizer import TokenDecoder
from compiled_llm.requests.outputs import Logprob
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.requests.stop_strings import StopReader
from compiled_llm.requests.structured_outputs.params import StructuredOutputsParams
from compiled_llm_ops import sample_tokens
from support.docs.pages import DOCS
from support.engine.text_tokenizers import byte_fallback
from support.ops.sampling_cases import arguments
from support.tiny_models import tiny_qwen3


@pytest.fixture(scope="module")
def engine() -> Any:
    model = tiny_qwen3(eos_token_id=None, num_hidden_layers=1)
    compiled_llm.wrap(model, mode="eager", kv_memory="200 tokens", page_size=4, progress=False)
    with Engine(model) as engine:
        yield engine


def drawn(probabilities: list[float], **settings: Any) -> set[int]:
    """The tokens that can be drawn."""
    logits = torch.tensor([probabilities]).log().expand(500, -1)
    return set(sample_tokens(*arguments(logits, torch.arange(500), [Sampling(**settings)] * 500)).tolist())


def min_p_comes_last(engine: Engine) -> None:
    """Before top-p it would leave the first two alone, and the first has more than half of their mass."""
    assert drawn([0.33, 0.27, 0.2, 0.2], top_p=0.5, min_p=0.7) == {0, 1}


def ties_are_kept(engine: Engine) -> None:
    assert drawn([0.4, 0.2, 0.2, 0.2], top_p=0.5) == {0, 1, 2, 3}


def small_temperatures_count(engine: Engine) -> None:
    nearly = torch.tensor([0.5, 0.5]).log() + torch.tensor([0.0, -1e-6])
    assert drawn(nearly.exp().tolist(), temperature=1e-6) == {0, 1}


def seeds_have_a_range(engine: Engine) -> None:
    with pytest.raises(ValueError, match="seed"):
        SamplingParams(seed=2**62)
    first, second = (engine.generate([5, 6], SamplingParams(seed=2**62 - 1))[0].token_ids for _ in range(2))
    assert first == second


def greedy_answers_are_equal(engine: Engine) -> None:
    output = engine.generate([5, 6], SamplingParams(temperature=0, n=3, max_tokens=4))[0]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 1


def a_prompt_may_be_all(engine: Engine) -> None:
    output = engine.generate([5, 6, 7], SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    assert output.token_ids == []
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 3


def pages_are_a_limit(engine: Engine) -> None:
    output = engine.generate([5, 6], SamplingParams(temperature=0, max_tokens=None))[0]
    assert len(output.token_ids) < 250


def biases_are_limited(engine: Engine) -> None:
    for bias in (dict.fromkeys(range(301), 1.0), {5: 101.0}):
        with pytest.raises(ValueError, match="logit_bias"):
            SamplingParams(logit_bias=bias)


def the_first_in_the_text_stops(engine: Engine) -> None:
    match = StopReader(["d", "b"]).take("abcd")
    assert match is not None
    assert match.string == "b"


def text_is_that_of_the_answer_alone(engine: Engine) -> None:
    tokenizer = byte_fallback()
    assert TokenDecoder(tokenizer).text([tokenizer.get_vocab()["▁fox"]], skip_special_tokens=True) == "fox"


def words_are_short(engine: Engine) -> None:
    class Letters:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [ord(letter) for letter in text.strip()]

    with Engine(engine._model, tokenizer=Letters()) as other, pytest.raises(ValueError, match="is 9 tokens"):
        other.submit([5], SamplingParams(bad_words=["abcdefghi"]))


def nothing_left_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="leave no token"):
        engine.submit([5], SamplingParams(allowed_token_ids=[9], stop_token_ids=[9], min_tokens=1))


def equally_likely_tokens_share_a_rank(engine: Engine) -> None:
    numbers = score_tokens(torch.tensor([[0.0, 1.0, 1.0, -1.0]]), torch.tensor([2]), 3).numpy()
    scores = Scores()
    scores.extend(ScoredTokens.unpacked(numbers, 1).packed(3))
    entries = logprobs_of(scores[0], token=2, most=3)
    assert {token: entry.rank for token, entry in entries.items()} == {2: 1, 1: 1, 0: 3}
    assert Logprob._fields == ("logprob", "rank")


def unfollowed_schemas_are_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="has multipleOf at #, which grammars do not follow"):
        StructuredOutputsParams(json={"type": "integer", "multipleOf": 3})
    for elsewhere in ("https://example.org/schema.json", "other.json", "other.json#/$defs/a"):
        with pytest.raises(
            ValueError, match=r"has \$ref to .*, outside of the schema, at #/items, which grammars do not"
        ):
            StructuredOutputsParams(json={"type": "array", "items": {"$ref": elsewhere}})
    with pytest.raises(ValueError, match="ignore_eos=True contradicts the form"):
        SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True), ignore_eos=True)


def forms_that_are_complete_end(engine: Engine) -> None:
    pytest.importorskip("xgrammar")
    form = StructuredOutputsParams(regex="fox")
    with Engine(engine._model, tokenizer=byte_fallback()) as other:
        output = other.generate([5], SamplingParams(structured_outputs=form, min_tokens=9, stop_token_ids=[2]))[0]
    assert output.finish_reason == "stop"
    assert len(output.token_ids) < 9


def each_request_has_its_own(engine: Engine) -> None:
    def five(answer: list[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(len(logits)) == 5, 0, -torch.inf)

    params = [SamplingParams(max_tokens=2, seed=1, logits_processors=each) for each in ([five], None)]
    first, second = (output.token_ids for output in engine.generate([[7], [7]], params))
    assert first == [5, 5] != second


DIFFERENCES: dict[str, Callable[[Engine], None]] = {
    "min_p": min_p_comes_last,
    "top_p": ties_are_kept,
    "temperature": small_temperatures_count,
    "seed": seeds_have_a_range,
    "n": greedy_answers_are_equal,
    "max_tokens=0": a_prompt_may_be_all,
    "max_tokens=None": pages_are_a_limit,
    "logit_bias": biases_are_limited,
    "stop": the_first_in_the_text_stops,
    "text": text_is_that_of_the_answer_alone,
    "bad_words": words_are_short,
    "allowed_token_ids": nothing_left_is_refused,
    "structured_outputs": unfollowed_schemas_are_refused,
    "min_tokens": forms_that_are_complete_end,
    "logits_processors": each_request_has_its_own,
    "logprobs": equally_likely_tokens_share_a_rank,
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_each_difference(name: str, engine: Engine) -> None:
    DIFFERENCES[name](engine)


def test_the_table_has_them_all() -> None:
    page = (DOCS / "how-to" / "engine.md").read_text()
    table = page.partition("<!-- differences from vLLM -->")[2].partition("<!-- end of differences -->")[0]
    assert re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE) == list(DIFFERENCES)
