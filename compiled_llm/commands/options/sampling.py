"""How tokens are sampled: the options of several commands, checked before a model is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Annotated, Any

from compiled_llm.commands.options.groups import OptionGroup
from compiled_llm.commands.options.shared import sampling_option
from compiled_llm.requests.sampling_params import NUMBERS, SamplingParams, holds

_NUMBERS = {name: field for name, field in NUMBERS.items() if field.number.help is not None}


class SamplingOptions(dict[str, float], OptionGroup):
    """The options of the command line that are numbers of ``SamplingParams``; the model decides those left out."""

    __signature__ = inspect.Signature(
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[field.annotation | None, sampling_option(help=field.number.help)],
            )
            for name, field in _NUMBERS.items()
        ]
    )

    def __init__(self, **numbers: float | None) -> None:
        """Raise ValueError if a value is out of range."""
        super().__init__({name: value for name, value in numbers.items() if value is not None})
        for name, value in self.items():
            number = _NUMBERS[name].number
            if not holds(number.option_bounds or number.bounds, value):
                raise ValueError(f"{_flag(name)} {value}: must be {number.option_must}")


class SamplingFlags:
    """Options of sampling; whether to ``sample``, if it is None, the numbers decide."""

    def __init__(self, sample: bool | None, numbers: SamplingOptions) -> None:
        """Raise ValueError if a number contradicts ``--greedy``, or ``--sample`` a temperature of 0, which is that."""
        drawing = [name for name in numbers if _NUMBERS[name].number.draws]
        if numbers.get("temperature") == 0:
            if sample:
                raise ValueError(
                    "--sample draws tokens, and --temperature 0 takes the most likely: leave one of them out"
                )
            sample = False
            numbers = SamplingOptions(**{name: value for name, value in numbers.items() if name not in drawing})
        elif sample is False and drawing:
            raise ValueError(f"--greedy draws nothing, so it does not go with {', '.join(map(_flag, drawing))}")
        self._sample = sample
        self._numbers = numbers

    @property
    def seed(self) -> int | None:
        return None if (seed := self._numbers.get("seed")) is None else int(seed)

    def options(self) -> dict[str, Any]:
        settings = {name: value for name, value in self._numbers.items() if name != "seed"}
        return {"do_sample": bool(self._numbers) if self._sample is None else self._sample, **settings}

    def given(self, max_tokens: int, stop: Sequence[str]) -> dict[str, Any]:
        """Return what was given, by names of ``SamplingParams`` and of the API; ValueError if one is impossible."""
        drawn: dict[str, Any] = {} if self._sample is None else {"temperature": 1.0 if self._sample else 0.0}
        given = {**drawn, **self._numbers, "max_tokens": max_tokens, **({"stop": list(stop)} if stop else {})}
        SamplingParams(**given)  # checks them
        return given


def check_new_tokens(most: int) -> None:
    """Raise ValueError if there are none."""
    if most < 1:
        raise ValueError(f"--max-new-tokens {most}: must be at least 1")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
