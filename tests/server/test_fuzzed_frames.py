"""What is no frame closes its own connection, with a sentence; others go on, and the next one works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from compiled_llm.client import Client, EngineProcessError
from compiled_llm.client.transport import connection as client_connection
from compiled_llm.protocol import messages
from compiled_llm.protocol.frames import frame_of
from compiled_llm.protocol.messages import AskStats, Hello, Problem, StatsReply, Submit
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.server.engine_process import connection as server_connection
from support.server.engine_processes import PATIENCE, Bytes, Loop, until

PROMPT = [3, 4, 5]
LONG = SamplingParams(max_tokens=900, ignore_eos=True, temperature=0.0)
SHORT = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0)


@pytest.fixture
def beside(engine_process: Loop, path: Path) -> Iterator[None]:
    """Somebody else, whose request runs through all of it."""
    with Client(path) as client:
        expected = client.generate([PROMPT], SHORT)[0].token_ids
        handle = client.submit(PROMPT, LONG)
        next(iter(handle))
        yield
        assert client.generate([PROMPT], SHORT)[0].token_ids == expected
        assert handle.refused is None
        handle.cancel()
        assert handle.result(PATIENCE).finish_reason in ("cancelled", "length")
    with Client(path) as another:
        assert another.generate([PROMPT], SHORT)[0].token_ids == expected


HELLO = bytes(frame_of(Hello()))


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", "only clients of compiled_llm are understood here"),
        (bytes(frame_of(Hello(version=7))), "the client speaks version 7 of the protocol, and this engine process 6"),
        (bytes(frame_of(Submit(1, PROMPT))), "the first message is no hello"),
        (HELLO[:7], "a frame that was cut after 7 bytes"),
        (HELLO[:2], "a frame that was cut after 2 bytes"),
        (HELLO + bytes(frame_of(Submit(1, PROMPT)))[:9], "a frame that was cut after 9 bytes"),
        (HELLO + HELLO, "a second hello"),
        (HELLO + b"\x7f\xff\xff\xff", "a frame that says it has 2,147,483,647 bytes"),
        (HELLO + b"\x00\x00\x00\x03abc", "a frame that is no message of the protocol"),
        (HELLO + b"\x00\x00\x00\x00", "a frame that is no message of the protocol"),
    ],
)
def test_what_is_no_frame_ends_the_connection_with_a_sentence(beside: None, path: Path, sent: bytes, said: str) -> None:
    with Bytes(path) as peer:
        peer.send(sent)
        peer.socket.shutdown(1)  # nothing more comes
        assert said in peer.problem()


def test_what_was_answered_comes_before_the_sentence_of_the_end(beside: None, engine_process: Loop, path: Path) -> None:
    with Bytes(path) as peer:
        peer.greet()
        peer.send(b"".join(map(frame_of, map(AskStats, range(900)))), b"\x00\x00\x00\x01\xc1")
        (talks,) = (other for other in engine_process.server._connections if not other.streams)
        until(lambda: isinstance([None, *talks._messages][-1], Problem))  # the socket is full
        for number in range(900):
            answer = peer.receive()
            assert isinstance(answer, StatsReply), number
            assert answer.number == number
        assert "a frame that is no message of the protocol" in peer.problem()


def test_who_asks_and_never_reads_can_leave(beside: None, path: Path) -> None:
    """Nothing more is read of it meanwhile, so that its end is noticed by whoever writes to it."""
    with Bytes(path) as peer:
        peer.greet()
        peer.send(Submit(1, PROMPT, {"max_tokens": 900, "ignore_eos": True}))
        peer.socket.setblocking(False)
        asked = b"".join(map(frame_of, map(AskStats, range(2000))))
        try:
            while sent := peer.socket.send(asked):
                asked = asked[sent:] or asked
        except BlockingIOError:
            pass
    with Client(path) as client:
        until(lambda: client.stats().connections <= 2)


def test_nobody_has_for_ever_to_say_hello(beside: None, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "_PATIENCE", 0.01)
    with Bytes(path) as peer:
        assert peer.problem() == "no hello within 0 s"


def test_a_client_of_another_version_hears_of_it(beside: None, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(client_connection, "Hello", lambda client: Hello(version=messages.VERSION + 1, client=client))
        with pytest.raises(EngineProcessError, match="install the same compiled-llm for both"):
            Client(path)
