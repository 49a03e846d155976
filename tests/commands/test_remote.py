"""`client` and `chat` ask a server at a socket or a URL, and import neither torch nor transformers for that."""

from __future__ import annotations

import json
import socket as sockets
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.client import Client
from compiled_llm.client.remote_tokenizer import RemoteTokenizer
from compiled_llm.commands.remote.http_api import HttpApi
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams
from support.characters import character_tokenizer
from support.commands.command_line import greedy, invoke
from support.server.engine_processes import engine_in_thread
from support.server.running_servers import running_server

GREEDY = ("--max-tokens", "20", "--greedy")


@pytest.fixture
def url(socket: Path) -> Iterator[str]:
    """An API server of the model."""
    with running_server(socket) as server:
        yield server.url


@pytest.fixture(params=["socket", "url"])
def server(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def test_a_client_writes_the_same_text_from_a_socket_and_a_url(model_folder: Path, server: str) -> None:
    done = invoke("client", "Hi there", "--raw", "--server", server, *GREEDY)
    assert (done.exit_code, done.stdout) == (0, f"{greedy(model_folder, 'Hi there', 20)[1]}\n"), done.stderr
    assert "20 tokens in " in done.stderr
    assert done.stderr.endswith(" tokens/s, length\n")
    text = greedy(model_folder, "<system: Brief><user: Hi>", 20)[1]
    for asked in ([], ["--chat"]):
        done = invoke("client", "Hi", *asked, "--system", "Brief", "--server", server, "--quiet", *GREEDY)
        assert (done.exit_code, done.stdout, done.stderr) == (0, f"{text}\n", "")


def test_token_ids_go_and_come(engine: Engine, server: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20)
    (expected,) = engine.generate([[3, 4, 5]], params)
    done = invoke("client", "3,4,5", "--ids", "--server", server, *GREEDY)
    assert (done.exit_code, done.stdout) == (0, f"{','.join(map(str, expected.token_ids))},\n"), done.stderr


def test_a_stop_string_ends_the_answer(model_folder: Path, server: str) -> None:
    text = greedy(model_folder, "Hi there", 20)[1]
    done = invoke("client", "Hi there", "--raw", "--server", server, "--stop", text[7:9], *GREEDY)
    assert (done.exit_code, done.stdout) == (0, f"{text[: text.index(text[7:9])]}\n"), done.stderr
    assert done.stderr.endswith(" tokens/s, stop\n")


def test_a_chat_over_http_goes_on(model_folder: Path, url: str) -> None:
    done = invoke(
        "chat", "--server", url, "--max-tokens", "20", "--quiet", stdin="Hi there\n/stats\nforbidden\nAgain\n"
    )
    first = greedy(model_folder, "<user: Hi there>", 20)[1]
    second = greedy(model_folder, f"<user: Hi there><assistant: {first}><user: Again>", 20)[1]
    assert done.stdout == f"{first}\n{second}\n"
    assert f"its figures are at {url}/metrics" in done.stderr
    assert "last answer  20 tokens in" in done.stderr
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("error"))
    assert error.startswith("error: the server says: ")
    assert "no such message" in error


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("command", [("client", "Hi"), ("client", "Hi", "--raw"), ("chat",)])
def test_neither_torch_nor_transformers_is_imported_for_it(command: tuple[str, ...], server: str) -> None:
    code = """
import sys
from compiled_llm.commands.app import app
app(sys.argv[1:], standalone_mode=False)
print(*({"torch", "transformers", "triton", "tokenizers", "numpy"} & sys.modules.keys()), "left out")
"""
    asking = [sys.executable, "-c", code, *command, "--server", server, "--max-tokens", "5"]
    done = subprocess.run(asking, input="Hi\n", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "transformers", "triton"} & set(done.stdout.splitlines()[-1].split()), done.stdout


