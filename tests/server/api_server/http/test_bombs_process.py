"""No request within the limits, and no form, stops the others: it is answered, with a bounded amount of memory."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from support.server import loop_recorder
from support.server.bombs import BOMBS, EACH_KIND, Bomb
from support.server.engine_processes import PATIENCE, until
from support.server.processes import children, forget_peak, memory_of
from support.server.running_servers import chat_tokenizer, serving
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.slow  # of all, or the server would be started twice: slow tests come first

OPTIONS = ("--mode", "eager", "--warmup", "1,8", "--kv-memory", "30000 tokens")
TEXT = "/v1/completions"
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
