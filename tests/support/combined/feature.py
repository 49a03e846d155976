"""A feature as it meets others: the model that it is, options that it sets, what its requests ask for, what it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from support.combined.asked import Asked

if TYPE_CHECKING:
    from support.combined.playing import Playing


@dataclass(frozen=True, eq=False)
class Feature:
    """One feature.

    Attributes:
        option: how refusals of it begin.
        subject: the name of the model that it is; any if empty.
        weights: the name of what its linear layers are, if it is about weights.
        wrap: options of ``wrap``.
        engine: options of ``Engine``.
        answers: which of these options change what is answered, so that the engine without features has them, too.
        asks: has a request ask for it.
        amid: acts in the midst of requests; ``between``, when all that were sent have ended.
    """

    name: str
    option: str = ""
    subject: str = ""
    weights: str = ""
    wrap: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    answers: frozenset[str] = frozenset()
    asks: Callable[[Asked, Random], object] | None = None
    amid: Callable[[Playing], object] | None = None
    between: Callable[[Playing], object] | None = None

    @property
    def of_model(self) -> bool:
        """Whether it needs a model of its own, wrapped in its own way."""
        return bool(self.subject or self.weights or self.wrap)

    def __repr__(self) -> str:
        return self.name
