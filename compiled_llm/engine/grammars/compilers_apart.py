"""Compilers in a worker process: a crash ends that process, not the engine's."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from compiled_llm.engine.apart.exchange import Failed
from compiled_llm.engine.grammars.compilers import Compilers, Key, Latest, compiler, max_at_once, spelled, vocabulary_of
from compiled_llm.engine.grammars.form import GrammarForm
from compiled_llm.engine.grammars.forms.grammar_source import GrammarSource
from compiled_llm.engine.grammars.worker_messages import Compile, Compiled, Vetted, WorkerVocabulary
from compiled_llm.engine.grammars.worker_process import WorkerProcess

if TYPE_CHECKING:
    import xgrammar
    from transformers import PreTrainedTokenizerBase

MAX_MEMORY = 2**29
"""Bytes that a grammar may take in the worker process, besides the worker's own; a process for each, 16 at most."""
_SHARE = 2 / 3
"""The share of a request's timeout that its grammar may take of processor time."""
_MAX_FATAL = 4096
"""Forms that have ended a process and are known by their digests, of 32 bytes."""


class CompilersApart(Compilers):
    """A compiler in a worker process, where a form that crashes or takes too long fails its own requests alone."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, process: WorkerProcess, timeout: float) -> None:
        self._process = process
        self._seconds = max(1, math.ceil(timeout * _SHARE))
        self._tokens: Latest[_Tokens] = Latest(lambda key, place: _Tokens.of(tokenizer, key, place))
        self._fatal: OrderedDict[bytes, str] = OrderedDict()

    def check(self, source: GrammarSource) -> None:
        """Refuse a form that has ended a process; others are read in the next one."""
        if (why := self._fatal.get(_digest(source))) is not None:
            raise ValueError(why)

    def prepare(self, vocabulary: int, stops: frozenset[int]) -> None:
        """Learn the tokenizer's tokens, here and there."""
        self._process.learn(self._tokens.of((vocabulary, stops, False)).sent)

    def compile(self, form: GrammarForm, wanted: Callable[[], bool]) -> xgrammar.CompiledGrammar:
        """Have a grammar compiled, until it is not wanted any more."""
        source = form.source
        self.check(source)  # an equal one may have ended a process meanwhile
        tokens = self._tokens.of(vocabulary_of(form))
        wish = Compile(tokens.sent.number, source, self._seconds, MAX_MEMORY)
        match self._process.compile(wish, tokens.sent, wanted):
            case Compiled(grammar):
                from xgrammar import CompiledGrammar

                return CompiledGrammar.deserialize_json(grammar, tokens.info)
            case Vetted():
                return source.compiled(compiler(tokens.info))
            case Failed("lost", message):
                raise ConnectionError(message)
            case Failed(kind, message):
                if kind != "invalid":
                    self._remember(source, message)
                raise ValueError(message)

    def _remember(self, source: GrammarSource, why: str) -> None:
        self._fatal[_digest(source)] = why
        while len(self._fatal) > _MAX_FATAL:
            self._fatal.popitem(last=False)

    def close(self) -> None:
        self._process.close()
        self._tokens.clear()


class _Tokens(NamedTuple):
    """A tokenizer's tokens as this process knows them, and as they are sent."""

    info: xgrammar.TokenizerInfo
    sent: WorkerVocabulary

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, key: Key, place: int) -> _Tokens:
        info = spelled(tokenizer, key)
        return cls(info, WorkerVocabulary(place, info.serialize_json(), max_at_once()))


def _digest(source: GrammarSource) -> bytes:
    return hashlib.sha256(repr(source).encode("utf-8", "surrogatepass")).digest()
