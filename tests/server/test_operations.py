"""Sleep, wake and new weights, by HTTP over a socket of their own."""

from __future__ import annotations

import gc
import json
import os
import signal
import stat
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

import compiled_llm
from compiled_llm.client import Client, EngineProcessError
from compiled_llm.engine.engine import Engine
from compiled_llm.protocol.messages import Ready
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.server.engine_process import process
from compiled_llm.server.engine_process.facts import ready_of
from compiled_llm.server.engine_process.operations import Operations
from support.engine.text_tokenizers import byte_level
from support.server.engine_processes import PATIENCE, Loop, engine_in_thread, operating, until
from support.server.running_servers import running_server, serving
from support.tiny_models import tiny_qwen3

PROMPT = list(range(3, 13))
SHORT, LONG = (SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (8, 200))
OPTIONS = ("--mode", "eager", "--warmup", "1", "--kv-memory", "4000 tokens")


def plain(seed: int) -> PreTrainedModel:
    return tiny_qwen3(seed, eos_token_id=None, num_hidden_layers=1, vocab_size=380)


def huggingfaces(model: Any, tokens: int, prompt: list[int] = PROMPT) -> list[int]:
    ids = torch.tensor([prompt])
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens)
    return whole[0, len(prompt) :].tolist()


@contextmanager
def asking(path: Path) -> Iterator[httpx.Client]:
    """Who asks at the socket of operations."""
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(path)), base_url="http://operations", timeout=PATIENCE
    ) as http:
        yield http


class Served(NamedTuple):
    """An engine process with operations, in this process."""

    engine: Engine
    loop: Loop
    path: Path
    operations_path: Path


@pytest.fixture
def engine(one_thread: None) -> Iterator[Engine]:
    options: dict[str, Any] = {"page_size": 4, "kv_memory": "2000 tokens", "max_batch_size": 4, "progress": False}
    model = compiled_llm.wrap(plain(0), mode="eager", **options)
    with Engine(model, tokenizer=byte_level()) as engine:
        yield engine


@pytest.fixture
def served(engine: Engine, folder: Path) -> Iterator[Served]:
    path, operations, tokenizer = folder / "socket", folder / "operations", folder / "tokenizer"
    engine._tokenizer.save_pretrained(tokenizer)
    with engine_in_thread(engine, path, tokenizer=tokenizer) as loop:
        with operating(engine, loop, operations, tokenizer):
            yield Served(engine, loop, path, operations)
        assert not operations.exists()


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with asking(served.operations_path) as http:
        yield http


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    plain(1).save_pretrained(folder)
    return folder


def post(http: httpx.Client, path: str, body: Any = None) -> dict[str, Any]:
    response = http.post(path, content=b"" if body is None else json.dumps(body).encode())
    assert response.status_code == 200, response.text
    return response.json()


def tokens(client: Client, params: SamplingParams = SHORT) -> list[int]:
    (output,) = client.generate([PROMPT], params)
    return output.outputs[0].token_ids


def test_only_its_user_may_open_the_socket(served: Served) -> None:
    assert stat.S_IMODE(served.operations_path.stat().st_mode) == 0o600
    with pytest.raises(RuntimeError, match=r"^operations_uds=.* listens there already"):
        Operations(served.loop.server, served.operations_path)


