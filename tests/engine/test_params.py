"""``SamplingParams``: counts survive preemption, answers count their own tokens, and what is impossible is refused."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from compiled_llm.compilation.sampling.bias import packed_values
from compiled_llm.engine.admission.greedy import Greedy
from compiled_llm.engine.admission.policies import POLICIES
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.input_processing import sampling
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.execution.state.slots import Slots
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.requests.structured_outputs import StructuredOutputsParams
from support.engine.sampling_settings import COMBINED, ENDS, GREEDY, VOCABULARY, Setting, generated, together
from support.engine.text_tokenizers import Numbers, byte_level
from support.engine.tiny_engines import wrapped
from support.tiny_models import tiny_qwen3


@pytest.fixture(scope="module")
def plain() -> Any:
    return tiny_qwen3(eos_token_id=ENDS, vocab_size=VOCABULARY)


def make_engine(tokens: int = 4000, tokenizer: Any = None, **options: Any) -> Engine:
    plain = tiny_qwen3(eos_token_id=ENDS, vocab_size=VOCABULARY)
    return Engine(wrapped(tokens, plain, max_batch_size=16, page_size=16), tokenizer=tokenizer or Numbers(), **options)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with make_engine() as engine:
        yield engine


def test_preempted_requests_go_on_with_what_they_have_counted(plain, monkeypatch, seed):
    monkeypatch.setattr(Loop, "asynchronous", True)
    monkeypatch.setitem(POLICIES, "auto", Greedy)  # more begin than fit: requests are preempted
    everything, none = together(COMBINED), Setting({}, {})
    settings = [everything, none, GREEDY["frequency_penalty"], GREEDY["min_tokens"], GREEDY["bad_words"], everything]
    params = [SamplingParams(**setting.params, temperature=0, max_tokens=40) for setting in settings]
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, VOCABULARY, (len(settings), 12), generator=generator).tolist()
    with make_engine(tokens=112, tokenizer=byte_level(), max_num_seqs=6) as engine:
        outputs = engine.generate(prompts, params)
        assert engine.stats().preemptions > 0
    for prompt, setting, output in zip(prompts, settings, outputs, strict=True):
        assert output.token_ids == generated(plain, prompt, setting, 40), setting.params


def test_several_answers_count_their_own_tokens(engine):
    settings = {"frequency_penalty": 2.0, "presence_penalty": 1.0, "logit_bias": {7: 5.0}, "min_tokens": 4}
    several = SamplingParams(n=4, seed=3, max_tokens=12, **settings)
    single = [SamplingParams(seed=3 + index, max_tokens=12, **settings) for index in range(4)]
    first, *alone = engine.generate([[5, 6, 7]] * 5, [several, *single])
    assert [answer.token_ids for answer in first.outputs] == [output.token_ids for output in alone]


@pytest.mark.parametrize("others", [{}, {"allowed_token_ids": [5, 7]}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}])
def test_temperatures_that_float32_does_not_have_draw_as_the_next_ones(engine, others):
    each = (0.0, 1e-300, 1e-39, 1e39, 1e300, 1e10)
    params = [SamplingParams(temperature=one, seed=3, max_tokens=12, ignore_eos=True, **others) for one in each]
    cold, same, colder, hot, hotter, warm = (out.token_ids for out in engine.generate([[5, 6, 7]] * 6, params))
    assert cold == same == colder != hot == hotter == warm


# ---- what is impossible

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n=0 must be 1 or more"),
    ({"presence_penalty": 2.5}, "presence_penalty=2.5 must be from -2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty=-3 must be from -2 to 2"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty=nan must be from -2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty=0 must be above 0"),
    ({"temperature": -1}, "temperature=-1 must be 0 or more"),
    ({"temperature": "hot"}, "temperature='hot' must be 0 or more"),
    ({"top_p": 0}, "top_p=0 must be above 0 and at most 1"),
    ({"top_k": -2}, "top_k=-2 must be 0 or more"),
    ({"top_k": 1.5}, "top_k=1.5 must be 0 or more"),
    ({"min_p": True}, "min_p=True must be from 0 to 1"),
    *(({"seed": value}, f"seed={value} must be from 0 to 2") for value in (-2, 2**62)),
    ({"max_tokens": -1}, "max_tokens=-1 must be 0 or more"),
    ({"min_tokens": -1}, "min_tokens=-1 must be 0 or more"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 must be at most max_tokens=4"),
    ({"stop_token_ids": ["x"]}, "stop_token_ids=['x'] must be token ids"),
    ({"stop_token_ids": 5}, "stop_token_ids=5 must be token ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids=[] must be token ids, one at least"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids=[-1] must be token ids"),
    *(
        ({"logprob_token_ids": given}, "must be distinct token ids, from 1 to 128 of them, or None for none")
        for given in ([], [3, 3], [-1], list(range(129)), 7)
    ),
    ({"logprob_token_ids": [5, 6], "logprobs": 1}, "logprobs=1 must be None, or 2, the number of logprob_token_ids"),
    ({"bad_words": "word"}, "bad_words='word' must be words"),
    ({"bad_words": [" "]}, "bad_words=[' '] must be words, none of them empty"),
    ({"logit_bias": {5: 101}}, "logit_bias={5: 101} must be from -100 to 100, for 300 tokens at most"),
    ({"logit_bias": {"5": 1}}, "logit_bias={'5': 1} must be from"),
    ({"logit_bias": dict.fromkeys(range(301), 1)}, "for 300 tokens at most"),
    ({"stop": ["a", ""]}, "stop=['a', ''] must be a string or several, none of them empty"),
    ({"stop": ""}, "stop='' must be a string"),
    ({"stop": [5]}, "stop=[5] must be a string"),
    ({"stop": 5}, "stop=5 must be a string"),
    ({"prompt_logprobs": 21}, "prompt_logprobs=21 must be from 0 to 20"),
    *(({"logprobs": value}, f"logprobs={value} must be from 0 to 20") for value in (21, -1, True, 1.5)),
    *(({name: 1}, f"{name}=1 must be True") for name in ("include_stop_str_in_output", "skip_special_tokens")),
    *(({name: []}, f"{name}: the engine") for name in ("guided_decoding", "detokenize")),
    ({"structured_outputs": {"regex": "a"}}, "must be StructuredOutputsParams(...), or None for any text"),
    ({"structured_outputs": StructuredOutputsParams(regex="a"), "ignore_eos": True}, "ignore_eos=True contradicts"),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_impossible_settings_name_field_value_and_range(values, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        SamplingParams(**values)
    assert str(caught.value).startswith("SamplingParams: ")


AT_SUBMIT: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": {VOCABULARY: 1}}, "logit_bias: token ids are from 0 to 379; got 380"),
    ({"allowed_token_ids": [3, 900]}, "allowed_token_ids: token ids are from 0 to 379; got 900"),
    ({"logprob_token_ids": [3, 900]}, "logprob_token_ids: token ids are from 0 to 379; got 900"),
    ({"bad_words": ["3 " * 9]}, "is 9 tokens, and it can be 8"),
    ({"allowed_token_ids": [9], "bad_words": ["9"]}, "leave no token to choose"),
    ({"allowed_token_ids": ENDS, "min_tokens": 1}, "leave no token to choose"),
    ({"min_tokens": 1023, "max_tokens": None}, "min_tokens=1023: there is room for 1022"),
    ({"min_tokens": 1, "stop_token_ids": range(600)}, "logit_bias, bad_words and min_tokens: 600 biases"),
]


@pytest.mark.parametrize(("values", "message"), AT_SUBMIT, ids=lambda value: str(value)[:40])
def test_what_does_not_fit_the_model_is_refused_by_submit(engine, values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        engine.submit([5, 6], SamplingParams(**values))
    assert engine.submit([5, 6], SamplingParams(max_tokens=2)).result(timeout=60).outputs


def test_requests_of_one_call_share_what_their_settings_are_packed_to(engine, monkeypatch):
    packed: list[Any] = []
    monkeypatch.setattr(sampling, "packed_values", lambda *given: packed.append(packed_values(*given)) or packed[-1])
    admit, entered = Slots.admit, list[Any]()
    monkeypatch.setattr(Slots, "admit", lambda slots, rows, own: (entered.extend(own), admit(slots, rows, own))[1])
    biased, other = (SamplingParams(temperature=0, max_tokens=3, logit_bias={token: 50}) for token in (9, 8))
    outputs = engine.generate([[3], [3, 4], [5], [6]], [biased, biased, other, biased])
    assert [output.token_ids[0] for output in outputs] == [9, 9, 8, 9]
    assert len(packed) == len({id(sampling) for sampling in entered}) == 2


def test_words_need_a_tokenizer():
    with Engine(wrapped()) as engine, pytest.raises(ValueError, match="bad_words: words need a tokenizer"):
        engine.submit([5, 6], SamplingParams(bad_words=["x"]))


def test_params_do_not_change_with_what_they_were_made_of():
    bias, stops = {5: 1.0}, [7]
    params = SamplingParams(logit_bias=bias, stop_token_ids=stops)
    bias[6], stops[0] = 2.0, 8
    assert params == SamplingParams(logit_bias={5: 1.0}, stop_token_ids=[7])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]
