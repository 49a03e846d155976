"""A route reads its body once, within bounds; events are written once, as the API's models would, in few writes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.testclient import TestClient
from pydantic import ValidationError

from compiled_llm.client import EngineProcessError
from compiled_llm.requests.answer import AnswerRecord
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.listeners import Wakeup
from compiled_llm.server.http.api_error import ANSWERED, ApiError, respond
from compiled_llm.server.http.body_route import BodyRoute, BodyRouteMiddleware, decoded
from compiled_llm.server.http.body_values import MAX_VALUES, check_values
from compiled_llm.server.http.http_protocol import _HeadWithBody
from compiled_llm.server.openai.chat.response import ChatChunk, ChunkChoice, Delta
from compiled_llm.server.openai.common.answering import answered
from compiled_llm.server.openai.common.answers import Answers
from compiled_llm.server.openai.common.events import EventStream, event, text_event
from compiled_llm.server.openai.completions.request import CompletionRequest
from compiled_llm.server.openai.completions.response import CompletionChoice, TextCompletion
from support.engine.no_source import NoSource

HEAD: dict[str, Any] = {"id": "an-id", "created": 7, "model": 'a "model"', "usage": None}
NOTHING: dict[str, Any] = {"logprobs": None, "finish_reason": None}


def of_chat(text: str) -> bytes:
    choice = ChunkChoice(index=1, delta=Delta(content=text), **NOTHING)
    return event(ChatChunk(object="chat.completion.chunk", choices=[choice], **HEAD))


def of_completion(text: str) -> bytes:
    choice = CompletionChoice(index=1, text=text, **NOTHING)
    return event(TextCompletion(object="text_completion", choices=[choice], **HEAD))


TEXTS = [
    "",
    " a word",
    'quotes " and \\ and /',
    "\n\n\tdata: [DONE]\r\n",
    "漢字 🙂 \u2028 \ufffd",
    "\x00\x1f\x7f",
    "</script>",
]


@pytest.mark.parametrize("written", [of_chat, of_completion])
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_written_as_its_model_would(written: Any, text: str) -> None:
    found = text_event(written)(text)
    assert found.startswith(b"data: ")
    assert found.endswith(b"\n\n")
    assert b"\n" not in found[:-2], "an event is one line"
    assert json.loads(found[6:]) == json.loads(written(text)[6:])


class Sent(asyncio.Transport):
    """What is written to a connection, one entry a write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


def written(*does: str) -> tuple[list[bytes], bool]:
    """What comes of writes, ``""`` being a turn of the event loop, and whether the connection was closed."""
    sent = Sent()

    async def writing() -> None:
        transport = _HeadWithBody(sent, asyncio.get_running_loop())
        for data in does:
            if data == "close":
                transport.close()
            elif data:
                transport.write(data.encode())
            else:
                await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(writing())
    return sent.writes, sent.closed


def test_a_head_goes_out_with_the_beginning_of_its_body_or_soon() -> None:
    assert written("head", "first", "second") == ([b"headfirst", b"second"], False)
    assert written("head", "", "first", "second") == ([b"head", b"first", b"second"], False)
    assert written("head", "close") == ([b"head"], True)
    assert written("close") == ([], True)


class Soon(Wakeup):
    """Is set by whoever waits."""

    def wait(self) -> asyncio.Future[None]:
        self.set()
        return super().wait()


class Ending:
    """Answers that have ended at the third look, and a writer of their events."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.closed = False
        self.events_left = [[b"one ", b"and "], [], [b"two, "]]

    @contextmanager
    def listening(self) -> Iterator[Wakeup]:
        yield Soon()

    def have_ended(self) -> bool:
        return len(self.events_left) == 1

    def first_events(self) -> list[bytes]:
        return [b"first, "]

    def events(self) -> list[bytes]:
        return self.events_left.pop(0)

    async def last_events(self) -> list[bytes]:
        if self.error is not None:
            raise self.error
        return [b"and usage, "]

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("error", [None, ApiError(400, "a test")])
def test_all_that_follows_the_last_token_goes_out_together(error: Exception | None) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    answers: Any = Ending(error)
    stream = EventStream(answers, answers, b"end")
    asyncio.run(stream({"type": "http"}, cast(Any, None), send))
    last = b"two, and usage, end" if error is None else b'two, event: error\ndata: {"error":'
    start, first, end = sent
    assert (start["type"], first["body"], first["more_body"]) == ("http.response.start", b"first, one and ", True)
    assert end["body"].startswith(last)
    assert not end["more_body"]
    assert answers.closed


# ---- bodies


@pytest.fixture(params=["by FastAPI", "past FastAPI"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A request comes to its endpoint as FastAPI takes it there, or straight."""
    if request.param == "by FastAPI":
        monkeypatch.setattr(BodyRouteMiddleware, "__call__", lambda self, *asked: self._app(*asked))
    return str(request.param)


def asked(body: object, raises: Exception | None = None) -> tuple[list[str], Any]:
    """The route that has answered a request with this body, and the response."""
    answered_by: list[str] = []
    app = FastAPI()
    router = APIRouter(route_class=BodyRoute)

    @router.post("/of/bodies")
    async def take(body: CompletionRequest, request: Request) -> Response:
        answered_by.append(request.scope["route"].path)
        if raises is not None:
            raise raises
        return JSONResponse([body.prompt, (await request.body()).decode()])

    app.include_router(router)
    for kind in ANSWERED:
        app.add_exception_handler(kind, respond)
    app.add_middleware(BodyRouteMiddleware, routes=router.routes, late=none_of_path)
    client = TestClient(app, raise_server_exceptions=True)
    response = client.post("/of/bodies", content=body if isinstance(body, str) else json.dumps(body))
    return answered_by, response


