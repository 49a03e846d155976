"""`compiled-llm bench serve`: the same requests in process, over the socket and over HTTP, and to other servers."""

from __future__ import annotations

import asyncio
import http.server
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import compiled_llm
from compiled_llm import Engine
from compiled_llm.commands.bench import models
from compiled_llm.commands.bench.report import Report
from compiled_llm.commands.bench.results import ManyStreams, OneStream
from compiled_llm.commands.bench.serving.clients import socket_client
from compiled_llm.commands.bench.serving.model_folder import ModelFolder, made_up_tokenizer
from compiled_llm.commands.bench.serving.pieces import pieces
from compiled_llm.commands.bench.serving.server_process import running
from compiled_llm.commands.bench.serving.workloads import Asked
from compiled_llm.commands.bench.tables import tables_of
from compiled_llm.commands.bench.timing import Percentiles
from compiled_llm.commands.bench.workers.http_client import Answer, HttpClient, answer_of
from compiled_llm.commands.bench.workers.silence import Silence
from compiled_llm.commands.bench.workload import Workload
from support.bench import CPU, PNG, invoke, new_report, new_setup
from support.fronts import RunningFront, fronting
from support.generators import generating
from support.tiny_models import tiny_qwen3

SMALL = (
    *("--model", "tiny", "--device", "cpu", "--mode", "eager", "--prompts", "6,20", "--new", "5", "--requests", "2"),
    *("--streams", "3", "--stream-tokens", "8", "--rates", "8", "--seconds", "0.5", "--runs", "2"),
    *("--arriving-prompts", "4-8", "--arriving-answers", "3-6"),
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, RunningFront]]:
    """A generator and a front in this process, of a model with as many tokens as `tiny`."""
    folder = tmp_path_factory.mktemp("served")
    made_up_tokenizer(512).save_pretrained(folder / "tokenizer")
    model = compiled_llm.wrap(tiny_qwen3(vocab_size=512), mode="eager", progress=False, kv_memory="4000 tokens")
    path = folder / "s"
    with Engine(model) as engine, generating(engine, path, folder / "tokenizer"), fronting(path) as front:
        yield path, front


def test_a_server_is_measured_by_its_url(served: tuple[Path, RunningFront], tmp_path: Path) -> None:
    path, picture = tmp_path / "results.json", tmp_path / "picture.png"
    url = f"mine={served[1].url}/v1"
    done = invoke("serve", *SMALL, "--contenders", "", "--peer-url", url, "--json", str(path), "--plot", str(picture))
    assert done.exit_code == 0, done.output
    report = Report.load(path)
    assert [(result.contender, result.prompt, len(result.first_s)) for result in report.one_stream] == [
        ("mine", 6, 2),
        ("mine", 20, 2),
    ]
    assert all(result.first.p50 > 0 and 0 < result.pieces <= 10 for result in report.one_stream)
    (many,) = report.many_streams
    assert (many.streams, many.new, len(many.seconds)) == (3, 8, 2)
    assert 0 < many.first_s.p50 <= many.first_s.most < max(many.seconds)
    (online,) = report.online
    assert online.rate == 8
    assert online.counts["cached tokens"] == 0, "prompts are new in each pass"
    assert picture.read_bytes().startswith(PNG)
    assert "mine" in done.stdout


@pytest.mark.parametrize("busy_poll", [0.0, 0.01])
def test_a_generator_is_asked_at_its_socket(served: tuple[Path, RunningFront], busy_poll: float) -> None:
    asked = [Asked([3 + number, 5, 7], 6, 0.01 * number) for number in range(3)]
    with socket_client(new_setup([Workload(1, 3, 6)]), served[0], busy_poll) as session:
        answered = session.run(asked, 0.0)
    assert [len(times) for times in answered.times] == [6, 6, 6]
    assert all(times == sorted(times) for times in answered.times)
    assert answered.times[2][0] > asked[2].arrival


def test_what_a_server_refuses_is_told(served: tuple[Path, RunningFront]) -> None:
    options = ("--streams", "", "--rates", "", "--prompts", "8")
    url = f"mine={served[1].url}/v1"
    done = invoke("serve", *SMALL, *options, "--new", "100000", "--contenders", "", "--peer-url", url)
    assert done.exit_code == 1
    assert "mine, 2 requests" in done.output
    assert "max_tokens" in done.output


