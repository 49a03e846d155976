"""Each line of the table of differences from vLLM says what the engine does."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.logprobs.entries import logprobs_of
from compiled_llm.engine.logprobs.score_tokens import ScoredTokens, score_tokens
from compiled_llm.engine.logprobs.scores import Scores
from compiled_llm.requests.outputs import Logprob
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.requests.text.detokenizer import TokenDecoder
from compiled_llm_ops import sample_tokens
from engine import test_detokenizer, test_engine, test_logits_processors, test_params, test_scoring, test_text
from engine.grammars import test_grammar_compiling, test_structured_outputs
from support.docs.pages import DOCS
from support.engine.text_tokenizers import byte_fallback
from support.engine.tiny_engines import wrapped
from support.ops.sampling_cases import arguments


@pytest.fixture(scope="module")
def engine() -> Any:
    with Engine(wrapped(200)) as engine:
        yield engine


def drawn(probabilities: list[float], **settings: Any) -> set[int]:
    """The tokens that can be drawn."""
    logits = torch.tensor([probabilities]).log().expand(500, -1)
    return set(sample_tokens(*arguments(logits, torch.arange(500), [Sampling(**settings)] * 500)).tolist())


def refuses(values: dict[str, Any]) -> Callable[..., None]:
    """The test that shows that settings are refused."""
    if any(values == wrong for wrong, _ in test_params.WRONG):
        return test_params.test_impossible_settings_name_field_value_and_range
    assert any(values == wrong for wrong, _ in test_params.AT_SUBMIT)
    return test_params.test_what_does_not_fit_the_model_is_refused_by_submit


def refuses_form(values: dict[str, Any]) -> Callable[..., None]:
    assert any(values == wrong for wrong, _ in test_grammar_compiling.WRONG)
    return test_grammar_compiling.test_impossible_forms_name_field_and_value


def min_p_comes_last(engine: Engine) -> None:
    """Before top-p it would leave the first two alone, and the first has more than half of their mass."""
    assert drawn([0.33, 0.27, 0.2, 0.2], top_p=0.5, min_p=0.7) == {0, 1}


def ties_are_kept(engine: Engine) -> None:
    assert drawn([0.4, 0.2, 0.2, 0.2], top_p=0.5) == {0, 1, 2, 3}


def small_temperatures_count(engine: Engine) -> None:
    nearly = torch.tensor([0.5, 0.5]).log() + torch.tensor([0.0, -1e-6])
    assert drawn(nearly.exp().tolist(), temperature=1e-6) == {0, 1}


def greedy_answers_are_equal(engine: Engine) -> None:
    output = engine.generate([5, 6], SamplingParams(temperature=0, n=3, max_tokens=4))[0]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 1


def text_is_that_of_the_answer_alone(engine: Engine) -> None:
    tokenizer = byte_fallback()
    assert TokenDecoder(tokenizer).text([tokenizer.get_vocab()["▁fox"]], skip_special_tokens=True) == "fox"


def equally_likely_tokens_share_a_rank(engine: Engine) -> None:
    numbers = score_tokens(torch.tensor([[0.0, 1.0, 1.0, -1.0]]), torch.tensor([2]), 3).numpy()
    scores = Scores()
    scores.extend(ScoredTokens.unpacked(numbers, 1).packed(3))
    entries = logprobs_of(scores[0], token=2, most=3)
    assert {token: entry.rank for token, entry in entries.items()} == {2: 1, 1: 1, 0: 3}
    assert Logprob._fields == ("logprob", "rank")


DIFFERENCES: dict[str, Callable[..., None]] = {
    "min_p": min_p_comes_last,
    "top_p": ties_are_kept,
    "temperature": small_temperatures_count,
    "seed": refuses({"seed": 2**62}),
    "n": greedy_answers_are_equal,
    "max_tokens=0": test_scoring.test_prompts_are_scored_and_nothing_follows,
    "max_tokens=None": test_engine.test_without_a_limit_an_answer_has_what_positions_and_pages_allow,
    "logit_bias": refuses({"logit_bias": {5: 101}}),
    "stop": test_detokenizer.test_stop_strings_are_found_as_a_search_for_each_finds_them,
    "text": text_is_that_of_the_answer_alone,
    "ignore_eos": test_text.test_an_end_that_only_the_tokenizer_names_ends_answers_by_an_option,
    "bad_words": refuses({"bad_words": ["3 " * 9]}),
    "allowed_token_ids": refuses({"allowed_token_ids": [9], "bad_words": ["9"]}),
    "structured_outputs": refuses_form({"json": {"type": "array", "items": {"$ref": "other.json"}}}),
    "min_tokens": test_structured_outputs.test_min_tokens_hold_as_far_as_the_form_goes_on,
    "logits_processors": test_logits_processors.test_tokens_equal_huggingface_with_the_same_processor,
    "logprob_token_ids": refuses({"logprob_token_ids": [3, 3]}),
    "logprobs": equally_likely_tokens_share_a_rank,
}
"""Each line of the table, and what shows it: a function here, or a test of another module."""


@pytest.mark.parametrize("name", [name for name, shows in DIFFERENCES.items() if shows.__module__ == __name__])
def test_each_difference(name: str, engine: Engine) -> None:
    DIFFERENCES[name](engine)


def test_the_table_has_them_all() -> None:
    page = (DOCS / "how-to" / "engine.md").read_text()
    table = page.partition("<!-- differences from vLLM -->")[2].partition("<!-- end of differences -->")[0]
    assert re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE) == list(DIFFERENCES)
