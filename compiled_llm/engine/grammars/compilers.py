"""What compiles an engine's grammars: threads of its process, or a worker process that a crash ends in its place."""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from compiled_llm.engine.grammars.constraint import Constraint
from compiled_llm.engine.grammars.source import GrammarSource
from compiled_llm.engine.grammars.worker_messages import Compile, Compiled, Failed, Vetted, Vocabulary

if TYPE_CHECKING:
    import xgrammar

    from compiled_llm.engine.grammars.worker_process import WorkerProcess

KEPT = 2**28
"""Bytes of compiled grammars that are kept, and of parts that they share with later ones."""
MOST_VOCABULARIES = 4
"""Of a model there is one, and one for tags; others, if the tokens that end answers are those that users name."""
MOST_MEMORY = 2**29
"""Bytes that a grammar may take in the worker process, beside what that has; a process for each, 16 at most."""
_SHARE = 2 / 3
"""Of the seconds that a request waits for its grammar, what that may take of processor time."""
_MOST_FATAL = 4096
"""Forms that have ended a process and are known by their digests, of 32 bytes."""

T = TypeVar("T")
Key = tuple[int, frozenset[int], bool]
"""How many logits a token has, the tokens that end answers, and whether special tokens are spelled."""


class Compilers(Protocol):
    """Compiles grammars; each method may be called from any thread."""

    def check(self, source: GrammarSource) -> None:
        """Look whether a form can be compiled, as far as that is told at once; raises ValueError."""
        ...

    def prepare(self, vocabulary: int, stops: frozenset[int]) -> None:
        """Learn the tokenizer's tokens, which the first grammar has to wait for otherwise."""
        ...

    def compile(self, constraint: Constraint, wanted: Callable[[], bool]) -> xgrammar.CompiledGrammar:
        """Compile a grammar, which may take seconds; raises UnwantedError, or why there is none."""
        ...

    def close(self) -> None:
        """Compile no more."""
        ...


class CompilersHere:
    """Compiles in the threads that ask. Nothing can stop it, and what crashes there crashes the process."""

    def __init__(self, tokenizer: Any) -> None:
        """Begin without one.

        Args:
            tokenizer: of HuggingFace's, whose tokens grammars are about.
        """
        self._compilers: _Latest[xgrammar.GrammarCompiler] = _Latest(
            lambda key, place: _compiler(_spelled(tokenizer, key))
        )

    def check(self, source: GrammarSource) -> None:
        """Read a form, unless it is long."""
        source.check()

    def prepare(self, vocabulary: int, stops: frozenset[int]) -> None:
        """Learn the tokenizer's tokens."""
        self._compilers.of((vocabulary, stops, False))

    def compile(self, constraint: Constraint, wanted: Callable[[], bool]) -> xgrammar.CompiledGrammar:
        """Compile a grammar, also if it is not wanted any more: it is kept for later requests."""
        source, key = _asked(constraint)
        return source.compiled(self._compilers.of(key))

    def close(self) -> None:
        """Forget the tokens."""
        self._compilers.clear()


