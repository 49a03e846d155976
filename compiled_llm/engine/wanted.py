"""What requests have besides tokens, or in place of them, as features give it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from compiled_llm.engine.parts import POOLING
from compiled_llm.engine.steps.request import Request
from compiled_llm.engine.steps.taps import TAPS
from compiled_llm.features import needed
from compiled_llm.model.classifiers import is_classifier
from compiled_llm.model.facts import ModelFacts
from compiled_llm.requests.sampling_params import SamplingParams

_EMITTED = TAPS.named("hidden_states")


def wanted_of(
    facts: ModelFacts,
    params: SamplingParams | Sequence[SamplingParams] | None,
    hidden_states: Sequence[int] | None,
    emitted: Sequence[str] | None,
    pooled: bool,
) -> tuple[Any, Callable[[Request], None] | None]:
    """Return the settings of requests, and what lets them have what they ask for; ValueError if it cannot be had."""
    outputs = hidden_states is not None or emitted is not None
    if pooled or is_classifier(facts.model):
        return needed(POOLING).settings_of(facts, params, outputs, pooled)
    if not outputs:
        return params, None
    return params, needed(_EMITTED).TAP.asked(hidden_states=hidden_states, emitted=emitted, facts=facts)
