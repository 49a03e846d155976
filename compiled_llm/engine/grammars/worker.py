"""The worker process that compiles grammars: each in a fork of its own, which a crash ends alone."""

# It has one thread, so it can fork at any time, and a fork begins with xgrammar and the tokens in memory. Everything
# ends with its socket: the worker with the engine's process, a fork with the wish for its grammar.

from __future__ import annotations

import os
import resource
import selectors
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import NamedTuple

from xgrammar import CompiledGrammar, GrammarCompiler, TokenizerInfo

from compiled_llm.engine.grammars.forms.grammar_source import GrammarSource, said
from compiled_llm.engine.grammars.worker_messages import (
    MAX_BYTES,
    MAX_COMPILED,
    Compile,
    Compiled,
    Failed,
    FromEngine,
    FromWorker,
    Learned,
    Vetted,
    WorkerVocabulary,
    received,
)
from compiled_llm.protocol.frames import frame_of

_WARMING = GrammarSource("json", '{"type": "object"}')
"""Compiled once for each vocabulary: forks have what it shares with other grammars."""


class _Fork(NamedTuple):
    """A process that compiles one grammar."""

    process: int
    asked: Compile
    answer: socket.socket  # where the answer goes; the worker says there if the process has died
    alive: int  # a pipe whose other end that process alone has


class Worker:
    """A worker that forks for each grammar."""

    def __init__(self) -> None:
        """Read what the engine says from the standard input, a socket."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine's process, which ends this one
        self._engine = socket.socket(fileno=os.dup(sys.stdin.fileno()))
        self._silent = os.open(os.devnull, os.O_RDWR)
        os.dup2(self._silent, sys.stdin.fileno())  # else forks would keep the socket open
        self._compilers: dict[int, GrammarCompiler] = {}
        self._forks: set[_Fork] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._engine, selectors.EVENT_READ)

    def run(self) -> None:
        """Work until the engine has gone; forks end by themselves."""
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._bury(key.data)
                elif not self._take():
                    return

    def _take(self) -> bool:
        """Handle the engine's next message; False if the engine has gone."""
        word, files, _, _ = socket.recv_fds(self._engine, 1, 1)
        if not word:
            return False
        answer = socket.socket(fileno=files[0])
        match received(answer, FromEngine):
            case WorkerVocabulary() as tokens:
                self._learn(tokens)
                _send(answer, Learned())
                answer.close()
            case Compile() as asked:
                self._fork(asked, answer)
            case _:  # the engine's thread has gone meanwhile
                answer.close()
        return True

    def _learn(self, tokens: WorkerVocabulary) -> None:
        info = TokenizerInfo.deserialize_json(tokens.info)
        compiler = self._compilers[tokens.number] = GrammarCompiler(info, max_threads=tokens.threads)
        _WARMING.compiled(compiler)

    def _fork(self, asked: Compile, answer: socket.socket) -> None:
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            try:
                self._leave()
                _compile(self._compilers[asked.vocabulary], asked, answer)
            finally:
                os._exit(0)
        os.close(writing)
        fork = _Fork(process, asked, answer, reading)
        self._forks.add(fork)
        self._selector.register(reading, selectors.EVENT_READ, fork)

    def _leave(self) -> None:
        """Close in a fork what is the worker's, and the sockets of other forks, so that their ends are noticed."""
        self._engine.close()
        self._selector.close()
        os.dup2(self._silent, sys.stderr.fileno())  # a library that aborts says so there
        for fork in self._forks:
            fork.answer.close()
            os.close(fork.alive)

    def _bury(self, fork: _Fork) -> None:
        """Report the signal that has killed a fork, if one has, and forget the fork."""
        self._selector.unregister(fork.alive)
        os.close(fork.alive)
        self._forks.discard(fork)
        code = os.waitstatus_to_exitcode(os.waitpid(fork.process, 0)[1])
        if code < 0:
            _send(fork.answer, _death(-code, fork.asked))
        fork.answer.close()


def _death(number: int, asked: Compile) -> Failed:
    if number == signal.SIGXCPU:
        return Failed("limit", f"it takes more than {asked.seconds} s of processor time")
    name = signal.Signals(number).name
    if number in (signal.SIGKILL, signal.SIGTERM):
        return Failed("lost", f"the process that compiled it was ended by {name}")
    return Failed("crash", f"xgrammar ends its process by {name}")


# ---- in a fork


def _compile(compiler: GrammarCompiler, asked: Compile, answer: socket.socket) -> None:
    threading.Thread(target=_end_with, args=(answer,), daemon=True).start()
    _limit(asked)
    try:
        _send(answer, _answer(asked.source.compiled(compiler)))
    except Exception as error:  # whatever a library says of a form: without an answer, its client would try again
        _send(answer, _failure(error, asked))


def _answer(found: CompiledGrammar) -> FromWorker:
    if found.memory_size_bytes > MAX_COMPILED:
        return Failed("limit", f"compiled, it has more than {MAX_COMPILED:,} bytes")
    return Vetted() if 3 * found.memory_size_bytes > MAX_BYTES else Compiled(found.serialize_json())


def _failure(error: Exception, asked: Compile) -> Failed:
    if isinstance(error, MemoryError) or "bad_alloc" in str(error):
        return Failed("limit", f"it takes more than {asked.memory:,} bytes of memory")
    return Failed("invalid", said(error))


def _end_with(answer: socket.socket) -> None:
    """End this process once its answer is not awaited any more."""
    with suppress(OSError):
        answer.recv(1)
    os._exit(0)


def _limit(asked: Compile) -> None:
    """Bound what this process may take from now on."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (asked.seconds, asked.seconds + 1))
    with suppress(OSError, ValueError):  # only Linux tells what it has, and holds to it
        with open("/proc/self/statm") as sizes:
            has = int(sizes.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (has + asked.memory, has + asked.memory))


def _send(end: socket.socket, message: FromWorker) -> None:
    with suppress(OSError):  # the answer is not awaited any more
        end.sendall(frame_of(message, MAX_BYTES))
