"""Compilers of grammars in the engine's own process."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from compiled_llm.engine.grammars.forms.grammar_source import GrammarSource

if TYPE_CHECKING:
    import xgrammar
    from transformers import PreTrainedTokenizerBase

    from compiled_llm.engine.grammars.form import GrammarForm  # imports torch, which the worker process does not

KEPT = 2**28
"""Bytes of compiled grammars that are kept, and of parts that they share with later ones."""
MAX_VOCABULARIES = 4
"""Vocabularies that are kept: one of a model, one for tags, and one of each set of a user's own end tokens."""

T = TypeVar("T")
Key = tuple[int, frozenset[int], bool]
"""How many logits a token has, the tokens that end answers, and whether special tokens are spelled."""


class Compilers:
    """A compiler in the calling thread, any. Nothing can stop it, and a crash there crashes the process."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._compilers: Latest[xgrammar.GrammarCompiler] = Latest(lambda key, place: compiler(spelled(tokenizer, key)))

    def check(self, source: GrammarSource) -> None:
        """Raise ValueError if a form cannot be compiled, as far as that is known at once."""
        source.check()

    def prepare(self, vocabulary: int, stops: frozenset[int]) -> None:
        """Learn the tokenizer's tokens, which the first grammar has to wait for otherwise."""
        self._compilers.of((vocabulary, stops, False))

    def compile(self, form: GrammarForm, wanted: Callable[[], bool]) -> xgrammar.CompiledGrammar:
        """Compile a grammar, also if it is not wanted any more: it is kept for later requests."""
        return form.source.compiled(self._compilers.of(vocabulary_of(form)))

    def close(self) -> None:
        self._compilers.clear()


class Latest(Generic[T]):
    """The latest few values made for vocabularies, each with its place."""

    def __init__(self, make: Callable[[Key, int], T]) -> None:
        self._make = make
        self._made: OrderedDict[Key, tuple[int, T]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, key: Key) -> T:
        """Return the value for a vocabulary; the least recently used one makes room."""
        with self._lock:
            if key not in self._made:
                full = len(self._made) == MAX_VOCABULARIES
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


def vocabulary_of(form: GrammarForm) -> Key:
    return form.vocabulary, form.stops, form.source.kind == "structural_tag"


def max_at_once() -> int:
    """Return how many grammars are compiled at once, and how many threads each has: others need the cores, too."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))


def compiler(tokens: xgrammar.TokenizerInfo) -> xgrammar.GrammarCompiler:
    from xgrammar import GrammarCompiler

    return GrammarCompiler(tokens, max_threads=max_at_once(), cache_limit_bytes=KEPT)


def spelled(tokenizer: PreTrainedTokenizerBase, key: Key) -> xgrammar.TokenizerInfo:
    """Return the texts of tokens; special ones, which are left out of texts, only tags may have."""
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
