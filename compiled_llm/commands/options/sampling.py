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
    """Options of sampling; what is None the model decides, and whether to ``sample``, the other options."""

    sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if a value is out of range, or contradicts ``--greedy``."""
        for name, value in self._given().items():
            check_range(name, value)
        drawing = [_flag(name) for name in self._given() if name != "repetition_penalty"]
        if self.sample is False and drawing:
            raise ValueError(f"--greedy draws nothing, so it does not go with {', '.join(drawing)}")

    @property
    def draws(self) -> bool:
        return bool(self._given()) if self.sample is None else self.sample

    def options(self) -> dict[str, Any]:
        settings = {name: value for name, value in self._given().items() if name != "seed"}
        return {"do_sample": self.draws, **settings}

    def given(self, max_tokens: int, stop: Sequence[str]) -> dict[str, Any]:
        """Return what was given, by names of ``SamplingParams`` and of the API; ValueError if one is impossible."""
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
    """Raise ValueError if a number of the command line is out of range."""
    holds, wanted = _RANGES[name]
    if not holds(value):
        raise ValueError(f"{_flag(name)} {value}: must be {wanted}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
