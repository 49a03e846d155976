"""A body is read as FastAPI reads it, in less time; a stream is made ready before there is a token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any, cast

import pytest
from pydantic import ValidationError

from compiled_llm.server.front.answering import answered
from compiled_llm.server.front.answers import Answers
from compiled_llm.server.front.body_route import decoded
from compiled_llm.server.front.completion_request import CompletionRequest

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

    def stream(self) -> AsyncIterator[Iterable[bytes]]:
        self.made = True
        return cast(AsyncIterator[Iterable[bytes]], None)


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
