"""The host's constraints on an answer's next token: grammars and logits processors.

Shapes: n answers, V vocabulary.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compilation.sampling.sampling import GREEDY, Sampling
from compiled_llm.requests.structured_outputs.grammar_source import GrammarSource

if TYPE_CHECKING:
    import xgrammar


class Processor(NamedTuple):
    """A logits processor of the user's own."""

    # takes the answer's tokens so far and its logits ``[V]`` float32, and returns others
    function: Callable[..., Tensor]
    name: str
    takes_prompt: bool  # whether it takes the prompt's tokens before those

    @classmethod
    def of(cls, function: Callable[..., Tensor]) -> Processor:
        name = getattr(function, "__name__", None) or type(function).__name__
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:  # it is not written in Python, and does not say
            return cls(function, name, False)
        return cls(function, name, len([each for each in parameters if each.kind in kinds]) > 2)


_SOON = 6e-4
"""Seconds in which one thread may fill the masks of a step: to start others takes nearly as long."""
_FEW = 4
"""Answers whose masks show how long those of the others take."""
_MEASURED = 16
"""Steps after which that is measured again."""
_THREADS = max(1, min(4, len(os.sched_getaffinity(0)) // 2 if hasattr(os, "sched_getaffinity") else 1))


@dataclass(eq=False, kw_only=True)
class Constraint:
    """The constraints on one answer."""

    source: GrammarSource | None = None
    stops: frozenset[int] = frozenset()  # the tokens that end an answer whose grammar has come to its end
    # must not come before ``least`` others, as far as the grammar goes on without them
    stop_token_ids: frozenset[int] = frozenset()
    least: int = 0
    vocabulary: int = 0  # how many logits a token has
    mask: NDArray[np.int32] | None = None  # ``[words]`` int32, the tokens that the request allows besides; None for all
    processors: tuple[Processor, ...] = ()  # called one after the other
    matcher: xgrammar.GrammarMatcher | None = None

    @property
    def ready(self) -> bool:
        """Whether its grammar is compiled, if it has one."""
        return self.source is None or self.matcher is not None

    def applied_to(self, sampling: Sampling | None) -> Sampling:
        """Take over the mask of an answer's settings, and return them with deferred sampling; None is greedy."""
        sampling = GREEDY if sampling is None else sampling
        self.mask = sampling.mask
        if self.source is None or self.mask is not None:
            return replace(sampling, deferred=True)
        return replace(sampling, deferred=True, mask=np.full(-(-self.vocabulary // 32), -1, dtype=np.int32))

    def begin(self, grammar: xgrammar.CompiledGrammar) -> None:
        """Stand at the beginning of a grammar."""
        from xgrammar import GrammarMatcher

        self.matcher = GrammarMatcher(grammar, override_stop_tokens=sorted(self.stops))

    def accepts(self, token: int) -> bool:
        """Advance by a token that does not end the answer; False if the grammar does not allow it."""
        return self.matcher is None or self.matcher.accept_token(token)

    def narrow(self, allowed: NDArray[np.int32], tokens: int) -> None:
        """Remove from ``allowed`` ``[words]`` what the request bars besides, after so many tokens."""
        if self.mask is not None:
            np.bitwise_and(allowed, self.mask, out=allowed)
        if tokens < self.least:
            without = allowed.copy()
            words = without.view(np.uint32)
            for token in self.stop_token_ids:
                words[token >> 5] &= ~np.uint32(1 << (token & 31))
            if without.any():
                allowed[:] = without


def accept(matchers: Sequence[xgrammar.GrammarMatcher], tokens: Sequence[int]) -> Sequence[bool]:
    """Advance grammars by a token each, in one call; False for each that does not allow it."""
    if not matchers:  # of requests with logits processors alone, which need no xgrammar
        return []
    from xgrammar import BatchGrammarMatcher

    accepted: list[bool] = BatchGrammarMatcher.batch_accept_token(list(matchers), list(tokens))
    return accepted


class MaskWriter:
    """A writer of the masks of many answers, in one thread or, if that takes long, in several."""

    def __init__(self) -> None:
        self._fillers: dict[int, xgrammar.BatchGrammarMatcher] = {}  # by how many threads they have
        self._each = 0.0  # seconds that a mask has taken lately
        self._steps = 0

    def fill(self, matchers: Sequence[xgrammar.GrammarMatcher], masks: NDArray[np.int32]) -> None:
        """Write which tokens grammars allow next into ``masks`` ``[n, words]``, whose bits of no token are zero."""
        first = self._measure(matchers, masks) if self._steps % _MEASURED == 0 else 0
        self._steps += 1
        if first < len(matchers):
            soon = (len(matchers) - first) * self._each < _SOON
            self._fill(1 if soon else _THREADS, matchers[first:], masks[first:])

    def _measure(self, matchers: Sequence[xgrammar.GrammarMatcher], masks: NDArray[np.int32]) -> int:
        """Fill the first few masks, and return how many."""
        few, start = min(_FEW, len(matchers)), time.perf_counter()
        self._fill(1, matchers[:few], masks[:few])
        self._each = (time.perf_counter() - start) / max(1, few)
        return few

    def _fill(self, threads: int, matchers: Sequence[xgrammar.GrammarMatcher], masks: NDArray[np.int32]) -> None:
        if threads not in self._fillers:
            from xgrammar import BatchGrammarMatcher

            self._fillers[threads] = BatchGrammarMatcher(max_threads=threads)
        self._fillers[threads].batch_fill_next_token_bitmask(list(matchers), masks)