class CompilersApart:
    """Compiles in a worker process, where a form that crashes or takes too much costs its own requests alone."""

    def __init__(self, tokenizer: Any, process: WorkerProcess, timeout: float) -> None:
        """Have a process work for an engine.

        Args:
            tokenizer: of HuggingFace's, whose tokens grammars are about.
            process: the worker.
            timeout: seconds that a request waits for its grammar.
        """
        self._process = process
        self._seconds = max(1, math.ceil(timeout * _SHARE))
        self._tokens: _Latest[_Tokens] = _Latest(lambda key, place: _Tokens.of(tokenizer, key, place))
        self._fatal: OrderedDict[bytes, str] = OrderedDict()

    def check(self, source: GrammarSource) -> None:
        """Refuse a form that has ended a process; others are read in the next one."""
        if (why := self._fatal.get(_digest(source))) is not None:
            raise ValueError(why)

    def prepare(self, vocabulary: int, stops: frozenset[int]) -> None:
        """Learn the tokenizer's tokens, here and there."""
        self._process.learn(self._tokens.of((vocabulary, stops, False)).sent)

    def compile(self, constraint: Constraint, wanted: Callable[[], bool]) -> xgrammar.CompiledGrammar:
        """Have a grammar compiled, until it is not wanted any more."""
        source, key = _asked(constraint)
        self.check(source)  # an equal one may have ended a process meanwhile
        tokens = self._tokens.of(key)
        asked = Compile(tokens.sent.number, source, self._seconds, MOST_MEMORY)
        match self._process.compile(asked, tokens.sent, wanted):
            case Compiled(grammar):
                from xgrammar import CompiledGrammar

                return CompiledGrammar.deserialize_json(grammar, tokens.info)
            case Vetted():
                return source.compiled(_compiler(tokens.info))
            case Failed("lost", message):
                raise ConnectionError(message)
            case Failed(kind, message):
                if kind != "invalid":
                    self._remember(source, message)
                raise ValueError(message)

    def _remember(self, source: GrammarSource, why: str) -> None:
        self._fatal[_digest(source)] = why
        while len(self._fatal) > _MOST_FATAL:
            self._fatal.popitem(last=False)

    def close(self) -> None:
        """End the process."""
        self._process.close()
        self._tokens.clear()


class _Tokens(NamedTuple):
    """A tokenizer's tokens as this process knows them, and as they are sent."""

    info: xgrammar.TokenizerInfo
    sent: Vocabulary

    @classmethod
    def of(cls, tokenizer: Any, key: Key, place: int) -> _Tokens:
        info = _spelled(tokenizer, key)
        return cls(info, Vocabulary(place, info.serialize_json(), most_at_once()))


class _Latest(Generic[T]):
    """The latest few of what is made for vocabularies, each in one of as many places."""

    def __init__(self, make: Callable[[Key, int], T]) -> None:
        self._make = make
        self._made: OrderedDict[Key, tuple[int, T]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, key: Key) -> T:
        with self._lock:
            if key not in self._made:
                full = len(self._made) == MOST_VOCABULARIES
                place = next(iter(self._made.values()))[0] if full else len(self._made)
                made = self._make(key, place)
                if full:
                    self._made.popitem(last=False)
                self._made[key] = place, made
            self._made.move_to_end(key)
            return self._made[key][1]

    def clear(self) -> None:
        with self._lock:
            self._made.clear()


def compilers_of(tokenizer: Any, worker: WorkerProcess | None, timeout: float) -> Compilers:
    """Return what compiles an engine's grammars: the worker process, or without one this process."""
    return CompilersHere(tokenizer) if worker is None else CompilersApart(tokenizer, worker, timeout)


def _asked(constraint: Constraint) -> tuple[GrammarSource, Key]:
    source = constraint.source
    assert source is not None, "there is no grammar"
    return source, (constraint.vocabulary, constraint.stops, source.kind == "structural_tag")


def _digest(source: GrammarSource) -> bytes:
    return hashlib.sha256(repr(source).encode("utf-8", "surrogatepass")).digest()


def most_at_once() -> int:
    """Return how many grammars are compiled at once, and threads for one: others need the cores, too."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))


def _compiler(tokens: xgrammar.TokenizerInfo) -> xgrammar.GrammarCompiler:
    from xgrammar import GrammarCompiler

    return GrammarCompiler(tokens, max_threads=most_at_once(), cache_limit_bytes=KEPT)


def _spelled(tokenizer: Any, key: Key) -> xgrammar.TokenizerInfo:
    """Return what the tokens spell; special ones, which are left out of texts, only tags may have."""
    from xgrammar import TokenizerInfo, VocabType

    vocabulary, stops, tags = key[0], sorted(key[1]), key[2]
    tokens = TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary, stop_token_ids=stops)
    special = [token for token in tokenizer.all_special_ids if token < vocabulary]
    if tags or not special:
        return tokens
    spelled = tokens.decoded_vocab
    for token in special:
        spelled[token] = b""
    return TokenizerInfo(
        spelled,
        VocabType.RAW,
        vocab_size=vocabulary,
        stop_token_ids=stops,
        add_prefix_space=tokens.add_prefix_space,
    )