@pytest.mark.whole
def test_the_engine_and_its_server_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    done = invoke("serve", *SMALL, "--json", str(path), "--verbose")
    assert done.exit_code == 0, done.output
    report = Report.load(path)
    ways = ["compiled-llm:engine", "compiled-llm:socket", "compiled-llm:socket-busy-poll", "compiled-llm:http"]
    assert [result.contender for result in report.many_streams] == ways
    assert [result.contender for result in report.online] == ways
    assert [result.prompt for result in report.one_stream] == [6, 20, 6, 6, 6, 20, 20, 20]


# ---- servers


VLLM = """
import http.server, json, signal, sys
LOG = {log!r}

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): ...
    def do_GET(self):
        body = json.dumps({"version": "0.0.1"}).encode() if self.path == "/version" else b""
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(asked["max_tokens"]):
            self.say({"choices": [{"text": ""}]})
        self.say({"choices": [], "usage": {"completion_tokens": asked["max_tokens"], "prompt_tokens_details": None}})
        self.chunk(b"data: [DONE]\\n\\n")
        self.chunk(b"")
    def say(self, event):
        self.chunk(b"data: " + json.dumps(event).encode() + b"\\n\\n")
    def chunk(self, data):
        self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(data), data))

def note(what):
    with open(LOG, "a") as log:
        print(json.dumps(what), file=log)

def end(*_):
    note("ended")
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
options = dict(option.partition("=")[::2] for option in sys.argv[1:])
note(options)
http.server.ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
"""


def test_vllms_server_is_started_asked_and_ended(tmp_path: Path) -> None:
    log, path = tmp_path / "calls.log", tmp_path / "results.json"
    file = tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py"
    file.parent.mkdir(parents=True)
    file.write_text(VLLM.replace("{log!r}", repr(str(log))))
    command = f"env PYTHONPATH={tmp_path} {sys.executable} -S"
    done = invoke("serve", *SMALL, "--contenders", "vllm", "--vllm", command, "--json", str(path))
    assert done.exit_code == 0, done.output
    options, end = [json.loads(line) for line in log.read_text().splitlines()]
    assert end == "ended"
    assert options["--dtype"] == "float32"
    assert not os.path.exists(options["--model"]), "the folder was for this run"
    report = Report.load(path)
    assert {result.contender for result in report.many_streams} == {"vllm"}
    assert report.machine["versions"]["vllm"] == "0.0.1"


def test_a_server_that_ends_says_why() -> None:
    command = [sys.executable, "-c", "print('something before'); raise ValueError('no such thing')"]
    log: list[str] = []
    with (
        pytest.raises(RuntimeError, match="exit code 1: ValueError: no such thing"),
        running(command, "http://127.0.0.1:9/ready", "a", log.append),
    ):
        pass
    assert "a: something before" in log


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--contenders", "sglang"), "no sglang"),
        (("--peer-url", "http://there/v1"), "give a name and a URL"),
        (("--prompts", "ten"), "comma-separated integers"),
    ],
)
def test_impossible_options_are_refused(options: tuple[str, ...], said: str) -> None:
    done = invoke("serve", *SMALL, *options)
    assert done.exit_code != 0
    assert said in done.output