def test_an_engine_process_makes_tokens_and_text_as_its_tokenizer_does(engine: Engine, socket: Path) -> None:
    tokenizer: Any = engine.tokenizer
    remote = RemoteTokenizer(socket)
    ids = tokenizer("Hello, world")["input_ids"]
    assert remote("Hello, world") == {"input_ids": ids}
    assert remote.decode(ids) == tokenizer.decode(ids)
    messages = [{"role": "user", "content": "hi"}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert remote.apply_chat_template(messages)["input_ids"] == chat["input_ids"]
    with pytest.raises(ValueError, match="the model's chat template refuses this: no such message"):
        remote.apply_chat_template([{"role": "user", "content": "forbidden"}])


def test_many_questions_at_once_are_all_answered(engine: Engine, socket: Path) -> None:
    tokenizer: Any = engine.tokenizer
    remote, texts = RemoteTokenizer(socket), [f"text {number}" for number in range(100)]
    with ThreadPoolExecutor(50) as threads:
        answers = list(threads.map(remote, texts))
    assert [answer["input_ids"] for answer in answers] == [tokenizer(text)["input_ids"] for text in texts]
    with pytest.raises(ValueError, match=r"the prompt has 4,194,305 characters; there can be 4,194,304"):
        remote("x" * (2**22 + 1))


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        (None, "the engine process has no tokenizer; give token ids"),
        (
            character_tokenizer(),
            "this model's tokenizer has no chat template; ask without a chat; --raw sends the prompt as a text",
        ),
    ],
)
def test_what_an_engine_process_lacks_is_said(
    engine: Engine, path: Path, tokenizer: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_tokenizer", tokenizer)
    with engine_in_thread(engine, path):
        done = invoke("client", "Hi", "--server", str(path))
        assert (done.exit_code, done.stderr) == (2, f"error: {said}\n")


def test_a_key_comes_from_a_file_or_the_environment(socket: Path, tmp_path: Path, monkeypatch) -> None:
    key = "a" * 16
    (tmp_path / "key").write_text(f"{key}\n")
    with running_server(socket, api_keys=(key,)) as server:
        asking = ("client", "Hi", "--server", f"{server.url}/v1", "--max-tokens", "5", "--quiet")
        refused = invoke(*asking)
        assert (refused.exit_code, "give --api-key-file, or set COMPILED_LLM_API_KEY" in refused.stderr) == (1, True)
        assert invoke(*asking, "--api-key-file", str(tmp_path / "key")).exit_code == 0
        monkeypatch.setenv("COMPILED_LLM_API_KEY", key)
        assert invoke(*asking).exit_code == 0


@contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """The URL of a server that has one answer to each request, and says nothing else."""
    with sockets.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for answer in answers:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(2**16)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def http(status: int, content: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(content), content)


NOT_FOUND, MODELS = http(404, b"no"), http(200, b'{"data": [{"id": "a"}]}')
EVENT = b'data: {"choices": [{"text": "Hi", "finish_reason": null}]}\n\n'


def test_a_server_that_is_not_ready_is_waited_for_and_shows_what_it_does() -> None:
    preparing = http(503, json.dumps({"ready": False, "doing": "compiling decode"}).encode())
    whole = http(200, EVENT + b'data: {"choices": [{"text": "!", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n')
    with answering(preparing, preparing, http(200, b"{}"), MODELS, whole) as url:
        done = invoke("client", "x", "--server", url)
    assert (done.exit_code, done.stdout) == (0, "Hi!\n")
    assert "the server is not ready: compiling decode" in done.stderr
    assert "2 tokens in " in done.stderr


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([NOT_FOUND, http(500, b"oh")], "the server says: status 500 X"),
        ([NOT_FOUND, MODELS, http(400, b'{"error": {"message": "too long"}}')], "the server says: too long"),
        ([NOT_FOUND, MODELS, http(422, b'{"detail": "no field a"}')], "the server says: no field a"),
        ([NOT_FOUND, MODELS, http(200, EVENT)], "the server has ended the answer before its end"),
        ([NOT_FOUND, MODELS, http(200, EVENT + b"data: {\n\n")], "the server has ended the answer: "),
        ([NOT_FOUND, MODELS, http(200, EVENT + b'data: {"error": {"message": "died"}}\n\n')], "the server says: died"),
        ([b"no HTTP"], "cannot be reached: "),
    ],
)
def test_what_a_server_says_is_told_in_one_line(answers: list[bytes], said: str) -> None:
    with answering(*answers) as url:
        done = invoke("client", "x", "--server", url)
    assert done.exit_code in (1, 2)
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert said in done.stderr


def test_a_server_that_is_none_is_named_with_how_to_start_one() -> None:
    with pytest.raises(
        RuntimeError, match=r"--server http://127.0.0.1:1: cannot be reached: Connection refused; start"
    ):
        HttpApi("http://127.0.0.1:1/v1").wait_until_ready(quiet=True)


def test_a_client_that_is_interrupted_ends_its_request(engine: Engine, socket: Path) -> None:
    with running_server(socket) as server:
        answer = HttpApi(server.url).submit("tiny", "x", {"max_tokens": 900, "temperature": 0.0})
        next(answer.text())
        answer.cancel()
        with Client(socket) as client:
            while client.stats().running:
                pass
