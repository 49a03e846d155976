"""A span of OpenTelemetry for each request to a model: whose it is, what it says, how it ends."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import Mock

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from compiled_llm.engine.engine import Engine
from compiled_llm.server import tracing
from compiled_llm.server.settings import ApiServerSettings
from support.docs.pages import DOCS
from support.server.engine_processes import PATIENCE, Loop, until
from support.server.running_servers import RunningServer, chat_tokenizer, request, running_server

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a secret"}]
ENDPOINT = "http://127.0.0.1:9/v1/traces"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Kept:
    """The spans that a server has made."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()

    def one(self) -> ReadableSpan:
        """The only span that there will be, once it has ended."""
        until(self.exporter.get_finished_spans)
        (span,) = self.exporter.get_finished_spans()
        self.exporter.clear()
        return span


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    kept = Kept()
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")  # milliseconds
    monkeypatch.setattr(tracing, "OTLPSpanExporter", lambda endpoint: kept.exporter)
    return kept


@pytest.fixture
def traced(kept: Kept, engine_process: Loop) -> Iterator[RunningServer]:
    with running_server(engine_process.server._path, otlp_traces_endpoint=ENDPOINT) as api_server:
        yield api_server


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


# ---- what a span says


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("path", "operation", "body"),
    [
        (TEXT, "text_completion", {"prompt": [5, 6, 7], "max_tokens": 5, "ignore_eos": True, "temperature": 0.5}),
        (CHAT, "chat", {"messages": MESSAGES, "max_tokens": 5, "ignore_eos": True, "temperature": 0.5}),
        ("/v1/responses", "chat", {"input": "abc", "max_output_tokens": 5, "ignore_eos": True, "temperature": 0.5}),
    ],
    ids=["completions", "chats", "responses"],
)
def test_a_request_has_one_span_that_says_what_it_took(
    traced: RunningServer, kept: Kept, path: str, operation: str, body: dict[str, Any], stream: bool
) -> None:
    if stream:
        list(traced.events(path, **body, model="other"))
    else:
        usage = traced.post(path, **body, model="other")["usage"]
    span = kept.one()
    found = attributes(span)
    assert (span.name, span.kind) == (f"{operation} other", SpanKind.SERVER)
    assert found["gen_ai.operation.name"] == operation
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "other"
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.temperature"]) == (5, 0.5)
    assert (found["gen_ai.usage.output_tokens"], found["gen_ai.response.finish_reasons"]) == (5, ("length",))
    assert found["gen_ai.usage.input_tokens"] >= 3
    if not stream:
        assert found["gen_ai.usage.input_tokens"] == usage.get("prompt_tokens", usage.get("input_tokens"))
    assert (found["http.response.status_code"], found["http.route"]) == (200, path)
    assert span.status.status_code is StatusCode.UNSET
    assert not any("secret" in str(value) for value in found.values())


def test_times_are_in_their_order(traced: RunningServer, kept: Kept) -> None:
    traced.post(TEXT, prompt="abc", max_tokens=5, ignore_eos=True)
    span = kept.one()
    found = attributes(span)
    waited, first, whole = (f"gen_ai.latency.{name}" for name in ("time_in_queue", "time_to_first_token", "e2e"))
    assert 0 <= found[waited] <= found[first] <= found[whole]
    run, token = span.events
    assert (run.name, token.name) == ("first run", "first token")
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.start_time <= run.timestamp <= token.timestamp <= span.end_time


def test_every_attribute_is_explained(traced: RunningServer, kept: Kept) -> None:
    traced.post(TEXT, prompt="abc", max_tokens=5)
    page = (DOCS / "how-to" / "http.md").read_text()
    assert not [name for name in attributes(kept.one()) if f"`{name}`" not in page]


def test_several_answers_are_told_together(traced: RunningServer, kept: Kept) -> None:
    traced.post(TEXT, prompt=["abc", "abcd"], n=2, max_tokens=3, ignore_eos=True)
    found = attributes(kept.one())
    assert found["gen_ai.usage.output_tokens"] == 12
    assert found["gen_ai.response.finish_reasons"] == ("length",) * 4
    assert found["gen_ai.request.choice.count"] == 2


def test_the_span_has_the_id_that_the_log_and_the_client_have(traced: RunningServer, kept: Kept) -> None:
    answer = traced.http.post(TEXT, json={"prompt": "a", "max_tokens": 1})
    assert attributes(kept.one())["gen_ai.request.id"] == answer.headers["x-request-id"]


# ---- whose it is


def test_the_callers_span_is_its_parent(traced: RunningServer, kept: Kept) -> None:
    traced.http.post(TEXT, json={"prompt": "a", "max_tokens": 1}, headers={"traceparent": PARENT})
    span = kept.one()
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:x}" == PARENT.split("-")[1].lstrip("0")
    assert (f"{span.parent.span_id:x}", span.parent.is_remote) == (PARENT.split("-")[2], True)