def test_operations_can_be_asked_once_it_is_ready(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, path = Loop(folder / "socket"), folder / "operations"
    operations, own, answers = Operations(loop.server, path), loop.server.open, []

    def open_after(engine: Engine, ready: Ready) -> None:
        monkeypatch.setattr(loop.server, "open", own)
        answers.append(post(http, "/reset_prefix_cache"))
        sleeping.start()
        own(engine, ready)

    monkeypatch.setattr(loop.server, "open", open_after)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    try:
        operations.start()
        with asking(path) as http, Client(folder / "socket", wait=False) as client:
            sleeping = threading.Thread(target=post, args=(http, "/sleep"))
            ready = ready_of(engine._model, engine, "tiny")
            process._Life(loop.server, lambda report: (engine, ready), 0.0, operations, None)._prepared(loop._loop)
            sleeping.join(PATIENCE)
            assert [answer.keys() for answer in answers] == [{"seconds"}]
            until(lambda: client.doing == "asleep")
            post(http, "/wake")
    finally:
        operations.close()
        loop.close()


def test_new_weights_are_those_of_huggingface(served: Served, http: httpx.Client, weights: Path) -> None:
    with Client(served.path) as client:
        assert tokens(client) == huggingfaces(plain(0), 8)
        assert post(http, "/update_weights", {"folder": str(weights)})["weights"] == str(weights)
        assert tokens(client) == huggingfaces(plain(1), 8)
        assert http.get("/status").json() == {"doing": "ready", "asleep": False, "weights": str(weights)}


def test_asleep_clients_hear_it_and_awake_requests_go_on(served: Served, http: httpx.Client) -> None:
    with Client(served.path) as client:
        running = client.submit(PROMPT, LONG)
        next(iter(running))
        slept = post(http, "/sleep")
        assert slept["asleep"] is True
        assert slept["bytes"] > 0
        assert http.get("/status").json()["asleep"] is True
        until(lambda: client.doing == "asleep")
        with pytest.raises(EngineProcessError, match=r"the engine process is not ready \(asleep\)"):
            client.submit(PROMPT, SHORT)
        with Client(served.path, wait=False) as other, pytest.raises(TimeoutError, match="asleep"):
            other.wait_until_ready(0.05)
        assert not running.done
        assert post(http, "/wake")["asleep"] is False
        client.wait_until_ready(PATIENCE)
        assert running.result(PATIENCE).outputs[0].token_ids == huggingfaces(plain(0), 200)
        assert tokens(client) == huggingfaces(plain(0), 8)
        post(http, "/sleep", {"requests": "end", "weights": True, "graphs": True})
        post(http, "/sleep")  # it does
        post(http, "/wake")
        post(http, "/wake")  # it is


def test_the_prefix_cache_is_emptied(served: Served, http: httpx.Client) -> None:
    with Client(served.path) as client:
        tokens(client)
        assert client.stats().pages.cached > 0  # type: ignore[union-attr]
        post(http, "/reset_prefix_cache")
        assert client.stats().pages.cached == 0  # type: ignore[union-attr]


WRONG: list[tuple[str, bytes, int, str]] = [
    ("/update_weights", b"", 400, "missing required field `folder`"),
    ("/update_weights", b'{"folder": "weights"}', 400, "folder='weights': give an absolute path"),
    ("/update_weights", b'{"folder": "/nowhere"}', 400, "there is no folder '/nowhere'"),
    ("/update_weights", b'{"folder": "/", "requests": "all"}', 400, "Invalid enum value 'all'"),
    ("/update_weights", b'{"folder": "/", "wait": true}', 400, "unknown field `wait`"),
    ("/update_weights", b'{"folder": "\\u0000"}', 400, "folder="),
    ("/update_weights", b'{"folder": "/\\u0000"}', 400, "there is no folder"),
    ("/update_weights", b'{"folder": "/%s"}' % (b"a" * 5000), 400, "aaa…' cannot be read: File name too long"),
    ("/sleep", b"{", 400, "truncated"),
    ("/sleep", b"[]", 400, "Expected `object`"),
    ("/sleep", b"\xff", 400, "malformed"),
    ("/sleep", b'{"level": 1}', 400, "unknown field `level`"),
    ("/wake", b'{"weights": true}', 400, "unknown field `weights`"),
    ("/wake", b" " * 2**17, 413, "the body can have 65,536 bytes"),
    ("/chat", b"", 404, "Not Found"),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), WRONG)
def test_what_is_wrong_is_told_in_a_sentence(
    path: str, body: bytes, status: int, message: str, served: Served, http: httpx.Client
) -> None:
    response = http.post(path, content=body)
    assert response.status_code == status
    assert message in response.json()["error"]
    assert http.get("/status").json() == {"doing": "ready", "asleep": False, "weights": None}
    post(http, "/reset_prefix_cache")


def test_what_is_not_possible_now_is_told_too(served: Served, http: httpx.Client, weights: Path) -> None:
    with Client(served.path) as client:
        running = client.submit(PROMPT, LONG)
        next(iter(running))
        post(http, "/sleep")
        response = http.post("/update_weights", json={"folder": str(weights)})
        assert response.status_code == 409
        assert "the model is asleep, and 1 requests have not ended" in response.json()["error"]
        post(http, "/update_weights", {"folder": str(weights), "requests": "end"})
        post(http, "/wake")
        assert running.result(PATIENCE).outputs[0].finish_reason == "cancelled"
    assert http.get("/wake").status_code == 405


