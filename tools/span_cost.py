"""What a span of OpenTelemetry costs an API server: CPU time a request, with and without ``TracingMiddleware``.

The application below it answers at once, with a request of 128 tokens and an answer of 64 that have come already; a
collector in another process takes the spans. CPU time is that of all threads, so that what encodes and sends is in it.

    python tools/span_cost.py
"""

from __future__ import annotations

import asyncio
import platform
import statistics
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from compiled_llm.client.source import ClientSource
from compiled_llm.client.transport.session import ClientSession
from compiled_llm.explaining.cpu import cpu_name
from compiled_llm.requests.answer import AnswerRecord
from compiled_llm.requests.columns import ReceivedColumn
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.outputs import Figures
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.server.openai.common.api_server import REQUEST_ID, SUBMITTED, Submitted
from compiled_llm.server.tracing import TracingMiddleware, tracer_provider

REQUESTS, RATE, ROUNDS = 2000, 500, 5
PARENT = (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
TEXT = "/v1/completions"


class Collector(BaseHTTPRequestHandler):
    """Takes spans, and keeps none."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def answered() -> RequestHandle:
    record = AnswerRecord[ReceivedColumn](stop_token_ids=frozenset(), finish_reason="length")
    record.tokens.extend([1] * 64)
    handle = RequestHandle([record], list(range(128)), ClientSource(None, ClientSession(), 1))
    handle.finish(Figures(cached_tokens=0, queue_seconds=0.001, first_token_seconds=0.01, seconds=0.2))
    return handle


HANDLE = answered()


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    scope[SUBMITTED] = Submitted("demo", SamplingParams(max_tokens=64), [HANDLE], time.time_ns())
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def requests(app: ASGIApp) -> None:
    async def nothing(*_: Any) -> Any:
        return None

    for number in range(REQUESTS):
        scope = {"type": "http", "method": "POST", "path": TEXT, "headers": [PARENT], REQUEST_ID: f"req-{number}"}
        await app(scope, nothing, nothing)
        if number % 50 == 49:
            await asyncio.sleep(50 / RATE)


def us_a_request(app: ASGIApp) -> float:
    before = time.process_time()
    asyncio.run(requests(app))
    return (time.process_time() - before) / REQUESTS * 1e6


def main() -> None:
    if len(sys.argv) > 1:
        collector = HTTPServer(("127.0.0.1", 0), Collector)
        print(collector.server_port, flush=True)
        collector.serve_forever()
    command = [sys.executable, __file__, "collector"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        provider = tracer_provider(f"http://127.0.0.1:{int(process.stdout.readline())}/v1/traces")
        traced = TracingMiddleware(application, provider)
        found: dict[str, list[float]] = {"without": [], "with": []}
        for round_number in range(ROUNDS + 1):
            for name, app in (("without", application), ("with", traced)):
                measured = us_a_request(app)
                if round_number:  # the first one warms up
                    found[name].append(measured)
        process.kill()
    print(f"{cpu_name()}, Python {platform.python_version()}: CPU time a request, in us, median of {ROUNDS} rounds")
    for name, measures in found.items():
        print(f"{name} spans: {statistics.median(measures):.0f} ({min(measures):.0f} to {max(measures):.0f})")


if __name__ == "__main__":
    main()
