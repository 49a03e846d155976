"""Sampling settings of a request, and the bounds of its length."""

from __future__ import annotations

import dataclasses
import math
import operator
import reprlib
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from compiled_llm.requests.structured_outputs import StructuredOutputsParams

MAX_BIASED = 300  # how many tokens ``logit_bias`` may have, as in OpenAI's API
MAX_LOGPROB_TOKEN_IDS = 128  # how many ``logprob_token_ids`` there may be, as in vLLM

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
_SCORES = "must be from 0 to 20, or None for none"
_NAMED = f"must be distinct token ids, from 1 to {MAX_LOGPROB_TOKEN_IDS} of them, or None for none"
_FORM = "must be StructuredOutputsParams(...), or None for any text"


class Number(NamedTuple):
    """The metadata of a field that is a number; bounds are ``ge``, ``gt``, ``le`` and ``lt``, as pydantic has them."""

    must: str  # said of a value out of bounds
    bounds: Mapping[str, float]
    help: str | None = None  # of its option on the command line, named like the field; without, it has none
    option_must: str = ""
    option_bounds: Mapping[str, float] | None = None  # if others hold on the command line
    http_bounds: Mapping[str, float] | None = None  # if others hold over HTTP
    draws: bool = False  # whether it says how to draw, so that a request that gives it is not greedy


def holds(bounds: Mapping[str, float], value: object) -> bool:
    return all(getattr(operator, name)(value, bound) for name, bound in bounds.items())


class NumberField(NamedTuple):
    """A field that is a number, and its type as it is annotated without the metadata."""

    number: Number
    annotation: Any
    default: Any

    def fits(self, value: object) -> bool:
        """Whether a value is the default, or of the field's type and in bounds."""
        if value is self.default or (value is None and type(None) in typing.get_args(self.annotation)):
            return True
        kind = Integral if int in (self.annotation, *typing.get_args(self.annotation)) else Real
        return isinstance(value, kind) and not isinstance(value, bool) and holds(self.number.bounds, value)


