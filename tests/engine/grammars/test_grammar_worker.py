"""Grammars that are compiled in a worker process: a crash costs one request, and masks are the same."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from compiled_llm.engine.apart.exchange import Failed
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.grammars.compilers_apart import CompilersApart
from compiled_llm.engine.grammars.form import GrammarForm
from compiled_llm.engine.grammars.forms.grammar_source import GrammarSource
from compiled_llm.engine.grammars.worker_messages import Compile, Compiled, Vetted, WorkerVocabulary
from compiled_llm.engine.grammars.worker_process import WorkerProcess
from compiled_llm.engine.steps.request import InvalidRequestError, RequestError
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.requests.structured_outputs import StructuredOutputsParams
from support.engine.text_tokenizers import byte_level
from support.engine.tiny_engines import PATIENCE
from support.parity import assert_account_is_empty
from support.server.engine_processes import until

xgr = pytest.importorskip("xgrammar")
pytestmark = pytest.mark.usefixtures("one_thread")

CRASH = json.dumps({"type": "string", "pattern": "(" * 32_000 + "a" + ")" * 32_000})
ENDLESS = '{"type":"object","properties":{"a":' * 450 + "{}" + '},"required":["a"]}' * 450
"""Compiled for ten seconds or longer."""
MEMORY = '{"anyOf":[' * 3000 + "{}" + "]}" * 3000
INFO = xgr.TokenizerInfo([bytes([byte]) for byte in range(256)] + [b"true", b'":', b"  ", b"12"], stop_token_ids=[0])


def asking(kind: Any, text: str, seconds: int = 30, memory: int = 2**29) -> Compile:
    return Compile(0, GrammarSource(kind, text), seconds, memory)


def wanted() -> bool:
    return True


@pytest.fixture(scope="module")
def vocabulary() -> WorkerVocabulary:
    return WorkerVocabulary(0, INFO.serialize_json(), 1)


def forks_of(worker: WorkerProcess) -> list[int]:
    return [int(child) for child in Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()]


# ---- the process


def test_what_a_form_dies_of_is_said_and_the_next_one_is_compiled(lasting_worker, vocabulary):
    for asked, kind, message in (
        (asking("json", CRASH), "crash", "xgrammar ends its process by SIG"),
        (asking("json", ENDLESS, seconds=1), "limit", "it takes more than 1 s of processor time"),
        (asking("json", MEMORY, memory=2**27), "limit", "it takes more than 134,217,728 bytes of memory"),
        (asking("regex", "a(b"), "invalid", "Regex parsing error at position 4"),
    ):
        answer = lasting_worker.compile(asked, vocabulary, wanted)
        assert isinstance(answer, Failed)
        assert answer.kind == kind, answer
        assert answer.message.startswith(message)
        assert isinstance(lasting_worker.compile(asking("regex", "ab"), vocabulary, wanted), Compiled)


WRONG_TAGS = [
    {"structures": [{"begin": "a"}], "triggers": ["a"]},
    {"structures": [], "triggers": 5},
    {"structures": None},
    {"structures": [{"begin": "a", "schema": {}, "end": 5}], "triggers": ["a"]},
    {"format": {"type": "colour"}},
    {"format": None},
    {"format": {"type": "json_schema"}},
    {"format": {"type": "json_schema", "json_schema": 5}},
    {"format": {"type": "tag", "begin": [], "content": [], "end": {}}},
    {"type": 5},
    {},
]


def test_a_wrong_structural_tag_is_its_clients_mistake(lasting_worker, vocabulary):
    for tag in WRONG_TAGS:
        answer = lasting_worker.compile(asking("structural_tag", json.dumps(tag)), vocabulary, wanted)
        assert isinstance(answer, Failed), tag
        assert answer.kind == "invalid", (tag, answer)


def test_a_worker_that_is_killed_is_started_again(lasting_worker, vocabulary):
    assert isinstance(lasting_worker.compile(asking("regex", "ab"), vocabulary, wanted), Compiled)
    first = lasting_worker.pid
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert isinstance(lasting_worker.compile(asking("regex", "ab"), vocabulary, wanted), Compiled)
    assert lasting_worker.pid != first


def test_other_tokens_take_the_place_of_those_with_their_number(lasting_worker, vocabulary):
    other = xgr.TokenizerInfo(["x", "a", "b"], stop_token_ids=[0])
    for info, sent in ((INFO, vocabulary), (other, WorkerVocabulary(0, other.serialize_json(), 1)), (INFO, vocabulary)):
        answer = lasting_worker.compile(asking("regex", "ab"), sent, wanted)
        assert isinstance(answer, Compiled)
        assert xgr.CompiledGrammar.deserialize_json(answer.grammar, info).tokenizer_info.vocab_size == info.vocab_size


def test_the_worker_imports_neither_torch_nor_what_lies_in_the_current_folder(tmp_path, monkeypatch, vocabulary):
    for name in ("msgspec", "xgrammar", "numpy", "compiled_llm", "selectors"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'planted')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    with closing(WorkerProcess()) as worker:
        worker.learn(vocabulary)
        assert "libtorch" not in Path(f"/proc/{worker.pid}/maps").read_text()
        assert len(list(Path(f"/proc/{worker.pid}/task").iterdir())) == 1, "a process with threads must not fork"
        assert os.getsid(worker.pid) != os.getsid(0), "Ctrl-C would reach it"
    assert not (tmp_path / "planted").exists()


@pytest.mark.whole
def test_a_version_of_xgrammar_that_does_not_come_apart_is_imported_as_a_whole(tmp_path, monkeypatch, vocabulary):
    shadow = tmp_path / "xgrammar"
    shadow.mkdir()
    home = Path(xgr.__file__).parent
    for entry in home.iterdir():
        (shadow / entry.name).symlink_to(entry)
    (shadow / "exception.py").unlink()  # one of the modules that compile has gone, or needs more than they do
    (shadow / "exception.py").write_text(f"import torch\n{(home / 'exception.py').read_text()}")
    monkeypatch.syspath_prepend(tmp_path)
    with closing(WorkerProcess()) as worker:
        assert isinstance(worker.compile(asking("regex", "ab"), vocabulary, wanted), Compiled)
        assert "libtorch" in Path(f"/proc/{worker.pid}/maps").read_text()


def test_the_worker_ends_with_the_process_that_has_started_it(tmp_path):
    script = tmp_path / "starting.py"
    script.write_text(
        "import os, sys, signal\n"
        f"sys.path[:] = {sys.path!r}\n"
        "from compiled_llm.engine.grammars.worker_process import WorkerProcess\n"
        "print(WorkerProcess().pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == -signal.SIGKILL
    stat = Path(f"/proc/{int(done.stdout)}/stat")
    until(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")


# ---- the same masks


def schema_at_random(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["string", "integer", "boolean", "null", "enum", "pattern", "number"]
    kind = rng.choice(kinds if depth > 2 else [*kinds, "object", "array", "anyOf", "object"])
    if kind == "enum":
        return {"enum": rng.sample(["a", "true", 12, None, "ab c", 3.5], rng.randint(1, 4))}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["[a-f]{2,5}", "^(ab|cd)+$", "x?y*z", "."])}
    if kind == "string":
        return {"type": "string", **rng.choice([{}, {"maxLength": rng.randint(1, 9)}, {"format": "date"}])}
    if kind == "integer":
        return {"type": "integer", **rng.choice([{}, {"minimum": rng.randint(-20, 5), "maximum": rng.randint(6, 300)}])}
    if kind == "array":
        return {"type": "array", "items": schema_at_random(rng, depth + 1), "maxItems": rng.randint(1, 5)}
    if kind == "anyOf":
        return {"anyOf": [schema_at_random(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
    if kind == "object":
        properties = {f"p{n}": schema_at_random(rng, depth + 1) for n in range(rng.randint(0, 4))}
        required = [name for name in properties if rng.random() < 0.6]
        return {"type": "object", "properties": properties, "required": required}
    return {"type": kind}


def assert_same_masks(rng: random.Random, *grammars: Any) -> None:
    """Walk through grammars by tokens at random, and compare what each allows."""
    matchers = [xgr.GrammarMatcher(grammar) for grammar in grammars]
    for _ in range(40):
        masks = [np.zeros((1, -(-INFO.vocab_size // 32)), dtype=np.int32) for _ in matchers]
        for matcher, mask in zip(matchers, masks, strict=True):
            matcher.fill_next_token_bitmask(mask)
        assert (masks[0] == masks[1]).all()
        bits = np.unpackbits(masks[0].view(np.uint8), bitorder="little")
        allowed = [int(token) for token in np.flatnonzero(bits) if 0 < token < INFO.vocab_size]
        if not allowed:
            return
        token = rng.choice(allowed)
        assert {matcher.accept_token(token) for matcher in matchers} == {True}


def test_masks_are_those_of_grammars_compiled_in_this_process(lasting_worker, vocabulary, request):
    seed, count = random.randrange(2**32), 500 if request.config.getoption("--whole") else 40
    print("seed", seed)
    rng, compiler = random.Random(seed), xgr.GrammarCompiler(INFO)
    for _ in range(count):
        blanks = rng.choice([None, 2])
        source = StructuredOutputsParams(json=schema_at_random(rng), disable_any_whitespace=rng.random() < 0.5).source
        source = source._replace(max_whitespace_cnt=blanks)
        answer = lasting_worker.compile(Compile(0, source, 30, 2**29), vocabulary, wanted)
        assert isinstance(answer, Compiled), (source, answer)
        assert_same_masks(rng, source.compiled(compiler), xgr.CompiledGrammar.deserialize_json(answer.grammar, INFO))


def test_what_compiles_within_its_limits_is_not_refused_for_what_it_takes_to_send(lasting_worker):
    """Each bounded string adds five megabytes of text and a hundred of memory to write it, and little of its own."""
    properties = {f"p{number}": {"type": "string", "maxLength": 1000 + number} for number in range(6)}
    source = StructuredOutputsParams(json={"type": "object", "properties": properties}).source
    vocabulary = WorkerVocabulary(0, INFO.serialize_json(), 4)
    answer = lasting_worker.compile(Compile(0, source, 30, 2**27), vocabulary, wanted)
    assert isinstance(answer, Vetted), answer


@pytest.mark.whole
def test_a_large_grammar_is_vetted_there_and_compiled_here(worker, vocabulary):
    large = GrammarSource("regex", "[a-y]" * 40_000)
    assert isinstance(worker.compile(Compile(0, large, 30, 2**29), vocabulary, wanted), Vetted)
    compilers = CompilersApart(byte_level(), worker, 30.0)
    grammar = compilers.compile(GrammarForm(source=large, stops=frozenset({1}), vocabulary=380), wanted)
    assert grammar.memory_size_bytes > 2**23


# ---- an engine


@pytest.fixture
def engine(model: PreTrainedModel, worker: WorkerProcess) -> Iterator[Engine]:
    with Engine(model, tokenizer=byte_level(), grammar_worker=worker) as engine:
        yield engine
    assert_account_is_empty(model)


def answering(**form: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**form), max_tokens=20, seed=1)


def unbounded(schema: str) -> SamplingParams:
    """A form that the bounds would refuse."""

    class Unbounded(StructuredOutputsParams):
        source = property(lambda self: GrammarSource("json", schema))

    return SamplingParams(structured_outputs=Unbounded(json={}), max_tokens=20, seed=1)


def test_a_form_that_crashes_costs_its_request_alone_and_is_refused_from_then_on(engine):
    engine.warmup([1], structured=True)
    forms = [unbounded(CRASH), answering(regex="a(b"), answering(regex="ab"), answering(choice=["yes"])]
    crashed, invalid, *good = engine.generate([[5]] * 4, forms)
    assert [output.text for output in good] == ["ab", "yes"]
    for bad, said in ((crashed, "xgrammar ends its process by SIG"), (invalid, "Regex parsing error at position 4")):
        assert isinstance(bad.error, InvalidRequestError)
        assert f"no grammar could be compiled: {said}" in str(bad.error)
    with pytest.raises(ValueError, match=r"^structured_outputs: could not compile json=.*: xgrammar ends its"):
        engine.submit([5], unbounded(CRASH))
    assert engine.generate([5], answering(regex="cd"))[0].text == "cd"


def test_the_forms_that_are_refused_take_bounded_memory(engine, monkeypatch):
    monkeypatch.setattr("compiled_llm.engine.grammars.compilers_apart._MAX_FATAL", 2)
    compilers = engine._grammars._compilers
    assert isinstance(compilers, CompilersApart)
    sources = [GrammarSource("regex", text) for text in "abc"]
    for source in sources:
        compilers._remember(source, "it has crashed")
    compilers.check(sources[0])
    for source in sources[1:]:
        with pytest.raises(ValueError, match="it has crashed"):
            compilers.check(source)


def test_a_request_whose_client_has_left_stops_its_form(engine, worker):
    params = unbounded(ENDLESS)
    handles = [engine.submit([5], params) for _ in range(2)]
    until(lambda: forks_of(worker))
    assert engine.generate([5], answering(regex="ab"))[0].text == "ab"
    assert not any(handle.done for handle in handles), "it has waited for them"
    handles[0].cancel()
    assert forks_of(worker), "another one waits for it"
    handles[1].cancel()
    until(lambda: not forks_of(worker))
    late = engine.submit([5], params)
    until(lambda: forks_of(worker))
    late.cancel()
    until(lambda: not forks_of(worker))


def test_a_form_that_takes_too_long_is_cut_off(model, worker):
    with Engine(model, tokenizer=byte_level(), grammar_worker=worker, grammar_timeout=0.3) as engine:
        engine._grammars.prepare(380, frozenset({1}))
        bad = engine.generate([5], unbounded(ENDLESS))[0]
        assert isinstance(bad.error, InvalidRequestError)
        assert "not compiled within grammar_timeout=0.3 s" in str(bad.error)
        until(lambda: not forks_of(worker))


def test_a_worker_that_dies_in_the_middle_ends_with_an_error_of_the_server(engine, worker):
    handle = engine.submit([5], unbounded(ENDLESS))
    until(lambda: forks_of(worker))
    os.kill(forks_of(worker)[0], signal.SIGKILL)
    with pytest.raises(RequestError, match="the process that compiled it was ended by SIGKILL") as at:
        handle.result(PATIENCE)
    assert not isinstance(at.value, InvalidRequestError), "it was not the client's mistake, and may go well again"
    assert engine.generate([5], answering(regex="ab"))[0].text == "ab"
