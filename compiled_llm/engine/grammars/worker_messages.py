"""The messages between an engine and the worker process that compiles its grammars."""

from __future__ import annotations

from msgspec import Struct

from compiled_llm.engine.apart.exchange import Failed
from compiled_llm.engine.grammars.forms.grammar_source import GrammarSource

MAX_BYTES = 2**25
"""Of a compiled grammar that is sent, and of the tokens of a tokenizer: to read one takes six times as much memory."""
MAX_TEXT = MAX_BYTES // 2
"""Characters of a compiled grammar that is sent, also if each has two bytes; a longer one is compiled again."""
MAX_COMPILED = 2**27
"""Bytes of a compiled grammar in memory; serialised, it can have ten times as many."""


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


FromEngine = WorkerVocabulary | Compile
FromWorker = Learned | Compiled | Vetted | Failed
