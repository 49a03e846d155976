"""No request within the limits, and no form, stops the others: it is answered, with a bounded amount of memory."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from support.server import loop_recorder
from support.server.engine_processes import PATIENCE, until
from support.server.processes import children, forget_peak, memory_of
from support.server.running_servers import chat_tokenizer, serving
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.whole, pytest.mark.slow]  # of all, or the server would be started twice: slow ones come first


CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
HI = [{"role": "user", "content": "hi"}]
SIZE = 8_000_000
"""Bytes of a body, of 8 MiB that it can have."""
ENTRIES = "texts, arrays and objects"


class Bomb(NamedTuple):
    """A request."""

    name: str  # of what it tries
    path: str  # where it goes
    body: Callable[[], bytes]  # makes it
    message: str = ""  # in the answer; nothing of one that is answered
    status: int = 400  # of the answer


def whole(**body: Any) -> Callable[[], bytes]:
    return lambda: json.dumps(body).encode()


def long(
    field: str, entry: str, size: int = SIZE, before: str = "", after: str = "", **others: Any
) -> Callable[[], bytes]:
    """A body with a list of as many entries as have room."""
    rest = json.dumps(others)[1:-1]

    def made() -> bytes:
        entries = ",".join([entry] * (size // (len(entry) + 1)))
        return f'{{"{field}": {before}[{entries}]{after}{", " if rest else ""}{rest}}}'.encode()

    return made


def calls(entry: str, count: int, times: int) -> Callable[[], bytes]:
    """Calls of an earlier turn, each of which has a list of so many entries in its arguments."""

    def made() -> bytes:
        function = {"name": "a", "arguments": f'{{"a": [{",".join([entry] * count)}]}}'}
        call = {"id": "a", "type": "function", "function": function}
        return json.dumps({"messages": [{"role": "assistant", "tool_calls": [call] * times}]}).encode()

    return made


def names(count: int, value: str) -> str:
    return "{" + ",".join(f'"{number:x}":{value}' for number in range(count)) + "}"


def form(schema: str) -> Callable[[], bytes]:
    return lambda: f"""{{"messages": {json.dumps(HI)}, "response_format":
        {{"type": "json_schema", "json_schema": {{"name": "a", "schema": {schema}}}}}}}""".encode()


STOPS = ["ab" * 15 + f"{number:02x}" for number in range(256)]
TOOL = {"type": "function", "function": {"name": "a", "description": "a" * 60_000}}

EACH_KIND = [
    Bomb("messages without fields", CHAT, long("messages", "{}"), ENTRIES),
    Bomb("many messages, few enough", CHAT, long("messages", '{"role":"user","content":"a"}', 370_000), "tokens"),
    Bomb("one letter a prompt, few enough", TEXT, long("prompt", '"a"', 260_000), "65000 prompts with 1"),
    Bomb("a prompt of many tokens", TEXT, long("prompt", "1"), "4000000 tokens"),
    Bomb("a prompt of short words that might fit", TEXT, whole(prompt="a b " * 500_000), "characters are more"),
    Bomb(
        "input of many thoughts",
        RESPONSES,
        long("input", f'{{"type":"reasoning","content":[{{"type":"reasoning_text","text":"{"a" * 900}"}}]}}'),
        "more",
    ),
    Bomb("lists in the arguments of many calls", CHAT, calls("[]", 20_000, 100), ENTRIES),
    Bomb(
        "many biases", CHAT, whole(messages=HI, logit_bias={str(number): 1 for number in range(60_000)}), "logit_bias"
    ),
    Bomb(
        "many stop strings that nearly repeat",
        TEXT,
        whole(prompt="a", stop=STOPS, max_tokens=50, ignore_eos=True),
        status=200,
    ),
    Bomb(
        "many tokens that are allowed",
        TEXT,
        long("allowed_token_ids", "1", 500_000, prompt="a", max_tokens=1),
        status=200,
    ),
    Bomb(
        "a long fraction",
        CHAT,
        lambda: b'{"temperature": 0.' + b"1" * SIZE + f', "messages": {json.dumps(HI)}, "max_tokens": 1}}'.encode(),
        status=200,
    ),
    Bomb("more levels", CHAT, lambda: b"[" * SIZE, ENTRIES),
    Bomb("a long user", TEXT, whole(prompt="a", user="a" * SIZE, max_tokens=1), status=200),
    Bomb(
        "a schema of many choices",
        CHAT,
        form('{"enum": [' + ",".join(f'"{number}"' for number in range(6_000)) + "]}"),
        status=200,
    ),
    Bomb("tokens to be made text, few enough", DETOKENIZE, long("tokens", "99", 780_000), status=200),
    Bomb(
        "log-probabilities of a prompt",
        TEXT,
        whole(prompt=[5] * 3000, echo=True, logprobs=20, max_tokens=1),
        status=200,
    ),
]
"""One of each kind: bodies of many values, long prompts, fields of which each entry costs, answers that are long."""

BOMBS = [
    *EACH_KIND,
    Bomb("messages that are numbers", CHAT, long("messages", "0"), "messages[0]"),
    Bomb("messages without fields, few enough", CHAT, long("messages", "{}", 190_000), "messages[0].role"),
    Bomb("many messages", CHAT, long("messages", '{"role":"user","content":"a b"}'), ENTRIES),
    Bomb("parts that are numbers", CHAT, long("messages", "0", before='[{"role":"user","content":', after="}]")),
    Bomb("one letter a prompt", TEXT, long("prompt", '"a"'), ENTRIES),
    Bomb("one token a prompt", TEXT, long("prompt", "[1]", 250_000), "prompts with 1"),
    Bomb("a prompt of wrong tokens", TEXT, long("prompt", "1.5"), "prompt"),
    Bomb("prompts of wrong tokens", TEXT, long("prompt", '""', before="[", after="]"), ENTRIES),
    Bomb("a prompt of short words", TEXT, whole(prompt="a b " * (SIZE // 4)), "characters are more"),
    Bomb("128 such prompts", TEXT, whole(prompt=["a b " * 15_000] * 128), "60000 tokens"),
    Bomb("a message of short words", CHAT, whole(messages=[{"role": "user", "content": "a b " * 500_000}]), "more"),
    Bomb("a long input", RESPONSES, whole(input="a b " * 500_000), "characters are more"),
    Bomb("input of wrong items", RESPONSES, long("input", "{}", 190_000), "input"),
    Bomb("lists in what the template reads", CHAT, long("a", "[]", before="", messages=HI), ENTRIES),
    Bomb("lists in a call's arguments", CHAT, calls("[]", 2_000_000, 1), ENTRIES),
    Bomb("unknown fields", CHAT, lambda: names(60_000, "1").encode(), "missing"),
    Bomb(
        "biases that are texts",
        CHAT,
        lambda: f'{{"messages": {json.dumps(HI)}, "logit_bias": {names(30_000, chr(34) * 2)}}}'.encode(),
        "logit_bias",
    ),
    Bomb(
        "longer stop strings",
        TEXT,
        whole(prompt="a", stop=["a" * 2000 + str(number) for number in range(256)]),
        "stop: has",
    ),
    Bomb("many stop tokens", TEXT, long("stop_token_ids", "1", prompt="a"), "stop_token_ids"),
    Bomb("bad words that are texts", TEXT, whole(prompt="a", bad_words=["a b " * 8 for _ in range(256)]), "bad_words"),
    Bomb("too many tokens that are allowed", TEXT, long("allowed_token_ids", "1", prompt="a"), "allowed_token_ids"),
    Bomb("tools that are numbers", CHAT, long("tools", "0", messages=HI), "tools[0]"),
    Bomb("long tools", CHAT, whole(messages=HI, tools=[TOOL] * 128, tool_choice="none"), "two have the name"),
    Bomb("a long number", CHAT, lambda: b'{"top_k": ' + b"1" * SIZE + b"}", "digits"),
    Bomb("levels", CHAT, lambda: b'{"chat_template_kwargs": ' + b'{"a":' * 60_000),
    Bomb("quotes", CHAT, lambda: b'"' * SIZE, ENTRIES),
    Bomb("backslashes", CHAT, lambda: b'"' + b"\\" * SIZE, "no JSON"),
    Bomb("a long name of a model", CHAT, whole(messages=HI, model="a" * SIZE), "model", 404),
    Bomb("a long salt", TEXT, whole(prompt="a", cache_salt="a" * SIZE), "cache_salt"),
    Bomb("a long schema", CHAT, form('{"enum": ["' + "a" * SIZE + '"]}'), "response_format"),
    Bomb("text to be made tokens", TOKENIZE, whole(prompt="a b " * 500_000), "characters are more"),
    Bomb("messages to be made tokens", TOKENIZE, long("messages", "0"), "messages[0]"),
    Bomb("tokens to be made text", DETOKENIZE, long("tokens", "99"), "tokens"),
    Bomb("tokens that are texts", DETOKENIZE, long("tokens", '""', 190_000), "tokens[0]"),
    Bomb("log-probabilities of long prompts", TEXT, whole(prompt=[[5] * 3000] * 5, echo=True, logprobs=20), "logprobs"),
    Bomb(
        "log-probabilities of many answers",
        CHAT,
        whole(messages=HI, n=32, max_tokens=30, logprobs=True, top_logprobs=20),
        status=200,
    ),
]


OPTIONS = ("--mode", "eager", "--warmup", "1,8", "--kv-memory", "30000 tokens")
MIB = 2**20
LEFT = 96 * MIB
"""What a server may have more after all bombs than before: what libraries do at their first use, and its pools."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of many positions, and a token so long that not even 8 MB of text have surely too many."""
    folder = tmp_path_factory.mktemp("served") / "tiny-model"
    positions = {"max_position_embeddings": 2**14}
    tiny_qwen3(eos_token_id=1, num_hidden_layers=1, vocab_size=384, **positions).save_pretrained(folder)
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["=" * 400])
    tokenizer.save_pretrained(folder)
    return folder


