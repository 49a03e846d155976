"""Messages pass as frames, however bytes are cut; what is no frame is refused with a sentence, and nothing else."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from compiled_llm.protocol.frames import FrameError, Frames, frame_of
from compiled_llm.protocol.messages import (
    AskStats,
    AskText,
    AskTokens,
    Beat,
    Cancel,
    Embedding,
    Ended,
    FromClient,
    FromEngine,
    Hello,
    Labelling,
    Leaving,
    PageCounts,
    Percentiles,
    Piece,
    Pooled,
    Preparing,
    Problem,
    PromptTokens,
    Ranking,
    Ready,
    Refused,
    StatsReply,
    StepUpdates,
    Submit,
    Summary,
    TextReply,
    TokensReply,
    Update,
    Welcome,
)
from compiled_llm.requests.columns import encoded

LATENCY = Percentiles(0.5, 0.9)
COUNTS = ("running", "waiting", "finished", "steps", "preemptions")
TOKENS = ("prompt_tokens", "cached_tokens", "new_tokens", "cold_starts")
FROM_CLIENT: list[Struct] = [
    Hello(client="me"),
    Submit(1, [1, 2, 2**31], {"stop": ["\n"], "logit_bias": {3: -1.5}, "n": 2}, -1, 2.5, "salt"),
    Submit(2, [], wanted={"hidden_states": [0, -1], "emitted": ["norms"]}),
    Cancel(1),
    Cancel(1, 3),
    AskStats(4),
    AskTokens(5, "a text"),
    AskTokens(6, [{"role": "user", "content": "hi"}]),
    AskText(7, [1, 2], True),
]
FROM_GENERATOR: list[Struct] = [
    Welcome(1, "compiled-llm", 17),
    Preparing("loading"),
    Preparing("compiling", 2, 4),
    Ready("model", 100, [1, 2], 1024, 256, "/folder", "model.gguf"),
    Ready("embedder", 100, [], 64, 8, pooled=Pooled(Embedding(8, prompts={"query": "Q: "}), Ranking((1, 2), {}))),
    Ready("classifier", 100, [], 64, 8, pooled=Pooled(labelling=Labelling(["no"], "sigmoid"), silent="no text")),
    StepUpdates([Update(1, 0, [5]), Update(2, 1, [6, 7], {"numbers": encoded([0.5, [1, "a"]])}, Ended("stop", "x"))]),
    StepUpdates([Update(1, 0, [], None, Ended("error", None, "why"))], [Summary(1, 4, None, 0.5, 1.5)]),
    PromptTokens(1, [5, 6]),
    Piece(1, 0, "a", encoded((1, [{3: (-0.5, 1)}]))),
    Piece(1, 1, "b", encoded(bytes(8))),
    Refused(3, "full", "too many"),
    StatsReply(
        number=1,
        connections=2,
        **dict.fromkeys((*COUNTS, *TOKENS), 1),
        queue_seconds=LATENCY,
        first_token_seconds=None,
        inter_token_seconds=LATENCY,
        pages=PageCounts(4, 1, 2, 1),
    ),
    TokensReply(5, [1, 2]),
    TextReply(7, "a text"),
    Leaving("told to"),
    Beat(),
    Problem("no"),
]


@pytest.mark.parametrize(("kind", "messages"), [(FromClient, FROM_CLIENT), (FromEngine, FROM_GENERATOR)])
def test_messages_arrive_as_they_were_sent_however_they_are_cut(kind: Any, messages: list[Struct], seed: int) -> None:
    sent, draw = b"".join(map(frame_of, messages)), random.Random(seed)
    for longest in (1, 7, len(sent)):
        frames: Frames[Struct] = Frames(kind)
        received, rest = [], sent
        while rest:
            cut = draw.randint(1, longest)
            received += frames.feed(rest[:cut])
            rest = rest[cut:]
        assert received == messages
        frames.check_complete()


def test_all_messages_are_tried() -> None:
    assert {type(message) for message in FROM_CLIENT} == set(FromClient.__args__)
    assert {type(message) for message in FROM_GENERATOR} == set(FromEngine.__args__)


def test_fields_that_a_reader_does_not_know_are_passed_over() -> None:
    payload = msgspec.msgpack.encode({"type": "hello", "version": 9, "client": "x", "colour": "blue"})
    assert list(Frames(FromClient).feed(len(payload).to_bytes(4, "big") + payload)) == [Hello(9, "x")]


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "a frame that says it has 1,195,725,856 bytes, and can have 67,108,864"),
        (b"\xff\xff\xff\xff", "can have 67,108,864; only clients of compiled_llm are understood here"),
        (framed(b""), "a frame that is no message of the protocol"),
        (framed(b"\xc1"), "no message of the protocol"),
        (framed(b"\x91" * 100_000), "no message of the protocol"),
        (framed(b"\x82\xa4type\xa6submit\xa6params\x81\xa1a" + b"\x91" * 100_000), "no message of the protocol"),
        (framed(b"\xdd\xff\xff\xff\xff"), "no message of the protocol"),
        (framed(msgspec.msgpack.encode({"type": "shutdown"})), "Invalid value 'shutdown'"),
        (framed(msgspec.msgpack.encode({"type": "cancel"})), "missing required field `request`"),
        (framed(msgspec.msgpack.encode({"type": "cancel", "request": "1"})), "Expected `int`, got `str`"),
    ],
)
def test_what_is_no_frame_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(FrameError) as raised:
        list(Frames(FromClient).feed(data))
    assert said in str(raised.value)


def test_bytes_that_end_within_a_frame_are_noticed() -> None:
    for cut in (1, 3, 4, 10):
        frames: Frames[Struct] = Frames(FromClient)
        assert list(frames.feed(bytes(frame_of(Hello()))[:cut])) == []
        with pytest.raises(FrameError, match=f"cut after {cut} bytes"):
            frames.check_complete()


def test_a_message_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(FrameError, match=r"a message of .* bytes; it can have 100"):
        frame_of(Submit(1, [1] * 200), max_bytes=100)


def test_damaged_frames_raise_nothing_else(seed: int) -> None:
    draw, payloads = random.Random(seed), [bytes(frame_of(message))[4:] for message in FROM_CLIENT]
    refused = 0
    for _ in range(20_000):
        damaged = bytearray(draw.choice(payloads))
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.getrandbits(8)
        damaged = damaged[: draw.choice((len(damaged), draw.randint(0, len(damaged))))]
        try:
            list(Frames(FromClient).feed(framed(bytes(damaged))))
        except FrameError:
            refused += 1
    assert refused > 10_000


def test_a_number_that_messages_cannot_have_is_no_frame() -> None:
    for number in (2**64, -(2**63) - 1):
        with pytest.raises(FrameError, match="a message with a number that is too large: 64 bits are sent"):
            frame_of(Submit(1, [number]))
