"""The host's constraints on an answer's next token: a form that is followed, and logits processors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compilation.sampling.sampling import GREEDY, Sampling


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

    vocabulary: int  # how many logits a token has
    stops: frozenset[int]  # the tokens that end the answer once its form is complete
    least: int  # how many others come before those, as far as the form goes on without them
    mask: NDArray[np.int32] | None  # ``[words]`` int32, the tokens that the request allows besides; None for all
    writer: Any  # one for all of an engine: writes which tokens forms allow next, and advances them by a token each
    matcher: Any  # how that knows it; None if it cannot be followed yet

    def applied_to(self, sampling: Sampling) -> Sampling: ...
    def accepts(self, token: int) -> bool: ...
    def narrow(self, allowed: NDArray[np.int32], tokens: int) -> None: ...
    def no_token_left(self, tokens: int) -> str:
        """Return the error of an answer that cannot go on after so many tokens."""
        ...


class Constraint(NamedTuple):
    """The constraints on one answer."""

    processors: tuple[Processor, ...] = ()  # called one after the other
    form: AnswerForm | None = None

    @property
    def ready(self) -> bool:
        """Whether its form can be followed, if it has one."""
        return self.form is None or self.form.matcher is not None

    def applied_to(self, sampling: Sampling | None) -> Sampling:
        """Return an answer's settings with deferred sampling; None is greedy."""
        deferred = replace(GREEDY if sampling is None else sampling, deferred=True)
        return deferred if self.form is None else self.form.applied_to(deferred)
