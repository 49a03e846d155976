"""The worker process: each task in a fork of its own, with limits, which a crash ends alone."""

# It has one thread, so it can fork at any time, and a fork begins with all that the worker has in memory. Everything
# ends with its socket: the worker with the process that has started it, a fork with the wish for its answer.

from __future__ import annotations

import ctypes
import os
import resource
import selectors
import signal
import socket
import sys
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from msgspec import Struct

from compiled_llm.engine.apart.exchange import Failed, received, send

_M_ARENA_MAX = -8  # of malloc.h


class LimitedTask(Protocol):
    """A task, with what it may take: seconds of processor time, and bytes besides those of the worker."""

    @property
    def seconds(self) -> int: ...

    @property
    def memory(self) -> int: ...


TaskT = TypeVar("TaskT", bound=LimitedTask)


class _Fork(NamedTuple):
    """A process that does one task."""

    process: int
    task: Any
    answer: socket.socket  # where the answer goes; the worker says there if the process has died
    alive: int  # a pipe whose other end that process alone has


class ForkServer(ABC, Generic[TaskT]):
    """A worker that forks for each task; what it is told besides, it remembers itself."""

    library: str  # that does the work, for errors
    done: str  # what it does with a task, as in "the process that compiled it"

    def __init__(self, messages: Any, max_bytes: int) -> None:
        """Read ``messages`` of at most ``max_bytes`` from the standard input, a socket."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that ends this one
        _share_one_heap()
        self._messages, self._max_bytes = messages, max_bytes
        self._asker = socket.socket(fileno=os.dup(sys.stdin.fileno()))
        self._silent = os.open(os.devnull, os.O_RDWR)
        os.dup2(self._silent, sys.stdin.fileno())  # else forks would keep the socket open
        self._forks: set[_Fork] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._asker, selectors.EVENT_READ)

    def remember(self, message: Any) -> Struct | None:
        """Remember a message, and return the answer to it; None if it is a task."""
        return None

    @abstractmethod
    def answer(self, task: TaskT) -> Struct:
        """Do a task, in a fork within its limits; an exception is the answer that it is invalid."""

    def describe(self, error: Exception) -> str:
        """Return an exception of the library as a sentence."""
        return str(error)

    def run(self) -> None:
        """Work until the process that has tasks has gone; forks end by themselves."""
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._bury(key.data)
                elif not self._take():
                    return

    def _take(self) -> bool:
        """Handle the next message; False if the other process has gone."""
        word, files, _, _ = socket.recv_fds(self._asker, 1, 1)
        if not word:
            return False
        end = socket.socket(fileno=files[0])
        message = received(end, self._messages, self._max_bytes)
        if message is None:  # the thread that has asked has gone meanwhile
            end.close()
        elif (answer := self.remember(message)) is not None:
            send(end, answer, self._max_bytes)
            end.close()
        else:
            self._fork(message, end)
        return True

    def _fork(self, task: TaskT, end: socket.socket) -> None:
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            try:
                self._leave()
                self._work(task, end)
            finally:
                os._exit(0)
        os.close(writing)
        fork = _Fork(process, task, end, reading)
        self._forks.add(fork)
        self._selector.register(reading, selectors.EVENT_READ, fork)

    def _bury(self, fork: _Fork) -> None:
        """Report the signal that has killed a fork, if one has, and forget the fork."""
        self._selector.unregister(fork.alive)
        os.close(fork.alive)
        self._forks.discard(fork)
        code = os.waitstatus_to_exitcode(os.waitpid(fork.process, 0)[1])
        if code < 0:
            send(fork.answer, self._death(-code, fork.task), self._max_bytes)
        fork.answer.close()

    def _death(self, number: int, task: LimitedTask) -> Failed:
        if number == signal.SIGXCPU:
            return Failed("limit", f"it takes more than {task.seconds} s of processor time")
        name = signal.Signals(number).name
        if number in (signal.SIGKILL, signal.SIGTERM):
            return Failed("lost", f"the process that {self.done} it was ended by {name}")
        return Failed("crash", f"{self.library} ends its process by {name}")

    # ---- in a fork

    def _leave(self) -> None:
        """Close what is the worker's, and the sockets of other forks, so that their ends are noticed."""
        self._asker.close()
        self._selector.close()
        os.dup2(self._silent, sys.stderr.fileno())  # a library that aborts says so there
        for fork in self._forks:
            fork.answer.close()
            os.close(fork.alive)

    def _work(self, task: TaskT, end: socket.socket) -> None:
        threading.Thread(target=_end_with, args=(end,), daemon=True).start()
        _limit(task)
        try:
            send(end, self.answer(task), self._max_bytes)
        except Exception as error:  # whatever a library says: without an answer, its client would try again
            send(end, self._failure(error, task), self._max_bytes)

    def _failure(self, error: Exception, task: LimitedTask) -> Failed:
        if lacks_memory(error):
            return Failed("limit", f"it takes more than {task.memory:,} bytes of memory")
        return Failed("invalid", self.describe(error))


def lacks_memory(error: Exception) -> bool:
    """Whether a library has failed since there was no memory."""
    return isinstance(error, MemoryError) or "bad_alloc" in str(error)


def _end_with(end: socket.socket) -> None:
    """End this process once its answer is not awaited any more."""
    with suppress(OSError):
        end.recv(1)
    os._exit(0)


def _share_one_heap() -> None:
    """Have all threads take memory from one heap: each would reserve 64 MiB of addresses, which count as memory."""
    with suppress(OSError, AttributeError):  # only glibc has several
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def _limit(task: LimitedTask) -> None:
    """Bound what this process may take from now on."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (task.seconds, task.seconds + 1))
    with suppress(OSError, ValueError):  # only Linux tells what it has, and holds to it
        with open("/proc/self/statm") as sizes:
            has = int(sizes.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (has + task.memory, has + task.memory))
