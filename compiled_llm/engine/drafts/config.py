"""The options of speculation, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from compiled_llm.kinds.support import FoundKind, refusal

METHODS = {
    "ngram": ("compiled_llm.execution.drafts.ngram", "guesses from the text of each request"),
}
"""The drafters: the module of each, whose ``drafter_of`` makes it, and how it guesses."""

MOST_TOKENS = 7
"""Tokens that are guessed for a row in a step: with the one before them, a step checks 8."""
_USUAL_MAX = 4


@dataclass(frozen=True)
class SpeculativeConfig:
    """The ``speculative_config`` of an engine, with vLLM's names.

    Attributes:
        method: who guesses, one of ``METHODS``: ``"ngram"``, the text of the request itself.
        num_speculative_tokens: how many tokens are guessed in a step at most, 1 to 7.
        prompt_lookup_max: how many of the last tokens are searched for in the text before them.
        prompt_lookup_min: the fewest of them whose match counts.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int
    prompt_lookup_min: int

    @classmethod
    def of(cls, given: object) -> SpeculativeConfig:
        """Return the options that a dictionary gives; ValueError if one is unknown or impossible."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ValueError(
                f"speculative_config={given!r}: give a dictionary, as "
                '{"method": "ngram", "num_speculative_tokens": 7}, or None for none'
            )
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := [name for name in given if name not in known]:
            raise ValueError(f"speculative_config: there is no {unknown[0]!r}; it has {', '.join(known)}")
        if (method := given.get("method")) not in METHODS:
            known_methods = ", or ".join(f'"{name}", which {does}' for name, (_, does) in METHODS.items())
            raise ValueError(
                f"speculative_config: method={method!r}; give {known_methods}, or leave speculative_config out"
            )
        least = _number(given, "prompt_lookup_min", 1)
        most = _number(given, "prompt_lookup_max", max(least, _USUAL_MAX))
        tokens = _number(given, "num_speculative_tokens", MOST_TOKENS)
        if not 1 <= tokens <= MOST_TOKENS:
            raise ValueError(f"speculative_config: num_speculative_tokens={tokens}; give 1 to {MOST_TOKENS}")
        if least < 1:
            raise ValueError(f"speculative_config: prompt_lookup_min={least}; give 1 or more")
        if least > most:
            raise ValueError(
                f"speculative_config: prompt_lookup_min={least} with prompt_lookup_max={most}; give a min that is at "
                "most the max"
            )
        return cls(method, tokens, most, least)


def _number(given: Mapping[str, Any], name: str, usual: int) -> int:
    value = given.get(name)
    if value is None:
        return usual
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"speculative_config: {name}={value!r}; give a whole number")
    return int(value)


def check_model(backend: str, batch_invariant: bool, kinds: Sequence[FoundKind]) -> None:
    """Raise ValueError if a model, as it is wrapped, cannot check several tokens of a row in a step."""
    if batch_invariant:
        raise ValueError(
            "speculative_config with a model that is wrapped with batch_invariant=True: a step that checks several "
            "tokens of a row adds in another order than one of a token; leave one of them out"
        )
    if backend == "flashinfer":
        raise ValueError(
            'speculative_config with a model that is wrapped with backend="flashinfer": its steps are planned from '
            'exact lengths, which only the device knows while it checks guesses; wrap with backend="auto"'
        )
    if (refused := refusal(kinds, "drafts", "speculative_config")) is not None:
        raise ValueError(refused)
