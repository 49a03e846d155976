"""Requests that would take long, or much memory, and how they are to be answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
HI = [{"role": "user", "content": "hi"}]
SIZE = 8_000_000
"""Bytes of a body, of 8 MiB that it can have."""
ENTRIES = "texts, arrays and objects"


class Bomb(NamedTuple):
    """A request."""

    name: str  # of what it tries
    path: str  # where it goes
    body: Callable[[], bytes]  # makes it
    message: str = ""  # in the answer; nothing of one that is answered
    status: int = 400  # of the answer


def whole(**body: Any) -> Callable[[], bytes]:
    return lambda: json.dumps(body).encode()


def long(
    field: str, entry: str, size: int = SIZE, before: str = "", after: str = "", **others: Any
) -> Callable[[], bytes]:
    """A body with a list of as many entries as have room."""
    rest = json.dumps(others)[1:-1]

    def made() -> bytes:
        entries = ",".join([entry] * (size // (len(entry) + 1)))
        return f'{{"{field}": {before}[{entries}]{after}{", " if rest else ""}{rest}}}'.encode()

    return made


def calls(entry: str, count: int, times: int) -> Callable[[], bytes]:
    """Calls of an earlier turn, each of which has a list of so many entries in its arguments."""

    def made() -> bytes:
        function = {"name": "a", "arguments": f'{{"a": [{",".join([entry] * count)}]}}'}
        call = {"id": "a", "type": "function", "function": function}
        return json.dumps({"messages": [{"role": "assistant", "tool_calls": [call] * times}]}).encode()

    return made


def names(count: int, value: str) -> str:
    return "{" + ",".join(f'"{number:x}":{value}' for number in range(count)) + "}"


def form(schema: str) -> Callable[[], bytes]:
    return lambda: f"""{{"messages": {json.dumps(HI)}, "response_format":
        {{"type": "json_schema", "json_schema": {{"name": "a", "schema": {schema}}}}}}}""".encode()


STOPS = ["ab" * 15 + f"{number:02x}" for number in range(256)]
TOOL = {"type": "function", "function": {"name": "a", "description": "a" * 60_000}}

EACH_KIND = [
    Bomb("messages without fields", CHAT, long("messages", "{}"), ENTRIES),
    Bomb("many messages, few enough", CHAT, long("messages", '{"role":"user","content":"a"}', 370_000), "tokens"),
    Bomb("one letter a prompt, few enough", TEXT, long("prompt", '"a"', 260_000), "65000 prompts with 1"),
    Bomb("a prompt of many tokens", TEXT, long("prompt", "1"), "4000000 tokens"),
    Bomb("a prompt of short words that might fit", TEXT, whole(prompt="a b " * 500_000), "characters are more"),
    Bomb(
        "input of many thoughts",
        RESPONSES,
        long("input", f'{{"type":"reasoning","content":[{{"type":"reasoning_text","text":"{"a" * 900}"}}]}}'),
        "more",
    ),
    Bomb("lists in the arguments of many calls", CHAT, calls("[]", 20_000, 100), ENTRIES),
    Bomb(
        "many biases", CHAT, whole(messages=HI, logit_bias={str(number): 1 for number in range(60_000)}), "logit_bias"
    ),
    Bomb(
        "many stop strings that nearly repeat",
        TEXT,
        whole(prompt="a", stop=STOPS, max_tokens=50, ignore_eos=True),
        status=200,
    ),
    Bomb(
        "many tokens that are allowed",
        TEXT,
        long("allowed_token_ids", "1", 500_000, prompt="a", max_tokens=1),
        status=200,
    ),
    Bomb(
        "a long fraction",
        CHAT,
        lambda: b'{"temperature": 0.' + b"1" * SIZE + f', "messages": {json.dumps(HI)}, "max_tokens": 1}}'.encode(),
        status=200,
    ),
    Bomb("more levels", CHAT, lambda: b"[" * SIZE, ENTRIES),
    Bomb("a long user", TEXT, whole(prompt="a", user="a" * SIZE, max_tokens=1), status=200),
    Bomb(
        "a schema of many choices",
        CHAT,
        form('{"enum": [' + ",".join(f'"{number}"' for number in range(6_000)) + "]}"),
        status=200,
    ),
    Bomb("tokens to be made text, few enough", DETOKENIZE, long("tokens", "99", 780_000), status=200),
    Bomb(
        "log-probabilities of a prompt",
        TEXT,
        whole(prompt=[5] * 3000, echo=True, logprobs=20, max_tokens=1),
        status=200,
    ),
]
"""One of each kind: bodies of many values, long prompts, fields of which each entry costs, answers that are long."""

BOMBS = [
    *EACH_KIND,
    Bomb("messages that are numbers", CHAT, long("messages", "0"), "messages[0]"),
    Bomb("messages without fields, few enough", CHAT, long("messages", "{}", 190_000), "messages[0].role"),
    Bomb("many messages", CHAT, long("messages", '{"role":"user","content":"a b"}'), ENTRIES),
    Bomb("parts that are numbers", CHAT, long("messages", "0", before='[{"role":"user","content":', after="}]")),
    Bomb("one letter a prompt", TEXT, long("prompt", '"a"'), ENTRIES),
    Bomb("one token a prompt", TEXT, long("prompt", "[1]", 250_000), "prompts with 1"),
    Bomb("a prompt of wrong tokens", TEXT, long("prompt", "1.5"), "prompt"),
    Bomb("prompts of wrong tokens", TEXT, long("prompt", '""', before="[", after="]"), ENTRIES),
    Bomb("a prompt of short words", TEXT, whole(prompt="a b " * (SIZE // 4)), "characters are more"),
    Bomb("128 such prompts", TEXT, whole(prompt=["a b " * 15_000] * 128), "60000 tokens"),
    Bomb("a message of short words", CHAT, whole(messages=[{"role": "user", "content": "a b " * 500_000}]), "more"),
    Bomb("a long input", RESPONSES, whole(input="a b " * 500_000), "characters are more"),
    Bomb("input of wrong items", RESPONSES, long("input", "{}", 190_000), "input"),
    Bomb("lists in what the template reads", CHAT, long("a", "[]", before="", messages=HI), ENTRIES),
    Bomb("lists in a call's arguments", CHAT, calls("[]", 2_000_000, 1), ENTRIES),
    Bomb("unknown fields", CHAT, lambda: names(60_000, "1").encode(), "missing"),
    Bomb(
        "biases that are texts",
        CHAT,
        lambda: f'{{"messages": {json.dumps(HI)}, "logit_bias": {names(30_000, chr(34) * 2)}}}'.encode(),
        "logit_bias",
    ),
    Bomb(
        "longer stop strings",
        TEXT,
        whole(prompt="a", stop=["a" * 2000 + str(number) for number in range(256)]),
        "stop: has",
    ),
    Bomb("many stop tokens", TEXT, long("stop_token_ids", "1", prompt="a"), "stop_token_ids"),
    Bomb("bad words that are texts", TEXT, whole(prompt="a", bad_words=["a b " * 8 for _ in range(256)]), "bad_words"),
    Bomb("too many tokens that are allowed", TEXT, long("allowed_token_ids", "1", prompt="a"), "allowed_token_ids"),
    Bomb("tools that are numbers", CHAT, long("tools", "0", messages=HI), "tools[0]"),
    Bomb("long tools", CHAT, whole(messages=HI, tools=[TOOL] * 128, tool_choice="none"), "two have the name"),
    Bomb("a long number", CHAT, lambda: b'{"top_k": ' + b"1" * SIZE + b"}", "digits"),
    Bomb("levels", CHAT, lambda: b'{"chat_template_kwargs": ' + b'{"a":' * 60_000),
    Bomb("quotes", CHAT, lambda: b'"' * SIZE, ENTRIES),
    Bomb("backslashes", CHAT, lambda: b'"' + b"\\" * SIZE, "no JSON"),
    Bomb("a long name of a model", CHAT, whole(messages=HI, model="a" * SIZE), "model", 404),
    Bomb("a long salt", TEXT, whole(prompt="a", cache_salt="a" * SIZE), "cache_salt"),
    Bomb("a long schema", CHAT, form('{"enum": ["' + "a" * SIZE + '"]}'), "response_format"),
    Bomb("text to be made tokens", TOKENIZE, whole(prompt="a b " * 500_000), "characters are more"),
    Bomb("messages to be made tokens", TOKENIZE, long("messages", "0"), "messages[0]"),
    Bomb("tokens to be made text", DETOKENIZE, long("tokens", "99"), "tokens"),
    Bomb("tokens that are texts", DETOKENIZE, long("tokens", '""', 190_000), "tokens[0]"),
    Bomb("log-probabilities of long prompts", TEXT, whole(prompt=[[5] * 3000] * 5, echo=True, logprobs=20), "logprobs"),
    Bomb(
        "log-probabilities of many answers",
        CHAT,
        whole(messages=HI, n=32, max_tokens=30, logprobs=True, top_logprobs=20),
        status=200,
    ),
]
