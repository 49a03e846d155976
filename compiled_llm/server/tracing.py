"""Spans of OpenTelemetry for requests, imported for ``--otlp-traces-endpoint`` alone; without prompts or answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compiled_llm.compat.own_version import OWN_VERSION
from compiled_llm.requests.answer import Answer
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.server.http.api_error import of_exception
from compiled_llm.server.openai.common.api_server import REQUEST_ID, SUBMITTED, Submitted

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/responses": "chat"}
_LAST_SECONDS = 2.0  # in which a collector takes the last spans; one that is gone does not keep the server from ending


def tracer_provider(endpoint: str) -> TracerProvider:
    """Return what makes spans and sends them to ``endpoint`` from a thread; ``OTEL_SERVICE_NAME`` and others hold."""
    resource = Resource({"service.name": "compiled-llm"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class TracingMiddleware:
    """A middleware that makes a span of each request to a model; the caller's ``traceparent`` is its parent."""

    def __init__(self, app: ASGIApp, provider: TracerProvider) -> None:
        self._app = app
        self._provider = provider
        self._tracer = provider.get_tracer("compiled_llm", OWN_VERSION)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, self._closing(send))
        elif scope["method"] == "POST" and scope["path"] in _OPERATIONS:
            await self._traced(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _closing(self, send: Send) -> Send:
        """Return a ``send`` that sends the last spans before the server ends."""

        async def closing(message: Message) -> None:
            if message["type"] == "lifespan.shutdown.complete":
                last = threading.Thread(target=self._provider.shutdown, daemon=True)
                last.start()
                await asyncio.to_thread(last.join, _LAST_SECONDS)
            await send(message)

        return closing

    async def _traced(self, scope: Scope, receive: Receive, send: Send) -> None:
        span = self._begun(scope)
        if not span.is_recording():  # its caller wants none
            await self._app(scope, receive, send)
            return

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                _tell_status(span, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:  # of ours, which the guard answers
            _tell_status(span, 500)
            raise
        finally:
            _end(span, _OPERATIONS[scope["path"]], scope.get(SUBMITTED))

    def _begun(self, scope: Scope) -> Span:
        path = scope["path"]
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": _OPERATIONS[path],
            "gen_ai.provider.name": "compiled_llm",
            "gen_ai.request.id": scope[REQUEST_ID],
            "http.request.method": "POST",
            "http.route": path,
        }
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        parent = TraceContextTextMapPropagator().extract(headers)
        return self._tracer.start_span(_OPERATIONS[path], parent, SpanKind.SERVER, attributes)


def _end(span: Span, operation: str, submitted: Submitted | None) -> None:
    """End a span with what its request came to; None if nothing was asked of the engine process."""
    if submitted is not None:
        span.update_name(f"{operation} {submitted.model}")
        span.set_attributes(dict(_attributes(submitted)))
        _tell_times(span, submitted)
        _tell_error(span, submitted.handles)
    span.end()


def _attributes(submitted: Submitted) -> Iterator[tuple[str, AttributeValue]]:
    params, handles = submitted.params, submitted.handles
    answers = _answers(handles)
    yield "gen_ai.request.model", submitted.model
    yield "gen_ai.response.model", submitted.model
    yield "gen_ai.request.choice.count", params.n
    yield "gen_ai.request.temperature", params.temperature
    yield "gen_ai.request.top_p", params.top_p
    if params.max_tokens is not None:
        yield "gen_ai.request.max_tokens", params.max_tokens
    yield "gen_ai.usage.input_tokens", sum(len(handle.prompt) for handle in handles)
    yield "gen_ai.usage.cache_read.input_tokens", sum(handle.cached_tokens for handle in handles)
    yield "gen_ai.usage.output_tokens", sum(answer.tokens for answer in answers)
    yield "gen_ai.response.finish_reasons", [answer.finish_reason or "cancelled" for answer in answers]


def _answers(handles: Sequence[RequestHandle]) -> list[Answer]:
    return [answer for handle in handles for answer in handle.answers]


def _tell_times(span: Span, submitted: Submitted) -> None:
    came, found = submitted.came, [handle.figures for handle in submitted.handles if handle.figures is not None]
    if queued := [figures["queue_seconds"] for figures in found if figures["queue_seconds"] is not None]:
        span.set_attribute("gen_ai.latency.time_in_queue", min(queued))
        span.add_event("first run", timestamp=came + int(min(queued) * 1e9))
    if first := [figures["first_token_seconds"] for figures in found if figures["first_token_seconds"] is not None]:
        span.set_attribute("gen_ai.latency.time_to_first_token", min(first))
        span.add_event("first token", timestamp=came + int(min(first) * 1e9))
    if found:
        span.set_attribute("gen_ai.latency.e2e", max(figures["seconds"] for figures in found))


def _tell_status(span: Span, status: int) -> None:
    """Tell a status of HTTP; of those that are not the server's fault a span makes no error."""
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_attribute("error.type", str(status))
        span.set_status(StatusCode.ERROR)


def _tell_error(span: Span, handles: Sequence[RequestHandle]) -> None:
    """Tell why an answer has failed, perhaps in the midst of a stream, whose status was sent before."""
    errors = [*(handle.refused for handle in handles), *(answer.error for answer in _answers(handles))]
    error = next(filter(None, errors), None)
    if error is not None and (told := of_exception(error)).status >= 500:
        span.set_attribute("error.type", told.code or str(told.status))
        span.set_status(StatusCode.ERROR, told.message)
