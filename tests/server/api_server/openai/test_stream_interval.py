"""With `--stream-interval N` there are fewer events, and all of them together say what they say with one a token."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from support.server.engine_processes import Loop
from support.server.running_servers import RunningServer, running_server
from support.server.scripted import CALL, WEATHER, Script, scripted, tool_tokenizer

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the quick fox"}], "max_tokens": 20}
SETTINGS: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 7, "stop": ["a", "e"]}, {"seed": 7, "n": 3}]


@pytest.fixture(scope="module", params=[4, 1])
def interval(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def spaced(engine_process: Loop, interval: int) -> Iterator[RunningServer]:
    with running_server(engine_process.server._path, stream_interval=interval) as api_server:
        yield api_server


@pytest.fixture
def calling(interval: int, path: Path) -> Iterator[tuple[Script, RunningServer]]:
    """An API server of an engine process that says what a test has written, token by token."""
    with scripted(path, tool_tokenizer()) as script, running_server(path, stream_interval=interval) as api_server:
        script.at_once = 1
        yield script, api_server


def joined(places: list[Any]) -> Any:
    """Texts and lists of several deltas, one after another; None if there are none."""
    found = [place for place in places if place is not None]
    return reduce(operator.add, found) if found else None


def near(entries: Any) -> Any:
    """The same, with numbers that may differ a little: the second request finds its prompt in the cache."""
    if isinstance(entries, dict):
        return {name: near(value) for name, value in entries.items()}
    if isinstance(entries, list):
        return [near(value) for value in entries]
    return pytest.approx(entries, abs=1e-3) if isinstance(entries, float) else entries


def told_by_chats(chunks: list[Any], index: int) -> dict[str, Any]:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return {
        "text": joined([choice["delta"].get("content") for choice in choices]),
        "logprobs": joined([choice["logprobs"] and choice["logprobs"]["content"] for choice in choices]),
        "token_ids": joined([choice.get("token_ids") for choice in choices]),
        "reasons": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
    }


@pytest.mark.drawn(most=2)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_chunks_of_a_chat_come_to_its_answer(spaced: RunningServer, interval: int, settings: dict[str, Any]) -> None:
    body = {**CHAT, **settings, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    answer = spaced.post("/v1/chat/completions", **body)
    chunks = list(spaced.events("/v1/chat/completions", **body, stream_options={"include_usage": True}))
    assert chunks[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    for choice in answer["choices"]:
        tokens = choice["token_ids"]
        assert told_by_chats(chunks, choice["index"]) == {
            "text": choice["message"]["content"],
            "logprobs": near(choice["logprobs"]["content"]),
            "token_ids": tokens,
            "reasons": [choice["finish_reason"]],
        }
        told = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"] and c.get("token_ids")]
        assert len(told) <= 2 + len(tokens) / interval
        assert all(len(c["token_ids"]) >= interval for c in told[1:-1])


PROMPTS = ["the quick fox", "漢", "a" * 700, "over the lazy dog"]
ECHOES: list[dict[str, Any]] = [{"seed": 3, "echo": True}] + [
    {"prompt": PROMPTS, "n": 2, "max_tokens": most, "echo": True, "logprobs": logprobs, "seed": 3}
    for most, logprobs in ((0, 0), (5, None), (5, 2))
]


@pytest.mark.drawn(most=2)
@pytest.mark.parametrize("settings", [*SETTINGS, *ECHOES], ids=lambda given: str(given)[-70:])
def test_chunks_of_a_completion_come_to_its_answer(
    spaced: RunningServer, interval: int, settings: dict[str, Any]
) -> None:
    body = {"prompt": "the fox", "max_tokens": 20, "logprobs": 1, **settings}
    answer = spaced.post("/v1/completions", **body)
    chunks = list(spaced.events("/v1/completions", **body))
    for choice in answer["choices"]:
        told = [found for chunk in chunks for found in chunk["choices"] if found["index"] == choice["index"]]
        assert joined([found["text"] for found in told]) == choice["text"]
        if "prompt" in settings:
            assert told[0]["text"] == PROMPTS[choice["index"] // 2]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            expected = near(choice["logprobs"] and choice["logprobs"][name])
            assert joined([found["logprobs"] and found["logprobs"][name] for found in told]) == expected
        assert [found["finish_reason"] for found in told if found["finish_reason"]] == [choice["finish_reason"]]


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"seed": 7, "stop": ["a", "e"]}], ids=str)
def test_events_of_a_response_come_to_its_answer(spaced: RunningServer, settings: dict[str, Any]) -> None:
    wanted = {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    body = {"input": "the quick fox", "max_output_tokens": 20, **wanted, **settings}
    (text,) = spaced.post("/v1/responses", **body)["output"][0]["content"]
    told = list(spaced.events("/v1/responses", **body))
    deltas = [event for event in told if event["type"] == "response.output_text.delta"]
    assert joined([event["delta"] for event in deltas]) == text["text"]
    assert joined([event["logprobs"] for event in deltas]) == near(text["logprobs"])
    assert told[-1]["response"]["output"][0]["content"] == near([text])


def test_deltas_of_a_call_come_to_its_arguments(calling: tuple[Script, RunningServer]) -> None:
    script, api_server = calling
    script.text = f"Well: {CALL}"
    body = {**CHAT, "tools": [WEATHER]}
    (call,) = api_server.post("/v1/chat/completions", **body)["choices"][0]["message"]["tool_calls"]
    deltas = [chunk["choices"][0]["delta"] for chunk in api_server.events("/v1/chat/completions", **body)]
    pieces = [piece["function"] for delta in deltas for piece in delta.get("tool_calls") or ()]
    assert pieces[0]["name"] == call["function"]["name"] == "weather"
    assert joined([piece["arguments"] for piece in pieces]) == call["function"]["arguments"] == '{"city": "Rome"}'
    assert joined([delta.get("content") for delta in deltas]) == "Well:"


def test_the_first_token_and_the_last_wait_for_no_other(calling: tuple[Script, RunningServer], interval: int) -> None:
    script, api_server = calling
    script.text, script.allowed = "the quick brown fox jumps", threading.Semaphore()  # of one token
    count = len(script.tokens(script.text))
    assert count > 5
    told: list[int] = []
    for chunk in api_server.events("/v1/completions", prompt="x", return_token_ids=True):
        told.append(len(chunk["choices"][0]["token_ids"]))
        if told == [1]:
            script.allowed.release(count - 1)
    assert sum(told) == count
    assert min(told[1:-1], default=interval) >= interval
