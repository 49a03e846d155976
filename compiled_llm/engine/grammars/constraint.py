"""What decides on the host which tokens an answer may have next.

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

from compiled_llm.compilation.sampling import GREEDY, Sampling
from compiled_llm.engine.grammars.source import GrammarSource

if TYPE_CHECKING:
    import xgrammar


class Processor(NamedTuple):
    """A logits processor of the user's own.

    Attributes:
        function: takes the answer's tokens so far and its logits ``[V]`` float32, and returns others.
        name: what messages call it.
        takes_prompt: whether it takes the prompt's tokens before those.
    """

    function: Callable[..., Tensor]
    name: str
    takes_prompt: bool

    @classmethod
    def of(cls, function: Callable[..., Tensor]) -> Processor:
        """Look how many arguments a function takes."""
        name = getattr(function, "__name__", None) or type(function).__name__
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:  # it is not written in Python, and does not say
            return cls(function, name, False)
        return cls(function, name, len([each for each in parameters if each.kind in kinds]) > 2)


_SOON = 5e-4
"""Seconds in which one thread may fill the masks of a step: to wake others takes nearly as long."""
_FEW = 8
"""Answers whose masks show how long those of the others will take."""
_THREADS = max(1, min(8, len(os.sched_getaffinity(0)) // 2 if hasattr(os, "sched_getaffinity") else 1))


@dataclass(eq=False, kw_only=True)
class Constraint:
    """What one answer's grammar and processors allow.

    Attributes:
        source: what its grammar is compiled from; None without one.
        stops: the tokens that end an answer whose grammar has come to its end.
        ends: the tokens that must not come before ``least`` others, as far as the grammar goes on without them.
        least: of how many tokens that is.
        vocabulary: how many logits a token has.
        mask: ``[words]`` int32, the tokens that the request allows besides; None for all.
        processors: called with its logits, one after the other.
    """

    source: GrammarSource | None = None
    stops: frozenset[int] = frozenset()
    ends: frozenset[int] = frozenset()
    least: int = 0
    vocabulary: int = 0
    mask: NDArray[np.int32] | None = None
    processors: tuple[Processor, ...] = ()
    matcher: xgrammar.GrammarMatcher | None = None

    @property
    def ready(self) -> bool:
        """Whether its grammar is compiled, if it has one."""
        return self.source is None or self.matcher is not None

    def applied_to(self, sampling: Sampling | None) -> Sampling:
        """Take over the mask of an answer's settings, and return them with the choice left until the host has spoken.

        Args:
            sampling: None for the most likely token.
        """
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
        """Go on by a token that does not end the answer; whether it may stand there."""
        return self.matcher is None or self.matcher.accept_token(token)

    def narrow(self, allowed: NDArray[np.int32], tokens: int) -> None:
        """Take from ``allowed`` ``[words]`` what the request bars besides, after so many tokens."""
        if self.mask is not None:
            np.bitwise_and(allowed, self.mask, out=allowed)
        if tokens < self.least:
            without = allowed.copy()
            words = without.view(np.uint32)
            for token in self.ends:
                words[token >> 5] &= ~np.uint32(1 << (token & 31))
            if without.any():
                allowed[:] = without


def accept(matchers: Sequence[xgrammar.GrammarMatcher], tokens: Sequence[int]) -> Sequence[bool]:
    """Let grammars go on by a token each, in one call; return which may."""
    from xgrammar import BatchGrammarMatcher

    accepted: list[bool] = BatchGrammarMatcher.batch_accept_token(list(matchers), list(tokens))
    return accepted


class MaskWriter:
    """Fills the masks of many answers at once."""

    def __init__(self) -> None:
        """Start no thread yet."""
        self._matchers: dict[int, xgrammar.BatchGrammarMatcher] = {}  # by how many threads they have

    def write(self, answers: Sequence[tuple[Constraint, int]], masks: NDArray[np.int32]) -> None:
        """Write which tokens answers may have next.

        Args:
            answers: that have grammars and have not ended, with how many tokens they have.
            masks: ``[n, ceil(V / 32)]``, whose bits of no token are zero already.
        """
        self._fill([answer.matcher for answer, _ in answers if answer.matcher is not None], masks)
        for place, (constraint, tokens) in enumerate(answers):
            if constraint.mask is not None or tokens < constraint.least:
                constraint.narrow(masks[place], tokens)

    def _fill(self, matchers: list[xgrammar.GrammarMatcher], masks: NDArray[np.int32]) -> None:
        """Fill masks; by the time that the first few take, the rest are for one thread or for several."""
        few, left = matchers[:_FEW], matchers[_FEW:]
        start = time.perf_counter()
        if few:
            self._with(1).batch_fill_next_token_bitmask(few, masks[:_FEW])
        if left:
            seconds = (time.perf_counter() - start) * len(left) / max(1, _FEW)
            self._with(_THREADS if seconds > _SOON else 1).batch_fill_next_token_bitmask(left, masks[_FEW:])

    def _with(self, threads: int) -> xgrammar.BatchGrammarMatcher:
        if threads not in self._matchers:
            from xgrammar import BatchGrammarMatcher

            self._matchers[threads] = BatchGrammarMatcher(max_threads=threads)
        return self._matchers[threads]