class Recorded(NamedTuple):
    """A server whose loops are recorded from when it is ready, its two processes, and a client of it."""

    processes: tuple[int, int]
    http: httpx.Client
    notes: Path


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    notes = tmp_path_factory.mktemp("notes")
    command = (sys.executable, loop_recorder.__file__)
    with pytest.MonkeyPatch.context() as patch, httpx.Client(timeout=PATIENCE, verify=False) as http:
        patch.setenv(loop_recorder.FOLDER, str(notes))
        with serving(model_folder, *OPTIONS, command=command) as (process, url):
            http.base_url = url  # type: ignore[assignment]
            until(lambda: http.get("/ready").status_code == 200)
            for _ in range(3):
                assert http.post(TEXT, json={"prompt": "a", "max_tokens": 4}).status_code == 200
            for file in notes.iterdir():
                file.unlink()  # it has imported much
            (engine_process,) = children(process.pid)
            yield Recorded((process.pid, engine_process), http, notes)


def throw(http: httpx.Client, processes: tuple[int, int], bomb: Bomb) -> None:
    """Have a bomb answered, and see that it takes no more than it may."""
    body = bomb.body()
    for process in processes:
        forget_peak(process)
    before = [memory_of(process) for process in processes]
    answer = http.post(bomb.path, content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, bomb.message in answer.text) == (bomb.status, True), (bomb.name, answer.text[:300])
    assert len(answer.content) < 2000 or bomb.status == 200
    for process, start in zip(processes, before, strict=True):
        taken = memory_of(process, peak=True) - start
        assert taken < 64 * MIB + 30 * len(body), f"{bomb.name}: {taken / MIB:.0f} MiB"


