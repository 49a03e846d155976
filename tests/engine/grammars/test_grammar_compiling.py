"""Grammars are compiled while others run; what cannot be compiled is refused, or ends its request alone."""

from __future__ import annotations

import importlib.util
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from compiled_llm.engine.apart.unwanted import UnwantedError
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.grammars import compilers, compiling
from compiled_llm.engine.grammars.compilers import Compilers
from compiled_llm.engine.grammars.form import GrammarForm
from compiled_llm.engine.grammars.forms.grammar_source import GrammarSource
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.requests.structured_outputs import StructuredOutputsParams
from support.engine import text_tokenizers
from support.engine.text_tokenizers import byte_level, slow
from support.engine.tiny_engines import PATIENCE
from support.in_threads import start

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = SamplingParams(temperature=0, max_tokens=4)


class Compiler:
    """Compiles as ever, but slowly what says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: list[str] = []
        self.go_on, self.begun = threading.Event(), threading.Event()
        self._as_ever: Callable[..., Any] = GrammarSource.compiled
        monkeypatch.setattr(GrammarSource, "compiled", lambda source, compiler: self.compile(source, compiler))

    def compile(self, source: GrammarSource, compiler: Any) -> Any:
        self.compiled.append(source.text)
        if source.text.startswith("slow"):
            self.begun.set()
            assert self.go_on.wait(PATIENCE)
        return self._as_ever(source, compiler)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    compiler = Compiler(monkeypatch)
    yield compiler
    compiler.go_on.set()


def matching(regex: str, **others: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex), max_tokens=20, seed=1, **others)


def compiling_slowly(engine: Engine, compiler: Compiler, **others: Any) -> RequestHandle:
    """Two requests, or those that are asked for, whose grammar is being compiled."""
    handle = engine.submit([5, 6], matching("slow[ab]", **others))
    assert compiler.begun.wait(PATIENCE)
    return handle


def made_of(engine: Engine) -> dict[Any, Any]:
    """The compilers that an engine has, by what they are for."""
    assert type(engine._grammars._compilers) is Compilers
    return engine._grammars._compilers._compilers._made


def test_others_go_on_while_a_grammar_is_compiled_for_tokens_that_warmup_has_learned(engine, compiler):
    engine.warmup([1], structured=True)
    assert list(made_of(engine)) == [(380, frozenset({1}), False)]
    waiting = compiling_slowly(engine, compiler, n=2)
    assert engine.submit([5], PLAIN).result(PATIENCE).finish_reason is not None
    assert engine.submit([5], matching("fast")).result(PATIENCE).text == "fast"
    assert engine.stats().waiting == 2
    compiler.go_on.set()
    assert {answer.text for answer in waiting.result(PATIENCE).outputs} <= {"slowa", "slowb"}


def test_new_weights_wait_for_requests_that_wait_for_their_grammar(engine, compiler, tmp_path):
    engine._model.save_pretrained(tmp_path)  # the same ones
    early = compiling_slowly(engine, compiler, n=2)
    updating = start(lambda: engine.update_weights(tmp_path))
    while engine._engine_thread.request_table.paused_requests._early is None:
        pass
    late = engine.submit([5], matching("slow[ab]"))  # compiled at the same moment, and kept
    compiler.go_on.set()
    updating.result(PATIENCE)
    assert all(request.done for request in early.requests)
    assert {answer.text for answer in early.result(PATIENCE).outputs} <= {"slowa", "slowb"}
    assert late.result(PATIENCE).text in ("slowa", "slowb")


def test_equal_forms_are_compiled_once(engine, compiler):
    handles = [compiling_slowly(engine, compiler) for _ in range(3)]
    compiler.go_on.set()
    assert all(handle.result(PATIENCE).finish_reason == "stop" for handle in handles)
    engine.generate([5], matching("slow[ab]"))
    assert compiler.compiled == ["slow[ab]"]


def test_grammars_that_are_kept_are_bounded(engine, compiler, monkeypatch):
    monkeypatch.setattr(compiling, "KEPT", 1)
    for regex in ("a", "b", "b", "a"):
        assert engine.generate([5], matching(regex))[0].text == regex
    assert compiler.compiled == ["a", "b", "a"]


def test_compilers_are_bounded_and_go_with_their_engine(model, monkeypatch):
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    endless = PreTrainedTokenizerFast(tokenizer_object=byte_level().backend_tokenizer)
    with Engine(model, tokenizer=endless) as engine:
        for stop in range(200, 206):
            assert engine.generate([5], matching("a", stop_token_ids=[stop]))[0].token_ids[-1] == stop
        assert len(made_of(engine)) == compilers.MAX_VOCABULARIES
    assert not made_of(engine)
    assert not engine._grammars._kept


@pytest.mark.parametrize("end", ["cancelled", "timeout", "closed"])
def test_a_request_that_waits_for_its_grammar_can_end(model, compiler, end):
    with Engine(model, tokenizer=byte_level()) as engine:
        if end == "timeout":
            handle = engine.submit([5, 6], matching("slow[ab]"), timeout=0.05)
        else:
            handle = compiling_slowly(engine, compiler)
            (handle.cancel if end == "cancelled" else engine.close)()
        assert handle.result(PATIENCE).finish_reason == ("timeout" if end == "timeout" else "cancelled")
        assert handle.result().seconds < 5
        compiler.go_on.set()
        if end != "closed":
            assert engine.generate([5], matching("slow[ab]"))[0].text in ("slowa", "slowb")
        assert handle.result().token_ids == []


def test_a_grammar_that_takes_too_long_ends_its_requests_alone(model, compiler):
    with Engine(model, tokenizer=byte_level(), grammar_timeout=0.1) as engine:
        outputs = engine.generate([[5], [6]], [matching("slow"), PLAIN])
        assert re.search(r"not compiled within grammar_timeout=0.1 s", str(outputs[0].error))
        assert outputs[1].error is None
        each = [matching(f"slow{n}") for n in range(12)]  # more than threads: another one takes each one's place
        assert {output.finish_reason for output in engine.generate([[5]] * 12, each)} == {"error"}
        engine._grammars._timeout = PATIENCE
        assert engine.generate([5], matching("fast"))[0].text == "fast"
        compiler.go_on.set()
        assert engine.generate([5], matching("slow3"))[0].text == "slow3"
        assert compiler.compiled.count("slow3") == 1


def test_a_small_form_begins_beside_any_number_of_those_that_take_long(engine, compiler, monkeypatch):
    monkeypatch.setattr(compiling, "_MAX_THREADS", 3)
    monkeypatch.setattr(compiling, "_LONG", 0.01)
    as_ever = engine._grammars._compilers.compile

    def compile(form: GrammarForm, wanted: Callable[[], bool]) -> Any:  # in a process, which can be stopped
        while form.source.text.startswith("slow"):
            if compiler.go_on.wait(0.01):
                break
            if not wanted():
                raise UnwantedError
        return as_ever(form, wanted)

    monkeypatch.setattr(engine._grammars._compilers, "compile", compile)
    heavy = [engine.submit([5], matching(f"slow{n}")) for n in range(6)]
    assert [engine.submit([5], matching(f"fast{n}")).result(PATIENCE).text for n in range(3)] == [
        "fast0",
        "fast1",
        "fast2",
    ]
    assert not any(handle.done for handle in heavy)
    assert engine._grammars._long == 2
    compiler.go_on.set()
    assert [handle.result(PATIENCE).text for handle in heavy] == [f"slow{n}" for n in range(6)]
    assert engine._grammars._long == 0


def test_what_waits_goes_on_after_sleep(engine, compiler):
    handle = compiling_slowly(engine, compiler)
    engine.sleep()
    compiler.go_on.set()
    time.sleep(0.1)
    engine.wake()
    assert handle.result(PATIENCE).text in ("slowa", "slowb")


# ---- what is impossible


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "nothing given; give one of json, regex, choice"),
    ({"regex": "a", "choice": ["b"]}, "regex, choice given; give one of"),
    ({"regex": 5}, "regex=5 must be a string"),
    ({"grammar": ""}, "grammar='' must be a string"),
    ({"choice": []}, "choice=[] must be texts, one at least"),
    ({"choice": "yes"}, "choice='yes' must be texts"),
    ({"json": 5}, "json=5 must be a JSON schema"),
    ({"json": '{"type": '}, "is no JSON: Expecting value: line 1 column 10 (char 9)"),
    ({"json": {"type": {1, 2}}}, "is no JSON: "),
    ({"json": {"properties": {"a": {"multipleOf": 2}}}}, "has multipleOf at #/properties/a, which grammars do not"),
    ({"json": {"items": [{"uniqueItems": True}]}}, "has uniqueItems at #/items/0"),
    *(
        ({"json": {"type": "array", "items": {"$ref": elsewhere}}}, ", outside of the schema, at #/items")
        for elsewhere in ("https://example.org/schema.json", "other.json", "other.json#/$defs/a")
    ),
    ({"json": {"allOf": 5}}, "has allOf=5, which must be a list of schemas, at #"),
    ({"json": {"anyOf": [{"type": "string", "format": "zip"}]}}, "has format 'zip' at #/anyOf/0"),
    (
        {"json": {"type": "string", "format": "date", "minLength": 1}},
        "has format beside pattern, minLength or maxLength",
    ),
    ({"json": {"type": "objectt"}}, "has type='objectt', which must be one of object, array, string"),
    ({"json": {"$ref": "#/a"}}, "has $ref to '#/a', which leads nowhere, at #"),
    ({"json_object": False}, "json_object=False must be True, or None"),
    ({"structural_tag": "{"}, "structural_tag='{' is no JSON"),
    ({"structural_tag": 5}, "structural_tag=5 must be a structural tag"),
    ({"json_object": True, "whitespace_pattern": " "}, "whitespace_pattern=' ' is not followed"),
    ({"json_object": True, "disable_any_whitespace": 1}, "disable_any_whitespace=1 must be True or False"),
    ({"json_object": True, "max_whitespace_cnt": 0}, "max_whitespace_cnt=0 must be 1 or more, or None"),
    ({"json_object": True, "max_whitespace_cnt": True}, "max_whitespace_cnt=True must be 1 or more, or None"),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_impossible_forms_name_field_and_value(values, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        StructuredOutputsParams(**values)
    assert str(caught.value).startswith("StructuredOutputsParams: ")


def test_what_schemas_have_that_names_and_values_only_look_like():
    schema = {
        "type": "object",
        "properties": {"not": {"enum": [{"multipleOf": 1}]}, "if": {"type": "string", "pattern": '^[^"\\\\]{2}$'}},
        "uniqueItems": False,
    }
    assert StructuredOutputsParams(json=schema).json


AT_SUBMIT = [
    ({"regex": "a(b"}, r"could not compile regex='a\(b': .* at position 4: The parenthesis is not closed"),
    ({"grammar": 'root ::= "a'}, "could not compile grammar='root .*: EBNF lexer error at line 1, column 12"),
    ({"grammar": "root ::= y"}, 'line 1, column 10: Rule "y" is not defined'),
    ({"grammar": "start: y"}, "Lark error at line 1, column 8: unknown name 'y'"),
    ({"structural_tag": {"structures": [{"begin": "a"}], "triggers": ["a"]}}, "is no structural tag: structures, each"),
    ({"structural_tag": {"structures": 5, "triggers": ["a"]}}, "is no structural tag: structures, each"),
    ({"structural_tag": {"structures": []}}, "is no structural tag: structures, each"),
    ({"structural_tag": {"type": "x"}}, "Structural tag's type must be a string"),
]


@pytest.mark.parametrize(("values", "message"), AT_SUBMIT, ids=lambda value: str(value)[:40])
def test_what_cannot_be_compiled_is_refused_with_its_place(engine, values, message):
    with pytest.raises(ValueError, match=f"^structured_outputs: .*{message}"):
        engine.submit([5], SamplingParams(structured_outputs=StructuredOutputsParams(**values)))
    assert engine.generate([5], PLAIN)[0].error is None


def unchecked(source: GrammarSource) -> None:
    """As of a text that is too long to read at once."""


def fails_to_begin(form: GrammarForm, grammar: Any) -> None:
    raise RuntimeError("no room")


@pytest.mark.parametrize(
    ("regex", "spoiled", "said"),
    [
        ("a(b", (GrammarSource, "check", unchecked), "Regex parsing error at position 4"),
        ("ab", (GrammarForm, "begin", fails_to_begin), "no room"),
        ("ab", (text_tokenizers, "byte_level", slow), "Unsupported tokenizer type"),
    ],
    ids=["a wrong form", "a form that cannot begin", "a tokenizer of another kind"],
)
def test_what_turns_out_late_ends_its_request_alone(model, monkeypatch, regex, spoiled, said):
    with monkeypatch.context() as patch:
        patch.setattr(*spoiled)
        with Engine(model, tokenizer=text_tokenizers.byte_level()) as engine:
            bad, good = engine.generate([[5], [6]], [matching(regex), PLAIN])
            assert f"no grammar could be compiled: {said}" in str(bad.error)
            assert good.error is None
            patch.undo()
            if spoiled[0] is not text_tokenizers:
                assert engine.generate([5], matching("ab"))[0].text == "ab"


def test_a_request_that_has_ended_while_its_engine_sleeps_stays_as_it_is(model, compiler):
    with Engine(model, tokenizer=byte_level(), grammar_timeout=0.3) as engine:
        handle = compiling_slowly(engine, compiler)
        engine.sleep()
        handle.cancel()
        engine._engine_thread.cancel(handle.requests, "error", RuntimeError("too late"))
        assert handle.result(PATIENCE).finish_reason == "cancelled"
        engine.wake()


def test_forms_need_a_tokenizer_and_an_end(model, monkeypatch):
    with Engine(model) as engine:
        with pytest.raises(ValueError, match="a form needs a tokenizer; give"):
            engine.submit([5], matching("a"))
        with pytest.raises(ValueError, match="a form needs a tokenizer"):
            engine.warmup(structured=True)
    with Engine(model, tokenizer=byte_level()) as engine:
        monkeypatch.setattr(model.generation_config, "eos_token_id", None)
        assert engine.generate([5], matching("ab"))[0].finish_reason == "stop"  # the tokenizer knows one
    endless = PreTrainedTokenizerFast(tokenizer_object=byte_level().backend_tokenizer)
    with Engine(model, tokenizer=endless) as engine:
        assert engine.generate([5], matching("ab", stop_token_ids=[7]))[0].token_ids[-1] == 7
        with pytest.raises(ValueError, match="structured_outputs: no token ends an answer; set eos_token_id"):
            engine.submit([5], matching("ab"))


def test_xgrammar_may_be_missing(engine, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "xgrammar" else find(name))
    with pytest.raises(RuntimeError, match=re.escape("needs xgrammar to be compiled: pip install '.[structured]'")):
        engine.submit([5], matching("a"))
    assert engine.generate([5], PLAIN)[0].error is None
