"""Answers have the form that was asked for, whatever runs beside them, and those without one do not notice."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from compiled_llm.engine.admission.greedy import Greedy
from compiled_llm.engine.admission.policies import POLICIES
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.grammars import mask_writer
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.execution.decode import deferred_sampling as deferred_sampling
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.requests.outputs import RequestOutput
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.requests.structured_outputs import StructuredOutputsParams
from support.engine import tiny_engines
from support.engine.text_tokenizers import byte_fallback, byte_level
from support.engine.tiny_engines import tiny
from support.execution.failing_calls import fail_once
from support.parity import assert_account_is_empty

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.usefixtures("one_thread")

END = 1
VOCABULARY = 404
"""More than the tokenizer has, as models are padded; and no whole number of words of 32 bits."""


def wrapped(tokens: int = 6000, vocabulary: int = VOCABULARY) -> PreTrainedModel:
    return tiny_engines.wrapped(tokens, tiny(eos_token_id=END, vocab_size=vocabulary), max_batch_size=64)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return wrapped()


@pytest.fixture
def engine(reading: None, model: PreTrainedModel) -> Iterator[Engine]:
    with Engine(model, tokenizer=byte_level(), max_num_seqs=64) as engine:
        yield engine
    assert_account_is_empty(model)


def form(**of: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**of)


def settings(seed: int = 0, **others: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 90, **others})


def text_of(output: RequestOutput) -> str:
    assert output.finish_reason == "stop", (output.finish_reason, output.text)
    assert output.text is not None
    return output.text


# ---- forms

_BOOLEAN = {"type": "json_schema", "json_schema": {"type": "boolean"}}
_TAG = {"type": "tag", "begin": "<f>", "content": _BOOLEAN, "end": "</f>"}
_OBJECT = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
KINDS: list[tuple[str, Any, str]] = [
    ("json", _OBJECT, r'\{"a": "[xy]"\}'),
    ("regex", r"[a-c]{2,4}@(com|org)", r"[a-c]{2,4}@(com|org)"),
    ("choice", ['yes "no"', "perhaps\n", "héllo\\"], r'yes "no"|perhaps\n|héllo\\'),
    ("grammar", 'root ::= "<" item ("," item){1,3} ">"\nitem ::= [0-9]', r"<\d(,\d){1,3}>"),
    ("grammar", 'start: "a" /[0-9]{2}/', r"a\d\d"),
    ("json_object", True, r"(?s)\{.*\}"),
    ("structural_tag", {"type": "structural_tag", "format": _TAG}, "<f>(true|false)</f>"),
]
BESIDE: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "bias": {"logit_bias": {5: 100, 6: -100}, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    "bad words": {"bad_words": ["b", "true"]},
    "n": {"n": 2},
}


@pytest.mark.parametrize(("kind", "value", "pattern"), KINDS, ids=[kind for kind, _, _ in KINDS])
def test_each_form_beside_each_setting(engine, kind, value, pattern):
    own = {"logit_bias": {byte_level().encode("}")[0]: 8}} if kind == "json_object" else {}  # which may go on for ever
    asked = form(**{kind: value}, disable_any_whitespace=True)
    each = [settings(3, structured_outputs=asked, **own | beside) for beside in BESIDE.values()]
    for beside, params, output in zip(BESIDE, each, engine.generate([[5, 6, 7]] * len(each), each), strict=True):
        for answer in output.outputs:
            assert answer.text is not None
            if kind == "json_object" and answer.finish_reason == "length":
                continue
            assert answer.finish_reason == "stop", (beside, answer)
            assert re.fullmatch(pattern, answer.text), (beside, answer.text)
            assert answer.token_ids[-1] == END
            assert params.logprobs is None or len(answer.logprobs or ()) == len(answer.token_ids)


def test_tags_in_their_former_form(engine):
    parts = [{"begin": "a", "schema": {"type": "boolean"}, "end": "z"}]
    former = {"type": "structural_tag", "structures": parts, "triggers": ["a"]}
    output = engine.generate([5], settings(structured_outputs=form(structural_tag=former), stop=["z"]))[0]
    assert re.match(r"[^a]*(a(true|false))?$", output.text or "")


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("given", [{"json": {"type": "object"}}, {"json_object": True}])
def test_blanks_are_bounded_unless_a_user_wants_them(engine, given):
    blank, brace = byte_level().encode(" ")[0], byte_level().encode("}")[0]
    likes = {"logit_bias": {blank: 100, brace: 50}, "temperature": 0.0}
    bounds = (3, 32, None)
    forms = [form(**given) if most == 32 else form(**given, max_whitespace_cnt=most) for most in bounds]
    outputs = engine.generate([[5, 6, 7]] * 3, [settings(structured_outputs=asked, **likes) for asked in forms])
    for most, output in zip(bounds, outputs, strict=True):
        assert (output.text or "").removesuffix("}") == "{" + " " * (most or 89)
        assert output.finish_reason == ("stop" if most else "length")


def integers_up_to(most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, "maximum": most}


def schemas() -> list[dict[str, Any]]:
    """64 of them, no two alike."""
    parts: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"enum": ["red", "green", 7, None]},
        {"type": "string", "maxLength": 4},
        {"type": "array", "items": integers_up_to(9), "minItems": 1, "maxItems": 3},
        {"anyOf": [{"type": "null"}, {"const": "é"}]},
        {"type": "string", "pattern": "^[a-f]{2}$"},
        {"type": "object", "properties": {"in": {"type": "boolean"}}, "required": ["in"]},
        {"type": "string", "format": "date"},
    ]
    return [
        {
            "type": "object",
            "properties": {"first": first, "second": second, f"n{number}{other}": integers_up_to(10 + number)},
            "required": ["first", "second", f"n{number}{other}"],
        }
        for number, first in enumerate(parts)
        for other, second in enumerate(parts)
    ]


def assert_follows(schema: dict[str, Any], value: Any) -> None:
    """A check of what ``schemas`` uses."""
    kinds = {"boolean": bool, "string": str, "array": list, "object": dict, "integer": int, "null": type(None)}
    if "anyOf" in schema:
        assert value in (None, "é")
        return
    assert value in schema.get("enum", [value])
    assert value == schema.get("const", value)
    assert isinstance(value, kinds[schema["type"]] if "type" in schema else object)
    if isinstance(value, str):
        # Bytes in the form of UTF-8 that are no character (half a pair, say) are one to xgrammar, and several in texts.
        value = re.sub("\ufffd{1,4}", "\ufffd", value)
        assert len(value) <= schema.get("maxLength", 10)
        assert re.search(schema.get("pattern", ""), value)
    if isinstance(value, list):
        assert schema["minItems"] <= len(value) <= schema["maxItems"]
        for entry in value:
            assert_follows(schema["items"], entry)
    if isinstance(value, dict):
        assert set(value) == set(schema["properties"])
        for name, part in schema["properties"].items():
            assert_follows(part, value[name])
    if schema.get("type") == "integer":
        assert schema["minimum"] <= value <= schema["maximum"]


@pytest.mark.whole
def test_64_requests_with_64_schemas(model, monkeypatch):
    monkeypatch.setattr(Loop, "asynchronous", True)
    each = schemas()
    assert len({json.dumps(schema) for schema in each}) == 64
    params = [
        settings(n, structured_outputs=form(json=schema, disable_any_whitespace=bool(n % 2)), max_tokens=200)
        for n, schema in enumerate(each)
    ]
    with Engine(model, tokenizer=byte_level(), max_num_seqs=64) as engine:
        outputs = engine.generate([[5 + n, 6] for n in range(64)], params)
    ended = 0
    for n, (schema, output) in enumerate(zip(each, outputs, strict=True)):
        if output.finish_reason == "length":  # blanks without end are JSON, too
            assert n % 2 == 0
            continue
        ended += 1
        assert_follows(schema, json.loads(text_of(output)))
    assert ended > 50
    assert_account_is_empty(model)


@pytest.mark.whole
def test_threads_fill_masks_that_take_long(engine, monkeypatch):
    params = [settings(n, structured_outputs=form(json=schema)) for n, schema in enumerate(schemas()[:12])]
    expected = tokens_of(engine.generate([[5]] * 12, params))
    monkeypatch.setattr(mask_writer, "_THREADS", 2)
    for few in (0, 5):  # all of them, and some
        monkeypatch.setattr(mask_writer, "_FEW", few)
        monkeypatch.setattr(mask_writer, "_SOON", -1.0)
        assert tokens_of(engine.generate([[5]] * 12, params)) == expected


def test_pydantics_classes(engine):
    from pydantic import BaseModel

    class Flag(BaseModel):
        up: bool

    output = engine.generate([5], settings(structured_outputs=form(json=Flag, disable_any_whitespace=True)))[0]
    assert isinstance(Flag.model_validate_json(text_of(output)).up, bool)


def test_tokens_that_are_bytes_or_begin_with_a_blank(monkeypatch):
    monkeypatch.setattr(Loop, "asynchronous", True)
    tokenizer = byte_fallback()
    with Engine(wrapped(vocabulary=320), tokenizer=tokenizer) as engine:
        params = settings(structured_outputs=form(regex="[é漢 ]{2}fox"), stop_token_ids=[2])
        answer = engine.generate([5], params)[0].outputs[0]
    assert re.fullmatch("[é漢 ]{2}fox", tokenizer.decode([3, *answer.token_ids], skip_special_tokens=True)[-5:])


def test_special_tokens_spell_no_text(engine):
    """They would be missing in the answer's; tags may begin with them."""
    special = byte_level().get_vocab()["<s>"]
    likely = {"logit_bias": {special: 100}, "skip_special_tokens": False}
    asked = settings(structured_outputs=form(regex="<s>|<t>"), **likely)
    (output,) = engine.generate([5], asked)
    assert special not in output.token_ids
    assert (output.text or "").removesuffix("</s>") in ("<s>", "<t>")
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<s>", "content": _BOOLEAN, "end": "."}}
    (output,) = engine.generate([5], settings(structured_outputs=form(structural_tag=tag), **likely))
    assert output.token_ids[0] == special


