"""Threads that the end of a process does not wait for: their results are not needed any more."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThreads(Executor):
    """At most ``count`` threads, which begin as they are needed; Python waits for those of a ``ThreadPoolExecutor``."""

    def __init__(self, count: int, name: str) -> None:
        self._most, self._name = count, name
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._lock, self._count = threading.Lock(), 0
        self._idle = threading.Semaphore(0)  # how many threads wait for a task

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call a function in one of them; those that come later wait until one is free."""
        future: Future[T] = Future()
        self._tasks.put((future, lambda: fn(*args, **kwargs)))
        with self._lock:
            if not self._idle.acquire(blocking=False) and self._count < self._most:
                self._count += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            try:
                future, function = self._tasks.get_nowait()
            except Empty:
                self._idle.release()
                future, function = self._tasks.get()
            _settle(future, function)
            del future, function  # else what it has returned stays until the next task


_OF_LONG_WORK = DaemonThreads(min(32, (os.cpu_count() or 1) + 4), "compiled_llm long work")  # as many as asyncio's


async def in_thread(function: Callable[[], T], threads: DaemonThreads = _OF_LONG_WORK) -> T:
    """Return ``function()`` of another thread, which the end of the process does not wait for."""
    return await asyncio.get_running_loop().run_in_executor(threads, function)


def _settle(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:  # of Rust, too, whose panics are no Exception
        future.set_exception(error)