def number_fields(cls: type) -> Mapping[str, NumberField]:
    """Return the fields of a dataclass that are numbers, by name, in order."""
    annotations = typing.get_type_hints(cls, include_extras=True)
    return MappingProxyType(
        {
            field.name: NumberField(number, annotations[field.name].__origin__, field.default)
            for field in dataclasses.fields(cls)
            for number in getattr(annotations[field.name], "__metadata__", ())
        }
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class SamplingNumbers:
    """The numbers by which the op samples a row's token, a line each."""

    # Made from it: checks, the fields of HTTP, options of the command line, what is read of a generation config, the
    # slots' columns, and which of them the op is given.

    temperature: Annotated[
        float,
        Number(
            *("must be 0 or more; 0 is greedy", {"ge": 0, "lt": math.inf}),
            help="Sample more freely with values above 1, and more strictly below 1; 0 is --greedy.",
            option_must="0 or more; 0 takes the most likely token",
            http_bounds={"ge": 0},
            draws=True,
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Number(
            *("must be 0 or more; 0 or -1 is all tokens", {"ge": -1}),
            help="Sample only among the k most likely tokens; 0 means all.",
            option_must="at least 0, which is all tokens",
            option_bounds={"ge": 0, "lt": 2**31},
            draws=True,
        ),
    ] = 0
    top_p: Annotated[
        float,
        Number(
            *("must be above 0 and at most 1; 1 is all tokens", {"gt": 0, "le": 1}),
            help="Sample only among the most likely tokens that together have this probability.",
            option_must="above 0 and at most 1",
            draws=True,
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        Number(
            *("must be from 0 to 1; 0 is all tokens", {"ge": 0, "le": 1}),
            help="Sample only among tokens that are at least this fraction as likely as the most likely one.",
            option_must="from 0 to 1",
            draws=True,
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Number(
            *("must be above 0; 1 is none", {"gt": 0, "lt": math.inf}),
            help="Make tokens that occurred before less likely, with values above 1; also with --greedy.",
            option_must="above 0",
            http_bounds={"ge": 1e-6, "le": 1e6},
        ),
    ] = 1.0
    presence_penalty: Annotated[float, Number("must be from -2 to 2; 0 is none", {"ge": -2, "le": 2})] = 0.0
    frequency_penalty: Annotated[float, Number("must be from -2 to 2; 0 is none", {"ge": -2, "le": 2})] = 0.0


@dataclass(frozen=True, kw_only=True)
class SamplingParams(SamplingNumbers):
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
        logprob_token_ids: give, with each token, the log-probabilities of these, at most 128, over the whole
            vocabulary and whatever was drawn, in place of those of the most likely ones. ``logprobs`` is None then, or
            how many they are.
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

    n: Annotated[int, Number("must be 1 or more", {"ge": 1})] = 1
    seed: Annotated[
        int | None,
        Number(
            *("must be from 0 to 2**62 - 1; -1 or None draws one", {"ge": -1, "lt": SEEDS}),
            help="Make sampling repeatable: the same seed gives the same text.",
            option_must="from 0 to 2**64 - 1",
            option_bounds={"ge": 0, "lt": 2**64},
            draws=True,
        ),
    ] = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: Annotated[int | None, Number("must be 0 or more, or None for no limit", {"ge": 0})] = 16
    min_tokens: Annotated[int, Number("must be 0 or more", {"ge": 0})] = 0
    logprobs: Annotated[int | None, Number(_SCORES, {"ge": 0, "le": 20})] = None
    logprob_token_ids: Sequence[int] | None = None
    prompt_logprobs: Annotated[int | None, Number(_SCORES, {"ge": 0, "le": 20})] = None
    prompt_logprobs_start: Annotated[int, Number("must be 0 or more; 0 is all of the prompt", {"ge": 0})] = 0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    logits_processors: Sequence[Callable[..., Any]] | None = None

    def __new__(cls, **values: object) -> SamplingParams:
        """Refuse by name the fields that the engine does not support."""
        if later := [name for name in values if name in _LATER]:
            raise ValueError(f"SamplingParams: {', '.join(later)}: the engine does not serve this; leave it out")
        if other := [name for name in values if name in _OF_GENERATE]:
            raise ValueError(
                f"SamplingParams: {other[0]} is generate's name; give {_OF_GENERATE[other[0]]} in its place"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, field in NUMBERS.items():
            self._check(name, field.fits(getattr(self, name)), field.number.must)
        self._keep("stop", _strings, _are_strings, "must be a string or several, none of them empty")
        self._keep("stop_token_ids", tuple, _are_tokens, "must be token ids")
        self._keep("allowed_token_ids", tuple, _are_some_tokens, "must be token ids, one at least, or None for all")
        self._keep("logprob_token_ids", tuple, _are_named_tokens, _NAMED)
        named = None if self.logprob_token_ids is None else len(self.logprob_token_ids)
        as_many = named is None or self.logprobs in (None, named)
        self._check("logprobs", as_many, f"must be None, or {named}, the number of logprob_token_ids")
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
    def num_logprobs(self) -> int | None:
        """Of how many other tokens each of its tokens has log-probabilities; None for none, not even its own."""
        return self.logprobs if self.logprob_token_ids is None else len(self.logprob_token_ids)

    @property
    def features(self) -> list[str]:
        """The features that give its answers what it asks for besides tokens."""
        found: set[str] = set()
        for name, feature in _FEATURES.items():  # of each request: comprehensions would take several calls
            value = getattr(self, name)
            if value is not None and value is not False:
                found.add(feature)
        return sorted(found)

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


_FEATURES = {
    "logprobs": "logprobs",
    "logprob_token_ids": "logprobs",
    "prompt_logprobs": "logprobs",
}
"""Settings that ask for something besides tokens, and the features that give it."""

SAMPLED_BY = number_fields(SamplingNumbers)
"""The numbers that the op of sampling is given, by name."""

NUMBERS = number_fields(SamplingParams)
"""All settings that are numbers, by name."""


def _is(kind: type, value: object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _are_tokens(values: Any) -> bool:
    return _is_list(values) and all(_is(Integral, token) and token >= 0 for token in values)


def _are_some_tokens(values: Any) -> bool:
    return _are_tokens(values) and len(values) > 0


def _are_named_tokens(values: Any) -> bool:
    return _are_some_tokens(values) and len(set(values)) == len(values) <= MAX_LOGPROB_TOKEN_IDS


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
