"""How tokens are sampled: the options of several commands, checked before a model is loaded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "max_new_tokens": (lambda value: value >= 1, "at least 1"),
    "temperature": (lambda value: 0 < value < math.inf, "above 0; --greedy takes the most likely token"),
    "top_k": (lambda value: 0 <= value < 2**31, "at least 0, which is all tokens"),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "min_p": (lambda value: 0 <= value <= 1, "from 0 to 1"),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "above 0"),
    "seed": (lambda value: 0 <= value < 2**64, "from 0 to 2**64 - 1"),
}


@dataclass(frozen=True)
class SamplingFlags:
    """How to sample tokens; None if the model's own generation config decides.

    Attributes:
        sample: sample, or take the most likely token; None: sample if any other option is given.
    """

    sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            ValueError: one is out of range, or contradicts ``--greedy``.
        """
        for name, value in self._given().items():
            check_range(name, value)
        drawing = [_flag(name) for name in self._given() if name != "repetition_penalty"]
        if self.sample is False and drawing:
            raise ValueError(f"--greedy draws nothing, so it does not go with {', '.join(drawing)}")

    @property
    def draws(self) -> bool:
        return bool(self._given()) if self.sample is None else self.sample

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of ``generate``."""
        settings = {name: value for name, value in self._given().items() if name != "seed"}
        return {"do_sample": self.draws, **settings}

    def given(self, max_tokens: int, stop: Sequence[str]) -> dict[str, Any]:
        """Return the settings of a request that were given, by their names in ``SamplingParams`` and in the API.

        Raises:
            ValueError: one is impossible.
        """
        from compiled_llm.requests.sampling_params import SamplingParams

        drawn: dict[str, Any] = {} if self.sample is None else {"temperature": 1.0 if self.sample else 0.0}
        given = {**drawn, **self._given(), "max_tokens": max_tokens, **({"stop": list(stop)} if stop else {})}
        SamplingParams(**given)  # checks them
        return given

    def _given(self) -> dict[str, float]:
        values = dataclasses.asdict(self)
        del values["sample"]
        return {name: value for name, value in values.items() if value is not None}


def check_range(name: str, value: float) -> None:
    """Check one number of the command line.

    Raises:
        ValueError: it is out of range.
    """
    holds, wanted = _RANGES[name]
    if not holds(value):
        raise ValueError(f"{_flag(name)} {value}: must be {wanted}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
