"""The worker process that compiles grammars, which begins each with xgrammar and the tokens in memory."""

from __future__ import annotations

from msgspec import Struct
from xgrammar import CompiledGrammar, GrammarCompiler, TokenizerInfo

from compiled_llm.engine.apart.exchange import Failed
from compiled_llm.engine.apart.fork_server import ForkServer, lacks_memory
from compiled_llm.engine.grammars.forms.grammar_source import GrammarSource, message_of
from compiled_llm.engine.grammars.worker_messages import (
    MAX_BYTES,
    MAX_COMPILED,
    MAX_TEXT,
    Compile,
    Compiled,
    FromEngine,
    Learned,
    Vetted,
    WorkerVocabulary,
)

_WARMING = GrammarSource("json", '{"type": "object"}')
"""Compiled once for each vocabulary: forks have what it shares with other grammars."""


class Worker(ForkServer[Compile]):
    """A worker that forks for each grammar."""

    library, done = "xgrammar", "compiled"

    def __init__(self) -> None:
        super().__init__(FromEngine, MAX_BYTES)
        self._compilers: dict[int, GrammarCompiler] = {}

    def remember(self, message: Struct) -> Struct | None:
        if not isinstance(message, WorkerVocabulary):
            return None
        info = TokenizerInfo.deserialize_json(message.info)
        compiler = self._compilers[message.number] = GrammarCompiler(info, max_threads=message.threads)
        _WARMING.compiled(compiler)
        return Learned()

    def answer(self, task: Compile) -> Struct:
        found = task.source.compiled(self._compilers[task.vocabulary])
        if found.memory_size_bytes > MAX_COMPILED:
            return Failed("limit", f"compiled, it has more than {MAX_COMPILED:,} bytes")
        if (text := _serialized(found)) is None:
            return Vetted()
        return Compiled(text)

    def describe(self, error: Exception) -> str:
        return message_of(error)


def _serialized(grammar: CompiledGrammar) -> str | None:
    """Return a grammar as text; None if it is too long to be sent, or takes more memory to write than there is."""
    # Masks that rules share in memory are written for each of them, and xgrammar takes 16 times the text to write it.
    if grammar.memory_size_bytes > MAX_TEXT:
        return None
    try:
        text: str = grammar.serialize_json()
    except Exception as error:
        if lacks_memory(error):
            return None
        raise
    return text if len(text) <= MAX_TEXT else None