def assert_given_back(http: httpx.Client, processes: tuple[int, int], before: list[int]) -> None:
    until(lambda: [memory_of(process) < start + LEFT for process, start in zip(processes, before, strict=True)])
    until(lambda: "compiled_llm_running 0.0" in http.get("/metrics").text)
    assert "compiled_llm_waiting 0.0" in http.get("/metrics").text


@pytest.mark.parametrize("bombs", [EACH_KIND, pytest.param(BOMBS, marks=pytest.mark.whole)], ids=["each kind", "all"])
def test_no_request_takes_more_than_it_may_or_keeps_a_loop(server: Recorded, bombs: list[Bomb]) -> None:
    processes, http, notes = server
    before = [memory_of(process) for process in processes]
    for bomb in bombs:
        throw(http, processes, bomb)
        assert loop_recorder.noted(notes) == [], bomb.name
    assert_given_back(http, processes, before)


# ---- forms that would crash xgrammar, or the process that compiles them

BOMB = {"type": "string", "pattern": "(" * 32_000 + "a" + ")" * 32_000}
YES = {"enum": ["yes"]}


def asked(http: httpx.Client, schema: Any, **others: Any) -> httpx.Response:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "response_format": form, **others}
    return http.post("/v1/chat/completions", json={"model": "tiny-model", **body})


def workers_of(process: int) -> list[int]:
    """The processes below one that compile grammars."""
    children = [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    script = [child for child in children if b"worker_script.py" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return [*script, *(worker for child in children if child not in script for worker in workers_of(child))]


def assert_answers(http: httpx.Client) -> None:
    answer = asked(http, YES)
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) == "yes"


def test_a_pattern_of_32000_groups_leaves_the_server_as_it_is(server: Recorded) -> None:
    (process, _), http, _ = server
    (worker,) = workers_of(process)
    for streams in (False, True) * 3:
        answer = asked(http, BOMB, stream=streams)
        assert answer.status_code == 400, answer.text
        assert "has 32,000 parentheses in a pattern; a form can have 1,000" in answer.json()["error"]["message"]
    assert_answers(http)
    assert workers_of(process) == [worker]


def test_a_worker_that_is_killed_costs_no_more_than_a_request(server: Recorded) -> None:
    (process, _), http, _ = server
    assert_answers(http)
    (worker,) = workers_of(process)
    os.kill(worker, signal.SIGKILL)
    until(lambda: ") Z " in Path(f"/proc/{worker}/stat").read_text())  # its sockets are closed by then
    for number in range(3):
        answer = asked(http, {"enum": [number]})
        assert answer.status_code == 200, answer.text
    assert len(workers_of(process)) == 1


@pytest.mark.parametrize("streams", [False, True])
def test_what_turns_out_late_is_the_clients_mistake(server: Recorded, streams: bool) -> None:
    http = server.http
    for schema in ({"type": "string", "pattern": "a(b"}, {"$ref": "#/a"}, {"$ref": "#"}):
        answer = asked(http, schema, stream=streams)
        assert answer.status_code == 400, answer.text
        assert "Retry-After" not in answer.headers
    assert_answers(http)
