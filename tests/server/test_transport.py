"""What is due goes out in the thread that says so, whole and in order, however slowly it is read; nobody waits."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator

from compiled_llm.server.engine_process.transport import Transport
from support.server.engine_processes import PATIENCE

LARGE = 2**20
"""More than a socket takes at once."""


class Due:
    """Frames that are to be sent, and the threads that have asked for them."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.threads: list[str] = []
        self.error: Exception | None = None

    def __call__(self) -> Iterator[bytearray]:
        self.threads.append(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        while self.frames:
            yield bytearray(self.frames.pop(0))


class Both:
    """Both ends of a connection."""

    def __init__(self) -> None:
        self.due, self.failures = Due(), list[Exception]()
        here, self.peer = socket.socketpair()
        here.setblocking(False)
        self.transport = Transport(here, self.due, self.failures.append)

    def read(self) -> bytes:
        """All that comes until the end."""
        self.peer.settimeout(PATIENCE)
        return b"".join(iter(lambda: self.peer.recv(2**16), b""))


def with_both(use: Callable[[Both], Awaitable[None]]) -> None:
    async def running() -> None:
        both = Both()
        with both.peer:
            await use(both)
            both.transport.close()

    asyncio.run(asyncio.wait_for(running(), PATIENCE))


def in_thread(name: str, function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, name=name)
    thread.start()
    return thread


def test_what_the_socket_does_not_take_goes_out_when_it_can_and_more_waits_until_then() -> None:
    async def use(both: Both) -> None:
        both.due.frames = [b"a" * LARGE]
        in_thread("steps", both.transport.flush).join(PATIENCE)
        assert both.transport.rest
        both.due.frames = [b"b", b"c"]
        in_thread("steps", both.transport.flush).join(PATIENCE)
        assert both.due.frames == [b"b", b"c"]
        reading = asyncio.create_task(asyncio.to_thread(both.read))
        await asyncio.sleep(0)
        await both.transport.taken()
        while both.due.frames:
            await asyncio.sleep(0)
        both.transport.close()
        assert await reading == b"a" * LARGE + b"bc"

    with_both(use)


def test_threads_that_flush_at_once_lose_nothing_and_mix_nothing() -> None:
    async def use(both: Both) -> None:
        numbers, lock = itertools.count(), threading.Lock()

        def work() -> None:
            for _ in range(2000):
                with lock:
                    both.due.frames.append(b"%d," % next(numbers))
                both.transport.flush()

        reading = asyncio.create_task(asyncio.to_thread(both.read))
        workers = [in_thread("steps", work) for _ in range(4)]
        while any(worker.is_alive() for worker in workers):
            await asyncio.sleep(0)
        while both.transport.rest or both.due.frames:
            await asyncio.sleep(0)
        both.transport.close()
        assert (await reading).split(b",") == [*(b"%d" % number for number in range(8000)), b""]

    with_both(use)


def test_a_fault_is_told_of_in_the_event_loop_and_nothing_follows() -> None:
    async def use(both: Both) -> None:
        both.due.error = error = ValueError("a test")
        in_thread("steps", both.transport.flush).join(PATIENCE)
        both.due.error, both.due.frames = None, [b"more"]
        both.transport.flush()
        assert both.failures == []
        while not both.failures:
            await asyncio.sleep(0)
        assert both.failures == [error]
        both.transport.close()
        assert both.read() == b""

    with_both(use)


def test_the_last_words_go_out_with_the_end() -> None:
    async def use(both: Both) -> None:
        both.due.frames = [b"the end"]
        both.transport.close()
        both.transport.close()
        both.transport.flush()
        assert both.read() == b"the end"
        assert both.due.threads == ["MainThread"]

    with_both(use)


def test_a_client_that_has_left_is_sent_nothing_and_nobody_waits_for_it() -> None:
    async def use(both: Both) -> None:
        both.due.frames = [b"a" * LARGE]
        both.transport.flush()
        assert both.transport.rest
        both.peer.close()
        await both.transport.taken()
        assert not both.transport.rest
        both.due.frames = [b"more"]
        both.transport.flush()
        assert both.due.frames == [b"more"]
        while not both.failures:
            await asyncio.sleep(0)
        assert [type(failure) for failure in both.failures] == [BrokenPipeError]

    with_both(use)