# ---- beside others


MIXED = [
    settings(4, max_tokens=30),
    settings(5, structured_outputs=form(regex="[ab]+c"), max_tokens=30),
    settings(6, n=2, structured_outputs=form(choice=["hello", "bye bye", "go"])),
    settings(7, temperature=0.0, max_tokens=25, presence_penalty=1.0),
    settings(8, structured_outputs=form(json=schemas()[9]), prompt_logprobs=1),
    settings(9, structured_outputs=form(regex="[0-9]{60}"), max_tokens=45),
]


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def prompts_of(seed: int) -> list[list[int]]:
    lengths = (3, 11, 1, 30, 9, 16)
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 380, (length,), generator=draw).tolist() for length in lengths]


def test_each_request_gets_the_tokens_that_it_gets_alone(engine, seed):
    prompts = prompts_of(seed)
    together = tokens_of(engine.generate(prompts, MIXED))
    alone = [tokens_of(engine.generate([prompt], [params]))[0] for prompt, params in zip(prompts, MIXED, strict=True)]
    assert together == alone
    without = Engine(engine._model)  # and as if there were no grammars
    assert tokens_of(without.generate([prompts[0], prompts[3]], [MIXED[0], MIXED[3]])) == [together[0], together[3]]
    without.close()


def test_preempted_answers_go_on_in_their_grammars(monkeypatch, model, seed):
    monkeypatch.setattr(Loop, "asynchronous", True)
    prompts = prompts_of(seed)
    with Engine(model, tokenizer=byte_level()) as engine:
        expected = tokens_of(engine.generate(prompts, MIXED))
    monkeypatch.setitem(POLICIES, "auto", Greedy)  # more begin than fit: requests are preempted
    short = wrapped(tokens=116)
    with Engine(short, tokenizer=byte_level(), max_num_seqs=6) as engine:
        assert tokens_of(engine.generate(prompts, MIXED)) == expected
        assert engine.stats().preemptions > 2
    assert_account_is_empty(short)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("through", ["sleep", "restart"])
