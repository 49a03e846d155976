"""Forms that would crash xgrammar, and the process that compiles them, at a server as the command starts it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.server.engine_processes import PATIENCE, until
from support.server.running_servers import chat_tokenizer, serving
from support.tiny_models import tiny_qwen3

pytest.importorskip("xgrammar")

BOMB = {"type": "string", "pattern": "(" * 32_000 + "a" + ")" * 32_000}
YES = {"enum": ["yes"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, httpx.Client]]:
    folder = tmp_path_factory.mktemp("served") / "tiny-model"
    tiny_qwen3(eos_token_id=1, num_hidden_layers=1, vocab_size=380).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    options = ("--mode", "eager", "--warmup", "1", "--kv-memory", "20000 tokens")
    with serving(folder, *options) as (process, url), httpx.Client(base_url=url, timeout=PATIENCE) as http:
        until(lambda: http.get("/ready").status_code == 200)
        yield process.pid, http


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


def test_a_pattern_of_32000_groups_leaves_the_server_as_it_is(server: tuple[int, httpx.Client]) -> None:
    process, http = server
    (worker,) = workers_of(process)
    for streams in (False, True) * 3:
        answer = asked(http, BOMB, stream=streams)
        assert answer.status_code == 400, answer.text
        assert "has 32,000 parentheses in a pattern; a form can have 1,000" in answer.json()["error"]["message"]
    assert_answers(http)
    assert workers_of(process) == [worker]


def test_a_worker_that_is_killed_costs_no_more_than_a_request(server: tuple[int, httpx.Client]) -> None:
    process, http = server
    assert_answers(http)
    (worker,) = workers_of(process)
    os.kill(worker, signal.SIGKILL)
    until(lambda: workers_of(process) != [worker] or b"worker" not in Path(f"/proc/{worker}/cmdline").read_bytes())
    for number in range(3):
        assert asked(http, {"enum": [number]}).status_code == 200
    assert len(workers_of(process)) == 1


@pytest.mark.parametrize("streams", [False, True])
def test_what_turns_out_late_is_the_clients_mistake(server: tuple[int, httpx.Client], streams: bool) -> None:
    _, http = server
    for schema in ({"type": "string", "pattern": "a(b"}, {"$ref": "#/a"}, {"$ref": "#"}):
        answer = asked(http, schema, stream=streams)
        assert answer.status_code == 400, answer.text
        assert "Retry-After" not in answer.headers
    assert_answers(http)