@pytest.mark.parametrize("header", [None, "00-nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "ÿ" * 9])
def test_without_a_proper_parent_it_begins_a_trace(traced: RunningServer, kept: Kept, header: str | None) -> None:
    headers = {} if header is None else {"traceparent": header.encode("latin-1")}
    traced.http.post(TEXT, json={"prompt": "a", "max_tokens": 1}, headers=headers)
    assert kept.one().parent is None


def test_a_caller_that_records_nothing_gets_no_span(traced: RunningServer, kept: Kept) -> None:
    traced.http.post(TEXT, json={"prompt": "a", "max_tokens": 1}, headers={"traceparent": f"{PARENT[:-2]}00"})
    traced.http.get("/v1/models")
    traced.http.post("/tokenize", json={"prompt": "a"})
    traced.http.post(TEXT, json={"prompt": [5, 6, 7], "max_tokens": 1})
    assert attributes(kept.one())["gen_ai.usage.input_tokens"] == 3


# ---- how it ends


@pytest.mark.parametrize("body", [{"prompt": "a", "temperature": -1}, {"prompt": "a", "model": "none"}])
def test_a_request_that_is_wrong_is_no_error_of_the_server(
    traced: RunningServer, kept: Kept, body: dict[str, Any]
) -> None:
    answer = traced.http.post(TEXT, json=body)
    span = kept.one()
    assert attributes(span)["http.response.status_code"] == answer.status_code >= 400
    assert span.status.status_code is StatusCode.UNSET
    assert "gen_ai.usage.input_tokens" not in attributes(span)


def test_a_body_that_is_too_long_has_its_status(kept: Kept, engine_process: Loop) -> None:
    path = engine_process.server._path
    with running_server(path, otlp_traces_endpoint=ENDPOINT, max_body_bytes=100) as traced:
        content = iter([b'{"prompt": "', b"a" * 100])  # which names no length
        answer = traced.http.post(TEXT, content=content, headers={"content-type": "application/json"})
    assert attributes(kept.one())["http.response.status_code"] == answer.status_code == 413


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_leaves_has_its_tokens_told(
    traced: RunningServer, kept: Kept, engine: Engine, stream: bool
) -> None:
    before = engine.stats()
    with socket.create_connection(("127.0.0.1", traced.port)) as peer:
        peer.sendall(request({"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": stream}))
        until(lambda: engine.stats().new_tokens >= before.new_tokens + 4)
    span = kept.one()
    found = attributes(span)
    assert found["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert 4 <= found["gen_ai.usage.output_tokens"] < 900
    assert found["gen_ai.latency.time_to_first_token"] > 0
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_engine_process_that_ends_is_an_error(kept: Kept, model: Any, path: Path, stream: bool) -> None:
    chat_tokenizer().save_pretrained(path.parent / "tokenizer")
    with Engine(model, tokenizer=chat_tokenizer()) as engine:
        loop = Loop(path)
        loop.open(engine, path.parent / "tokenizer")
        with running_server(path, otlp_traces_endpoint=ENDPOINT) as traced:
            body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": stream}
            asking = Thread(target=traced.http.post, args=(TEXT,), kwargs={"json": body})
            asking.start()
            until(lambda: engine.stats().new_tokens)
            loop.close()
            asking.join(PATIENCE)
            span = kept.one()
            found = attributes(span)
            assert span.status.status_code is StatusCode.ERROR
            assert found["error.type"] == "unavailable"
            assert found["gen_ai.response.finish_reasons"] == ("error",)
            assert found["http.response.status_code"] == (200 if stream else 503)
            until(lambda: not traced.api_server.is_ready)
            assert traced.http.post(TEXT, json=body).status_code == 503
            refused = kept.one()
            assert (refused.status.status_code, attributes(refused)["error.type"]) == (StatusCode.ERROR, "503")


def test_an_error_of_ours_is_one_of_the_server(
    traced: RunningServer, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traced.api_server, "model_for", Mock(side_effect=KeyError("a bug")))
    assert traced.http.post(TEXT, json={"prompt": "a"}).status_code == 500
    span = kept.one()
    assert (span.status.status_code, attributes(span)["http.response.status_code"]) == (StatusCode.ERROR, 500)


# ---- to a collector


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A collector's URL, and what was sent there."""
    taken: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            taken.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", taken
        server.shutdown()


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("name", [None, "our-models"])
def test_spans_come_to_a_collector_before_the_server_has_ended(
    engine_process: Loop, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name is not None:
        monkeypatch.setenv("OTEL_SERVICE_NAME", name)
    with collector() as (url, taken):
        with running_server(engine_process.server._path, otlp_traces_endpoint=url) as traced:
            traced.post(TEXT, prompt="a", max_tokens=1)
        (sent,) = [of_resource for request in taken for of_resource in request.resource_spans]
    (span,) = sent.scope_spans[0].spans
    assert span.name == "text_completion tiny"
    service = {entry.key: entry.value.string_value for entry in sent.resource.attributes}["service.name"]
    assert service == (name or "compiled-llm")


# ---- off


def test_nothing_of_it_is_imported_unless_it_is_asked_for() -> None:
    code = """
import sys
from pathlib import Path
from compiled_llm.server.http_server import HttpServer
from compiled_llm.server.settings import ApiServerSettings
HttpServer(ApiServerSettings(names=("tiny",), port=0), Path("/nowhere"))
assert "compiled_llm.server.tracing" not in sys.modules
assert not [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
assert not {"PIL", "torch", "transformers"} & {*sys.modules}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("endpoint", ["grpc://localhost:4317", "localhost:4318", "http://localhost:4318"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="give a URL as http://localhost:4318/v1/traces"):
        ApiServerSettings(names=("tiny",), otlp_traces_endpoint=endpoint)


def test_an_error_names_the_extra() -> None:
    code = """
import sys
sys.modules["opentelemetry.exporter"] = None
from compiled_llm.__main__ import main
sys.argv = ["compiled-llm", "serve", "demo", "--otlp-traces-endpoint", "http://localhost:4318/v1/traces"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "pip install '.[otel]'" in done.stderr