def test_answers_go_on_after_sleep_and_after_steps_are_lost(monkeypatch, through, seed):
    monkeypatch.setattr(Loop, "asynchronous", True)
    model, prompts = wrapped(), prompts_of(seed)
    with Engine(model, tokenizer=byte_level()) as engine:
        expected = tokens_of(engine.generate(prompts, MIXED))
        come = threading.Event()
        handles = [engine.submit(prompt, params) for prompt, params in zip(prompts, MIXED, strict=True)]
        handles[5].when_changed(lambda: come.set() if len(handles[5].requests[0].tokens) > 4 else None)
        assert come.wait(60)
        if through == "sleep":
            engine.sleep()
            engine.wake()
        else:
            monkeypatch.setattr(Loop, "drain", lambda loop: [])  # what was launched is lost
            with engine.paused(), engine._runtime.loop_lock.taken():
                monkeypatch.undo()
                assert engine._engine_thread.loop is not None
                engine._engine_thread.loop.restart()
            monkeypatch.setattr(Loop, "asynchronous", True)
        assert tokens_of([handle.result(timeout=60) for handle in handles]) == expected
    assert_account_is_empty(model)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("place", [(ModelRunner, "sample_deferred"), (deferred_sampling, "sample")], ids=["call", "op"])
def test_a_choice_that_fails_ends_what_runs_and_later_requests_are_served(engine, place, monkeypatch, seed):
    prompts = prompts_of(seed)
    expected = tokens_of(engine.generate(prompts, MIXED))
    fail_once(monkeypatch, *place, OSError("gone"), after=5)
    with pytest.raises(OSError, match="gone"):
        engine.generate(prompts, MIXED)
    assert tokens_of(engine.generate(prompts, MIXED)) == expected


def test_min_tokens_hold_as_far_as_the_form_goes_on(engine):
    params = [settings(n, structured_outputs=form(regex="a{0,12}"), min_tokens=8, max_tokens=20) for n in range(4)] + [
        settings(structured_outputs=form(regex="bc?"), min_tokens=8, max_tokens=20)
    ]
    outputs = engine.generate([[5, n] for n in range(5)], params)
    assert all(len(output.token_ids) >= 9 for output in outputs[:4])
    assert text_of(outputs[4]) == "bc"


def test_what_a_request_bars_is_barred_from_its_form(engine):
    allowed = [token for token in range(380) if "a" not in byte_level().decode([token])]
    outputs = engine.generate(
        [[5, n] for n in range(6)],
        [settings(n, structured_outputs=form(regex="[ab]{1,5}"), allowed_token_ids=allowed) for n in range(6)],
    )
    assert {text_of(output).strip("b") for output in outputs} == {""}
    nothing = settings(structured_outputs=form(regex="b"), allowed_token_ids=[byte_level().encode("a")[0], END])
    alone, other = engine.generate([[5], [6]], [nothing, settings(max_tokens=5)])
    assert alone.finish_reason == "error"
    assert "no token is left after 0 new ones" in str(alone.error)
    assert len(other.token_ids) <= 5
    assert other.error is None