def test_a_peer_that_does_not_answer_is_not_available(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    done = invoke("serve", *SMALL, "--contenders", "", "--peer-url", "x=http://127.0.0.1:9/v1", "--json", str(path))
    assert done.exit_code == 1
    assert "does not answer" in Report.load(path).unavailable["x"]


@pytest.mark.parametrize("vocabulary", [512, 2000])
def test_a_tokenizer_is_made_up_for_random_weights(vocabulary: int) -> None:
    tokenizer = made_up_tokenizer(vocabulary)
    assert len(tokenizer) == vocabulary
    assert tokenizer.eos_token_id == vocabulary - 1
    ids = list(range(0, vocabulary - 1, 37))
    assert len(tokenizer.decode(ids)) >= len(ids) / 2


def test_random_weights_are_written_once(tmp_path: Path) -> None:
    folder, setup = ModelFolder(), new_setup([Workload(1, 3, 6)])
    location = folder.location(setup)
    assert (Path(location) / "model.safetensors").exists()
    assert models.SHAPES["tiny"]["vocab_size"] == json.loads((Path(location) / "config.json").read_text())["vocab_size"]
    assert folder.location(setup) == location
    assert setup.device == CPU


# ---- what clients read

EVENTS = [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b\n\n"}]}]
USAGE = {"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}}


def response(*events: object, status: str = "200 OK") -> bytes:
    body = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + [b"data: [DONE]\n\n", b""]
    head = f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in body)


@pytest.mark.parametrize("size", [1, 3, 7, 10_000])
def test_a_response_is_read_however_it_is_cut(size: int) -> None:
    data = response(*EVENTS, USAGE)
    reads = [(float(start), data[start : start + size]) for start in range(0, len(data), size)]
    answer = answer_of(reads)
    assert (answer.tokens, answer.cached) == (2, 4)
    ends = [data.index(b'"a"') + len(b'"a"}]}\n\n'), data.index(b'"b') + len(b'"b\\n\\n"}]}\n\n')]
    assert answer.times == [float((end + 1) // size * size) for end in ends], "when the end of each chunk was read"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nfull", "status 429: full"),
        (response(*EVENTS), "include_usage"),
        (response({"error": {"message": "gone"}}), "gone"),
    ],
)
def test_a_response_without_an_answer_says_why(data: bytes, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        answer_of([(0.0, data)])


def test_a_connection_that_the_server_has_closed_meanwhile_is_made_again() -> None:
    accepted: list[asyncio.StreamWriter] = []

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
        writer.write(response(*EVENTS, USAGE))

    async def ask_thrice() -> list[Callable[[], Answer]]:
        server = await asyncio.start_server(answer_once, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", "x", Silence(10))
        ask = client.asking([1], 2, 0.0)
        first = await ask()
        accepted[0].close()
        second = await asyncio.wait_for(ask(), 10)
        accepted[1].close()
        await asyncio.sleep(0.05)  # the client has learned of it
        third = await asyncio.wait_for(ask(), 10)
        accepted[2].close()
        server.close()
        return [first, second, third]

    assert [take_apart().tokens for take_apart in asyncio.run(ask_thrice())] == [2, 2, 2]
    assert len(accepted) == 3


@contextmanager
def standing_still(after: int) -> Iterator[str]:
    """A server of so many answers, then of none; its URL."""
    numbers, over = itertools.count(), threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": "x"}]}).encode()
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if next(numbers) >= after:
                over.wait()
            usage = {"choices": [], "usage": {"completion_tokens": asked["max_tokens"]}}
            self.wfile.write(response(*EVENTS, usage))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            over.set()
            server.shutdown()


def test_a_server_that_stands_still_fails_and_what_was_measured_stays(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    with standing_still(after=11) as url:
        options = ("--patience", "0.5", "--contenders", "", "--peer-url", f"mine={url}", "--json", str(path))
        done = invoke("serve", *SMALL, *options)
    assert done.exit_code == 1
    report = Report.load(path)
    (failure,) = report.failures
    assert failure.startswith("mine: RuntimeError: mine, 3 requests")
    assert "nothing has come for 0.5 s, and 2 requests wait" in failure
    assert [result.prompt for result in report.one_stream] == [6, 20]
    assert not report.many_streams


def test_silence_is_no_failure_while_nobody_waits() -> None:
    silence = Silence(0.02)

    async def late() -> str:
        await asyncio.sleep(0.1)
        return await silence.broken_by(asyncio.sleep(0, "here"))

    assert asyncio.run(silence.watched(late())) == "here"


def test_tokens_that_come_at_once_are_one_piece() -> None:
    assert pieces([1.0, 1.00001, 1.00002, 1.01, 1.02, 1.02]) == [1.0, 1.01, 1.02]
    assert pieces([]) == []


def test_tables_compare_with_the_first_contender(tmp_path: Path) -> None:
    between = Percentiles(0.001, 0.002, 0.003)
    alone = [
        OneStream(name, prompt, 5, [first, first], between, 10, 1.0)
        for name, first in (("ours", 0.003), ("socket", 0.0034))
        for prompt in (10, 50)
    ]
    many = [
        ManyStreams(name, 4, 100, 10, [seconds], between, 20, 1.0) for name, seconds in (("ours", 1.0), ("socket", 2.0))
    ]
    report = new_report(one_stream=alone, many_streams=many)
    first, second = tables_of(report)
    assert first.rows[:2] == [
        ["ours", "10", "3.00 / 3.00", "+0.00", "1.00 / 2.00", "1.00"],
        ["socket", "10", "3.40 / 3.40", "+0.40", "1.00 / 2.00", "1.00"],
    ]
    assert second.rows[1] == ["socket", "4", "20.0 / 20.0", "50.0%", "2.00 / 2.00", "1.00 / 2.00", "2.00"]
    report.save(tmp_path / "results.json")
    assert Report.load(tmp_path / "results.json") == report
