"""How a request is sampled that does not say: as the model's generation config has it, or by the most likely token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiled_llm.requests.sampling_params import NUMBERS, SAMPLED_BY, SamplingParams


def default_sampling(generation_config: object) -> dict[str, int | float]:
    """Return ``SamplingParams`` of a generation config; temperature 0 without ``do_sample``, or ValueError."""
    draws = bool(getattr(generation_config, "do_sample", False))
    drawing = [name for name, field in SAMPLED_BY.items() if field.number.draws]
    names = ("repetition_penalty", *(drawing if draws else ()))
    values = {name: getattr(generation_config, name, None) for name in names}
    found = {name: value for name, value in values.items() if value is not None}
    if not draws:
        found["temperature"] = 0.0
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise ValueError(f"the model's generation config: {error}") from error
    return found


def with_defaults(given: Mapping[str, Any], defaults: Mapping[str, int | float]) -> dict[str, Any]:
    """Return the settings of a request, and ``defaults`` for those that are not ``given``."""
    # One that says how to draw, or wants several answers, draws, whatever the defaults are: OpenAI's temperature is 1.
    draws = given.get("n", 1) > 1 or any(name in given and field.number.draws for name, field in NUMBERS.items())
    kept = {name: value for name, value in defaults.items() if not (draws and name == "temperature" and value == 0)}
    return {**kept, **given}
