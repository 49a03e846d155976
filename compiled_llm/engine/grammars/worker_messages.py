"""The messages between an engine and the worker process that compiles its grammars."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, Literal

from msgspec import Struct

from compiled_llm.engine.grammars.compilers import UnwantedError
from compiled_llm.engine.grammars.forms.grammar_source import GrammarSource
from compiled_llm.protocol.frames import Frames

NEXT = b"n"
"""To the worker, with one end of a pair of sockets: a message waits there, and its answer goes back there."""
MAX_BYTES = 2**25
"""Of a compiled grammar that is sent, and of the tokens of a tokenizer: to read one takes six times as much memory."""
MAX_COMPILED = 2**27
"""Bytes of a compiled grammar in memory; serialised, it has up to three times as many."""
_AT_ONCE = 2**20


class WorkerVocabulary(Struct, tag="vocabulary", frozen=True):
    """Tokens that grammars are compiled for."""

    number: int  # their place; they replace those that had it
    info: str  # a ``TokenizerInfo``, serialised
    threads: int  # how many compile one grammar


class Compile(Struct, tag="compile", frozen=True):
    """A grammar to compile, for the vocabulary of that number."""

    vocabulary: int
    source: GrammarSource
    seconds: int  # of processor time that it may take
    memory: int  # bytes that it may take, besides those of the worker


class Learned(Struct, tag="learned", frozen=True):
    """The tokens are known."""


class Compiled(Struct, tag="compiled", frozen=True):
    """A ``CompiledGrammar``, serialised."""

    grammar: str


class Vetted(Struct, tag="vetted", frozen=True):
    """The grammar compiles within its limits, and is so large that to compile it again costs less than to send it."""


class Failed(Struct, tag="failed", frozen=True):
    """A failure to compile a grammar."""

    # ``"invalid"``, by xgrammar; ``"limit"`` or ``"crash"``, which would happen again; ``"lost"``, its process was
    # ended by something else
    kind: Literal["invalid", "limit", "crash", "lost"]
    message: str


FromEngine = WorkerVocabulary | Compile
FromWorker = Learned | Compiled | Vetted | Failed


def received(end: socket.socket, message: Any, wanted: Callable[[], bool] = lambda: True) -> Any:
    """Wait for one message; None if the other end has gone."""
    # ``wanted`` is called as often as the socket's timeout says; UnwantedError once it is False, FrameError for others'
    # messages.
    frames: Frames[Any] = Frames(message, MAX_BYTES)
    while wanted():
        try:
            data = end.recv(_AT_ONCE)
        except TimeoutError:
            continue
        except ConnectionError:
            return None
        if not data:
            return None
        for found in frames.feed(data):
            return found
    raise UnwantedError
