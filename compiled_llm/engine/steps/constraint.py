"""The host's constraints on an answer's next token: a form, parts of its request, and logits processors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compilation.sampling.masks import all_tokens
from compiled_llm.compilation.sampling.sampling import GREEDY, Sampling
from compiled_llm.engine.request_part import RequestPart


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


class AnswerForm(Protocol):
    """The form of one answer, as steps follow it."""

    stops: frozenset[int]  # the tokens that end the answer once its form is complete
    least: int  # how many others come before those, as far as the form goes on without them
    writer: Any  # one for all of an engine: writes which tokens forms allow next, and advances them by a token each
    matcher: Any  # how that knows it; None if it cannot be followed yet

    def accepts(self, token: int) -> bool: ...
    def narrow(self, allowed: NDArray[np.int32], tokens: int) -> None: ...
    def no_token_left(self, tokens: int) -> str:
        """Return the error of an answer that cannot go on after so many tokens."""
        ...


class Constraint(NamedTuple):
    """The constraints on one answer."""

    processors: tuple[Processor, ...] = ()  # called one after the other
    form: AnswerForm | None = None
    parts: tuple[RequestPart, ...] = ()  # those of its request that narrow which tokens may come next
    mask: NDArray[np.int32] | None = None  # ``[words]`` int32, the tokens that the request allows at all; None for all

    @property
    def ready(self) -> bool:
        """Whether its form can be followed, if it has one."""
        return self.form is None or self.form.matcher is not None

    @property
    def masked(self) -> bool:
        """Whether each token has a mask of its own."""
        return self.form is not None or bool(self.parts)

    @property
    def bars_more(self) -> bool:
        """Whether a mask may lack tokens that a form allows, so that none may be left."""
        return self.mask is not None or bool(self.parts)

    @property
    def plain(self) -> bool:
        """Whether it is a form, and nothing else."""
        return self.form is not None and not (self.processors or self.bars_more)

    def narrow(self, allowed: NDArray[np.int32], tokens: Sequence[int]) -> None:
        """Remove from ``allowed`` ``[words]`` what the request bars after these tokens of its answer."""
        if self.mask is not None:
            np.bitwise_and(allowed, self.mask, out=allowed)
        for part in self.parts:
            part.narrow(allowed, tokens)
        if self.form is not None:
            self.form.narrow(allowed, len(tokens))

    def applied_to(self, sampling: Sampling | None, vocabulary: int) -> Sampling:
        """Return an answer's settings with deferred sampling, and a mask if each token has one; None is greedy."""
        deferred = replace(GREEDY if sampling is None else sampling, deferred=True)
        if self.masked and deferred.mask is None:
            return replace(deferred, mask=all_tokens(vocabulary))
        return deferred