def test_a_second_update_is_refused(served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on, body = threading.Event(), threading.Event(), {"folder": "/a/folder"}

    def slow(*_: object, **__: object) -> None:
        begun.set()
        assert goes_on.wait(PATIENCE)

    monkeypatch.setattr(served.engine, "update_weights", slow)
    first = threading.Thread(target=post, args=(http, "/update_weights", body))
    first.start()
    assert begun.wait(PATIENCE)
    second = http.post("/update_weights", json=body)
    goes_on.set()
    first.join(PATIENCE)
    assert (second.status_code, "another update is in progress" in second.text) == (409, True)
    post(http, "/update_weights", body)


def test_before_the_engine_process_is_ready_it_says_so(path: Path, folder: Path) -> None:
    loop = Loop(path)
    operations = Operations(loop.server, folder / "operations")
    operations.start()
    with asking(folder / "operations") as http:
        assert http.get("/status").json() == {"doing": "starting", "asleep": False, "weights": None}
        response = http.post("/sleep")
        assert (response.status_code, response.json()) == (503, {"error": "the engine process is not ready (starting)"})
    operations.close()
    loop.close()


def test_the_profile_is_saved_before_sleep(
    engine: Engine, path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process may end asleep, and cannot save it then."""
    done: list[str] = []
    monkeypatch.setattr(engine, "sleep", lambda **_: done.append("sleep") or 0)  # type: ignore[func-returns-value]
    with engine_in_thread(engine, path) as loop:
        profile: Any = SimpleNamespace(save=lambda: done.append("save"))
        with operating(engine, loop, folder / "operations", folder, profile), asking(folder / "operations") as http:
            post(http, "/sleep")
    assert done == ["save", "sleep"]


def test_the_port_of_the_api_knows_none_of_it(served: Served, http: httpx.Client) -> None:
    with running_server(served.path) as api_server:
        for path in ("/sleep", "/wake", "/reset_prefix_cache", "/update_weights", "/status"):
            assert api_server.http.post(path, json={}).status_code == 404
            assert api_server.http.get(path).status_code == 404
        question = {"prompt": "a", "max_tokens": 2}
        assert api_server.http.get("/ready").status_code == 200
        api_server.api_server.link._since -= 1000  # it has begun long ago
        post(http, "/sleep")
        until(lambda: api_server.http.get("/ready").json()["doing"] == "asleep")
        assert api_server.http.get("/ready").json()["seconds"] < 1000
        response = api_server.http.post("/v1/completions", json=question)
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert response.json()["error"]["message"] == "the model is not ready: asleep"
        assert api_server.http.get("/metrics").status_code == 200
        post(http, "/wake")
        until(lambda: api_server.http.get("/ready").status_code != 503)
        assert api_server.http.post("/v1/completions", json=question).status_code == 200


# ---- real processes


@pytest.mark.whole
def test_an_engine_process_that_is_started_again_has_operations(
    model_folder: Path, weights: Path, folder: Path
) -> None:
    operations = folder / "operations"
    question = {"prompt": "abc", "max_tokens": 8, "temperature": 0, "logprobs": 0}
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    texts = [tokenizer.decode(huggingfaces(plain(seed), 8, tokenizer("abc").input_ids)) for seed in (0, 1)]
    with (
        serving(model_folder, "--operations-uds", str(operations), *OPTIONS) as (_, url),
        httpx.Client(base_url=url, timeout=PATIENCE) as api_server,
    ):

        def text() -> str:
            until(lambda: api_server.get("/ready").status_code == 200)
            return api_server.post("/v1/completions", json=question).json()["choices"][0]["text"]

        assert text() == texts[0]
        with asking(operations) as http:
            post(http, "/update_weights", {"folder": str(weights)})
            assert text() == texts[1]
            assert api_server.post("/update_weights", json={"folder": str(weights)}).status_code == 404
        found = subprocess.run(["pgrep", "-f", f"operations-uds={operations}"], capture_output=True, text=True)
        os.kill(int(found.stdout), signal.SIGKILL)
        until(lambda: api_server.get("/ready").status_code != 200)
        assert text() == texts[0]  # those that it was started with
        with asking(operations) as http:
            assert http.get("/status").json() == {"doing": "ready", "asleep": False, "weights": None}
            post(http, "/update_weights", {"folder": str(weights)})
            assert text() == texts[1]
