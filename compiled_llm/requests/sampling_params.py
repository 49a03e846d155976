"""Sampling settings of a request, and the bounds of its length."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, NamedTuple

from compiled_llm.requests.structured_outputs import StructuredOutputsParams

MAX_BIASED = 300  # how many tokens ``logit_bias`` may have, as in OpenAI's API

_LATER = (
    *("guided_decoding", "best_of"),
    *("detokenize", "spaces_between_special_tokens"),
)
"""Names that vLLM's users know and the engine does not serve."""

_OF_GENERATE = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "do_sample": "temperature, which is 0 for greedy",
    "eos_token_id": "stop_token_ids, or ignore_eos",
}
"""Names that ``generate`` has for what is called otherwise here."""

SEEDS = 2**62  # seeds are below this


_CONTRADICTS = "contradicts the form of the answer, which says when it ends"
_FORM = "must be StructuredOutputsParams(...), or None for any text"


class _Rule(NamedTuple):
    kind: type
    holds: Callable[[Any], bool]
    must: str


_RULES = {
    "n": _Rule(Integral, lambda value: value >= 1, "must be 1 or more"),
    "presence_penalty": _Rule(Real, lambda value: -2 <= value <= 2, "must be from -2 to 2; 0 is none"),
    "frequency_penalty": _Rule(Real, lambda value: -2 <= value <= 2, "must be from -2 to 2; 0 is none"),
    "repetition_penalty": _Rule(Real, lambda value: 0 < value < math.inf, "must be above 0; 1 is none"),
    "temperature": _Rule(Real, lambda value: 0 <= value < math.inf, "must be 0 or more; 0 is greedy"),
    "top_p": _Rule(Real, lambda value: 0 < value <= 1, "must be above 0 and at most 1; 1 is all tokens"),
    "top_k": _Rule(Integral, lambda value: value >= -1, "must be 0 or more; 0 or -1 is all tokens"),
    "min_p": _Rule(Real, lambda value: 0 <= value <= 1, "must be from 0 to 1; 0 is all tokens"),
    "seed": _Rule(Integral, lambda value: -1 <= value < SEEDS, "must be from 0 to 2**62 - 1; -1 or None draws one"),
    "max_tokens": _Rule(Integral, lambda value: value >= 0, "must be 0 or more, or None for no limit"),
    "min_tokens": _Rule(Integral, lambda value: value >= 0, "must be 0 or more"),
    "logprobs": _Rule(Integral, lambda value: 0 <= value <= 20, "must be from 0 to 20, or None for none"),
    "prompt_logprobs": _Rule(Integral, lambda value: 0 <= value <= 20, "must be from 0 to 20, or None for none"),
    "prompt_logprobs_start": _Rule(Integral, lambda value: value >= 0, "must be 0 or more; 0 is all of the prompt"),
}
_MAY_BE_NONE = ("seed", "max_tokens", "logprobs", "prompt_logprobs")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of how a request's tokens are sampled; names and defaults are vLLM's, but for one.

    Logits are changed in this order: ``logits_processors``, ``logit_bias``, ``repetition_penalty``,
    ``frequency_penalty`` and ``presence_penalty``, ``structured_outputs``, ``allowed_token_ids`` and ``bad_words``,
    ``temperature``, ``top_k``, ``top_p``, ``min_p``.

    Attributes:
        n: how many answers to draw; they share the pages of their prompt, and answer i has the seed ``seed + i``.
        presence_penalty: subtracted from logits of tokens that the answer has; from -2 to 2.
        frequency_penalty: subtracted for each time that the answer has a token; from -2 to 2.
        repetition_penalty: divides positive logits of tokens that the prompt or the answer has, multiplies negative
            ones; 1.0 for none.
        temperature: divides the logits; 0.0 takes the most likely token.
        top_p: draw among the most likely that together exceed this probability; 1.0 for all.
        top_k: draw among the k most likely; 0 or -1 for all.
        min_p: draw among those at least this times as likely as the most likely; 0.0 for all.
        seed: decides the draws, whatever other requests run; if None, one is drawn from torch's default generator when
            the request comes.
        stop: a string, or several, that end an answer, wherever it is cut into tokens. The string is not in the text;
            the token that completes it is the last one.
        stop_token_ids: other tokens that end an answer; the one that did is its last, and not in the text.
        ignore_eos: go on after an end-of-sequence token.
        max_tokens: most tokens to generate; None for as many as there are positions and pages for, 0 to compute the
            prompt alone, for its ``prompt_logprobs`` or for the prefix cache.
        min_tokens: as many come before an end-of-sequence token, one of ``stop_token_ids`` or the end of a stop string.
        logprobs: give each token's log-probability, and those of as many of the most likely tokens, at most 20; None
            for none.
        prompt_logprobs: give those of the prompt's tokens too, from the second on. What the prefix cache has of them is
            not computed again.
        prompt_logprobs_start: how many of the prompt's first tokens need no ``prompt_logprobs``, and get None: their
            pages are enough, if the prefix cache has those. Not one of vLLM's.
        logit_bias: added to logits of tokens: at most 300, from -100 to 100.
        allowed_token_ids: the only tokens to sample from; None for all.
        bad_words: words never to write, each of at most 8 tokens; those of several count if the answer has all of them.
        include_stop_str_in_output: leave the stop string, or the token, that has ended an answer in its text.
        skip_special_tokens: leave special tokens out of the text.
        structured_outputs: the form that the answer has. It ends once that is complete; ``min_tokens`` holds as far as
            it can go on.
        logits_processors: functions that change its logits first of all, one after the other, at each step: of the
            answer's tokens so far and its logits ``[V]`` float32, or of the prompt's tokens, the answer's and those.
            Each returns logits of that shape.

    Raises:
        ValueError: a value is impossible, two contradict each other, or the engine does not support a field of vLLM's.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    logits_processors: Sequence[Callable[..., Any]] | None = None

    def __new__(cls, **values: Any) -> SamplingParams:
        """Refuse by name the fields that the engine does not support."""
        if later := [name for name in values if name in _LATER]:
            raise ValueError(f"SamplingParams: {', '.join(later)}: the engine does not serve this; leave it out")
        if other := [name for name in values if name in _OF_GENERATE]:
            raise ValueError(
                f"SamplingParams: {other[0]} is generate's name; give {_OF_GENERATE[other[0]]} in its place"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            value = getattr(self, name)
            if not (value is _DEFAULTS[name] or (value is None and name in _MAY_BE_NONE)):
                self._check(name, _is(rule.kind, value) and rule.holds(value), rule.must)
        self._keep("stop", _strings, _are_strings, "must be a string or several, none of them empty")
        self._keep("stop_token_ids", tuple, _are_tokens, "must be token ids")
        self._keep("allowed_token_ids", tuple, _are_some_tokens, "must be token ids, one at least, or None for all")
        self._keep("bad_words", tuple, _are_words, "must be words, none of them empty")
        self._keep("logit_bias", dict, _are_biases, f"must be from -100 to 100, for {MAX_BIASED} tokens at most")
        for name in ("include_stop_str_in_output", "skip_special_tokens"):
            self._check(name, isinstance(getattr(self, name), bool), "must be True or False")
        self._keep("logits_processors", tuple, _are_functions, "must be functions of tokens and logits")
        form = self.structured_outputs
        self._check("structured_outputs", form is None or isinstance(form, StructuredOutputsParams), _FORM)
        self._check("ignore_eos", form is None or not self.ignore_eos, _CONTRADICTS)
        fewer = self.max_tokens is None or self.min_tokens <= self.max_tokens
        self._check("min_tokens", fewer, f"must be at most max_tokens={self.max_tokens}")
        wanted = self.prompt_logprobs is not None or not self.prompt_logprobs_start
        self._check("prompt_logprobs_start", wanted, "starts nothing without prompt_logprobs; give them, too")

    @property
    def scored_from(self) -> int:
        """The first of a prompt's tokens that may have log-probabilities: nothing says how likely the very first is."""
        return max(1, self.prompt_logprobs_start)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return _strings(self.stop or ())

    def _keep(self, name: str, kind: Callable[[Any], Any], holds: Callable[[Any], bool], must: str) -> None:
        """Check a collection, and keep an immutable copy of it."""
        value = getattr(self, name)
        if value is None:
            return
        self._check(name, holds(value), must)
        object.__setattr__(self, name, kind(value))

    def _check(self, name: str, holds: bool, must: str) -> None:
        if not holds:
            raise ValueError(f"SamplingParams: {name}={reprlib.repr(getattr(self, name))} {must}")


_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}


def _is(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _are_tokens(values: Any) -> bool:
    return _is_list(values) and all(_is(Integral, token) and token >= 0 for token in values)


def _are_some_tokens(values: Any) -> bool:
    return _are_tokens(values) and len(values) > 0


def _are_words(values: Any) -> bool:
    return _is_list(values) and all(isinstance(word, str) and word.strip() for word in values)


def _are_functions(values: Any) -> bool:
    return _is_list(values) and all(callable(value) and not isinstance(value, type) for value in values)


def _strings(values: str | Sequence[str]) -> tuple[str, ...]:
    return (values,) if isinstance(values, str) else tuple(values)


def _are_strings(values: Any) -> bool:
    return (isinstance(values, str) or _is_list(values)) and all(
        isinstance(value, str) and value for value in _strings(values)
    )


def _is_list(values: Any) -> bool:
    return isinstance(values, Iterable) and not isinstance(values, (str, Mapping))


def _are_biases(values: Any) -> bool:
    if not (isinstance(values, Mapping) and len(values) <= MAX_BIASED and _are_tokens(list(values))):
        return False
    return all(_is(Real, bias) and -100 <= bias <= 100 for bias in values.values())
