"""A request whose settings take long to read begins beside the event loop, while others are answered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.client import Client
from compiled_llm.engine.engine import Engine
from compiled_llm.protocol.messages import Cancel, Ended, StepUpdates, Submit
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.requests.structured_outputs import StructuredOutputsParams
from compiled_llm.server.engine_process import stream
from support.server.engine_processes import PATIENCE, Bytes, Loop, until

SLOW = {"bad_words": ["fox"], "max_tokens": 3}


class Slow:
    """Requests with bad words do not begin before they are let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        self.threads: list[int] = []
        self._begun = stream._submitted
        monkeypatch.setattr(stream, "_submitted", self._submitted)

    def _submitted(self, engine: Engine, submit: Submit, *arguments: Any) -> Any:
        if "bad_words" in submit.params:
            self.threads.append(threading.get_ident())
            assert self.free.wait(PATIENCE)
        return self._begun(engine, submit, *arguments)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    slow = Slow(monkeypatch)
    yield slow
    slow.free.set()


def test_others_are_answered_while_a_request_begins(engine_process: Loop, path: Path, slow: Slow) -> None:
    with Client(path) as client, Client(path) as other:
        handles = [client.submit([3, 4], SamplingParams(**SLOW)) for _ in range(2)]  # type: ignore[arg-type]
        until(lambda: len(slow.threads) == 2)
        for each in (client, other):
            assert (
                len(each.generate([5, 6], SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2
            )
        assert client.stats().running == 0
        assert engine_process._thread.ident not in slow.threads
        slow.free.set()
        assert [handle.result().outputs[0].finish_reason for handle in handles] == ["length", "length"]


def test_what_was_cancelled_before_it_has_begun_ends(engine_process: Loop, path: Path, slow: Slow) -> None:
    with Bytes(path) as peer:
        peer.greet()
        peer.send(
            Submit(1, [3, 4], {**SLOW, "n": 2, "max_tokens": 500}), Cancel(1, 1), Submit(2, [3], {"max_tokens": 1})
        )
        until(lambda: slow.threads)
        assert isinstance(peer.receive(), StepUpdates)  # of the second
        peer.send(Cancel(1))
        until(lambda: engine_process.server._connections)
        (connection,) = engine_process.server._connections
        until(lambda: connection._beginnings._cancelled == {1: [1, None]})
        slow.free.set()
        reasons: dict[int, Ended | None] = {}
        while len(reasons) < 2:
            step = peer.receive()
            assert isinstance(step, StepUpdates)
            reasons |= {update.index: update.ended for update in step.updates if update.ended is not None}
        assert {ended.finish_reason for ended in reasons.values() if ended is not None} == {"cancelled"}


def test_a_client_may_leave_before_its_request_has_begun(
    engine: Engine, engine_process: Loop, path: Path, slow: Slow
) -> None:
    with Bytes(path) as peer:
        peer.greet()
        peer.send(Submit(1, [3, 4], {**SLOW, "max_tokens": 900}))
        until(lambda: slow.threads)
    until(lambda: not engine_process.server._connections)
    slow.free.set()
    until(lambda: engine.stats().finished == 1)
    assert engine.stats().running == engine.stats().waiting == 0


def test_a_number_that_is_taken_and_what_is_refused(engine_process: Loop, path: Path, slow: Slow) -> None:
    with Bytes(path) as peer:
        peer.greet()
        peer.send(Submit(1, [3], SLOW), Submit(1, [3], {"max_tokens": 1}))
        assert "a second request number 1" in peer.problem()
    slow.free.set()
    with Client(path) as client:
        form = StructuredOutputsParams(regex="(")
        with pytest.raises(ValueError, match="structured_outputs"):
            client.generate([3], SamplingParams(structured_outputs=form))
        with pytest.raises(ValueError, match="bad_words"):
            client.generate([3], SamplingParams(bad_words=["fox " * 20]))
