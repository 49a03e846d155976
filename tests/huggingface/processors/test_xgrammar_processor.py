"""The logits processor that xgrammar makes for HuggingFace runs in the fast loop, and answers are as HuggingFace's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor

import compiled_llm
from support.parity import assert_account_is_empty, mixed_prompts
from support.tiny_models import tiny_qwen3

xgr = pytest.importorskip("xgrammar")
hf = pytest.importorskip("xgrammar.contrib.hf")

pytestmark = pytest.mark.core

WIDTH, END = 128, 127
VOCABULARY = [chr(33 + token % 94) if token < 120 else f"<{token}>" for token in range(WIDTH)]
"""What tokens say: some the same, and the last ones nothing that a grammar has."""
PATTERNS = [r"[a-m]{2,5}(=|:)[0-9]{3,9}!", r"([A-Z][n-z]){1,9};", r"[a-z0-9]*"]


@pytest.fixture(scope="module")
def compile_pattern() -> Callable[[str], Any]:
    info = xgr.TokenizerInfo(VOCABULARY, vocab_size=WIDTH, stop_token_ids=[END])
    compiler = xgr.GrammarCompiler(info)
    return lambda pattern: compiler.compile_regex(pattern)


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    plain, twin = tiny_qwen3(eos_token_id=END), tiny_qwen3(eos_token_id=END)
    return plain, compiled_llm.wrap(twin, mode="eager", page_size=4, progress=False)


def path_of(wrapped: Any, *args: Any, **options: Any) -> tuple[str, Any]:
    before = wrapped.compiled.stats().generate_calls
    out = wrapped.generate(*args, **options)
    after = wrapped.compiled.stats().generate_calls
    return next(path for path in after if after[path] != before.get(path)), out


def assert_equal(pair: tuple[Any, Any], inputs: Any, make: Callable[[], list[Any]], path: str, **options: Any) -> Any:
    plain, wrapped = pair
    options = {"max_new_tokens": 18, "do_sample": False} | options
    expected = plain.generate(**inputs, logits_processor=make(), **options)
    taken, ours = path_of(wrapped, **inputs, logits_processor=make(), **options)
    assert taken == path
    assert torch.equal(getattr(ours, "sequences", ours), getattr(expected, "sequences", expected))
    return ours


def text_of(tokens: torch.Tensor) -> str:
    listed = tokens.tolist()
    return "".join(VOCABULARY[token] for token in listed[: listed.index(END) if END in listed else None])


SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {},
    "static masks and biases": {"suppress_tokens": [*range(64, 70), 75], "sequence_bias": {(70,): 3.0, (5, 80): -4.0}},
    "penalties": {"repetition_penalty": 1.4, "remove_invalid_values": True},
    "two answers each": {"num_return_sequences": 2, "do_sample": True, "top_k": 1},
}


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_batches_are_as_huggingfaces(pair, compile_pattern, pattern, name, seed):
    inputs = mixed_prompts([5, 2, 7], WIDTH, seed)
    grammar = compile_pattern(pattern)
    out = assert_equal(pair, inputs, lambda: [hf.LogitsProcessor(grammar)], "fast loop", **SETTINGS[name])
    for row in out[:, 7:]:
        assert END not in row or re.fullmatch(pattern, text_of(row))
    assert_account_is_empty(pair[1])


def outcome(model: Any, inputs: Any, processor: Any, **options: Any) -> list[Any]:
    """What a call returns or raises."""
    try:
        return model.generate(**inputs, logits_processor=[processor], do_sample=False, **options).tolist()
    except (AssertionError, RuntimeError) as error:
        return [type(error), str(error)]


def test_where_no_token_is_left_it_fails_as_in_huggingfaces_loop(pair, compile_pattern, seed):
    inputs, grammar = mixed_prompts([5, 2], WIDTH, seed), compile_pattern(r"ab!")
    plain, ours = (
        outcome(model, inputs, hf.LogitsProcessor(grammar), max_new_tokens=9, min_new_tokens=7) for model in pair
    )
    assert plain == ours == [AssertionError, ""]
    assert_account_is_empty(pair[1])


@pytest.mark.usefixtures("reading")
def test_each_row_has_its_grammar_and_rows_end_one_by_one(pair, compile_pattern, seed):
    inputs = mixed_prompts([5, 2, 7], WIDTH, seed)
    grammars = [compile_pattern(pattern) for pattern in (r"ab?", r"[a-z]{4}!", r"[a-z]{9}!")]
    out = assert_equal(pair, inputs, lambda: [hf.LogitsProcessor(grammars)], "fast loop")
    lengths = [row.tolist().index(END) for row in out[:, 7:]]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) == 3


@pytest.mark.usefixtures("reading")
def test_a_cache_is_returned_as_huggingfaces(pair, compile_pattern, seed):
    inputs, grammar = mixed_prompts([5, 2], WIDTH, seed), compile_pattern(r"[a-z]{3}!")
    options = {"return_dict_in_generate": True, "output_logits": True}
    out = assert_equal(pair, inputs, lambda: [hf.LogitsProcessor(grammar)], "fast loop", **options)
    assert len(out.logits) == out.sequences.shape[1] - 5
    out.past_key_values.close()
    assert_account_is_empty(pair[1])


@pytest.mark.parametrize("filled", [False, True])
def test_a_cache_of_huggingfaces_is_continued(pair, compile_pattern, filled, seed):
    inputs, grammar = mixed_prompts([5, 5], WIDTH, seed), compile_pattern(PATTERNS[1])
    outs = []
    for model in pair:
        cache = DynamicCache(config=model.config)
        if filled:
            with torch.no_grad():
                pair[0](input_ids=inputs["input_ids"][:, :-1], past_key_values=cache)
        options = {"logits_processor": [hf.LogitsProcessor(grammar)], "past_key_values": cache}
        outs.append(model.generate(**inputs, **options, max_new_tokens=12, do_sample=False))
    assert torch.equal(*outs)
    assert_account_is_empty(pair[1])


class Other(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores


class Derived(hf.LogitsProcessor):  # type: ignore[misc, name-defined]
    pass


@pytest.mark.parametrize(
    ("kind", "others"), [(hf.LogitsProcessor, [Other()]), (Derived, [])], ids=["another", "derived"]
)
def test_what_has_to_see_each_step_keeps_its_path(pair, compile_pattern, kind, others, seed):
    inputs, grammar = mixed_prompts([5, 2], WIDTH, seed), compile_pattern(PATTERNS[0])
    assert_equal(pair, inputs, lambda: [kind(grammar), *others], "processed loop")


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("lengths", [[5, 2], [5]], ids=["same batch", "other batch"])
def test_a_processor_that_was_used_does_what_it_does_in_huggingfaces_loop(pair, compile_pattern, lengths, seed):
    first, second = mixed_prompts([5, 2], WIDTH, seed), mixed_prompts(lengths, WIDTH, seed + 1)
    outcomes = []
    for model in pair:
        used = hf.LogitsProcessor(compile_pattern(PATTERNS[0]))
        outcomes.append([outcome(model, inputs, used, max_new_tokens=5) for inputs in (first, second, first)])
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1][0] in (AssertionError, RuntimeError)
    assert_account_is_empty(pair[1])
    assert_equal(pair, first, lambda: [hf.LogitsProcessor(compile_pattern(PATTERNS[0]))], "fast loop")
