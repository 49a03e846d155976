"""One prompt or several, with settings for all or for each. Arrays are known by their attributes: no torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from compiled_llm.requests.sampling_params import SamplingParams


def with_params(
    prompts: Any, params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Any, SamplingParams]]:
    """Return each prompt with its settings: for all, or one for each; ValueError if the numbers differ."""
    listed: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
    each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(listed)
    if len(each) != len(listed):
        raise ValueError(f"params: give one for all prompts, or one for each of {len(listed)}; got {len(each)}")
    return list(zip(listed, each, strict=True))


def _is_one(prompts: Any) -> bool:
    if hasattr(prompts, "ndim"):
        return bool(prompts.ndim < 2)
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Iterable):
        return True  # an object that is no prompt is refused later
    return isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], (Real, Mapping))