@pytest.mark.usefixtures("way")
def test_an_endpoint_gets_the_model_that_it_declares() -> None:
    body = {"prompt": [1, 2], "max_tokens": 3}
    answered_by, response = asked(body)
    assert (answered_by, response.json()) == (["/of/bodies"], [[1, 2], json.dumps(body)])


def test_the_router_is_not_asked_for_the_routes_of_bodies(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FastAPI, "build_middleware_stack", without_router(FastAPI.build_middleware_stack))
    answered_by, response = asked({"prompt": [1]})
    assert (len(answered_by), response.status_code) == ((1, 200) if way == "past FastAPI" else (0, 404))


async def none_of_path(path: str) -> list[Any]:
    """Routes of parts that are imported when they are asked for: none."""
    return []


def without_router(build: Callable[[FastAPI], Any]) -> Callable[[FastAPI], Any]:
    def built(app: FastAPI) -> Any:
        app.router.routes.clear()
        return build(app)

    return built


NO_BODIES = [
    ("", "the body: is missing"),
    ("{", "the body is no JSON"),
    ("[" * 60_000, "the body has too many levels, one inside the other"),
    ("[" * 100_000, "the body has more than 65,536 texts, arrays and objects; send fewer at once"),
    (f'{{"prompt": [{"1" * 5000}]}}', "the body has a number of too many digits"),
    ('{"prompt": 1}', "prompt: input should be a valid string"),
    ('{"prompt": "a", "colour": 1}', "colour: there is no such parameter"),
]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("body", "message"), NO_BODIES)
def test_what_is_no_body_is_told_why(body: str, message: str) -> None:
    answered_by, response = asked(body)
    assert (answered_by, response.status_code, response.json()["error"]["message"]) == ([], 400, message)


@pytest.mark.parametrize("text", ['"', '\\"', "\\\\", "[[", "{", '[\\"', "\\n"])
def test_values_are_counted_outside_of_texts(text: str) -> None:
    def check(others: int) -> None:
        check_values(json.dumps({"a": [text * 2**17, *[{}] * others]}).encode())

    check(MAX_VALUES - 5)
    check(MAX_VALUES - 4)  # two objects and arrays around them, a name and a text
    with pytest.raises(ApiError, match="65,536"):
        check(MAX_VALUES - 3)


@pytest.mark.usefixtures("way")
def test_errors_of_an_endpoint_are_answered_and_faults_are_the_guards() -> None:
    for error, status in ((ApiError(418, "a test"), 418), (ValueError("x"), 400), (EngineProcessError("x"), 503)):
        answered_by, response = asked({"prompt": "a"}, error)
        assert (answered_by, response.status_code) == (["/of/bodies"], status)
    with pytest.raises(ZeroDivisionError):
        asked({"prompt": "a"}, ZeroDivisionError())


BODIES = [
    b'{"a": [1, -0, 1.5, 1E5, true, null, "\\u00fc\xc3\xbc"]}',
    b"[18446744073709551616, -9223372036854775809, 123456789.123456789123456789]",
    b'{"a": 1, "a": 2}',
    b"[1e400, -1e400]",
    b'"\\ud800"',
    b"[Infinity, -Infinity]",
    b"\xef\xbb\xbf1",
    '"\u20ac"'.encode("utf-16"),
    b"",
    b"{",
    b"[1,]",
    b"\xff\xfe",
    b'"\x01"',
]


@pytest.mark.parametrize("body", BODIES, ids=repr)
def test_whatever_python_reads_as_json_is_read_so(body: bytes) -> None:
    def read(read: Any) -> Any:
        try:
            return read(body)
        except ValueError:
            return ValueError

    assert read(decoded) == read(json.loads)


@pytest.mark.parametrize(("prompt", "path"), [([1] * 1000 + ["a"], 0), (["a"] * 1000 + [1], 1000), ([[1]] * 99, None)])
def test_a_long_prompt_of_a_wrong_type_has_few_errors(prompt: Any, path: int | None) -> None:
    if path is None:
        assert CompletionRequest.model_validate({"prompt": prompt}).prompts() == prompt
        return
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": prompt})
    firsts = [error["loc"][2] for error in caught.value.errors() if error["loc"][1:2] == ("list[str]",)]
    assert firsts == [path]


class Waiting:
    """Answers that have no token before they are told so."""

    def __init__(self) -> None:
        self.comes = asyncio.Event()

    async def begun(self) -> None:
        await self.comes.wait()


class Ready:
    def __init__(self) -> None:
        self.made = False

    def begin(self) -> None:
        self.made = True


def test_a_stream_is_made_ready_while_the_first_token_is_waited_for() -> None:
    async def ask() -> None:
        answers, told = Waiting(), Ready()
        asking = asyncio.create_task(answered(cast(Any, told), cast(Answers, answers), stream=True))
        await asyncio.sleep(0)
        assert told.made
        assert not asking.done()
        answers.comes.set()
        assert (await asking).status_code == 200

    asyncio.run(ask())


class Staying:
    """A request whose client stays."""

    async def receive(self) -> Any:
        await asyncio.Event().wait()


def test_what_waits_for_the_first_token_leaves_nothing_to_be_closed() -> None:
    """For an iterator that is left open, the event loop is woken, and makes a task."""
    left: list[object] = []

    async def begin() -> None:
        sys.set_asyncgen_hooks(finalizer=left.append)
        record: AnswerRecord[Any] = AnswerRecord(stop_token_ids=frozenset())
        handle = RequestHandle([record], [1], NoSource(is_engine=False))
        answers = Answers([handle], cast(Any, Staying()), False, 10)
        record.tokens.append(5)
        await answers.begun()
        assert handle.listeners.count == 0
        answers.close()

    asyncio.run(begin())
    assert left == []
