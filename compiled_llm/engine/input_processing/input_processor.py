"""Makes requests of prompts and settings, and checks them before anything runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from compiled_llm.engine.input_processing.prompts import Prompt, token_ids
from compiled_llm.engine.input_processing.sampling import RequestSampling
from compiled_llm.engine.parts import EngineGrammars
from compiled_llm.engine.steps.constraint import AnswerForm, Constraint, Processor
from compiled_llm.engine.steps.request import Request
from compiled_llm.engine.steps.taps import TAPS
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.features import needed
from compiled_llm.model.inputs import vocabulary_of
from compiled_llm.model.sizes import logits_width
from compiled_llm.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    pass


class QueueFullError(RuntimeError):
    """A refusal: as many requests wait as may; nothing was taken."""


class TokenFacts(NamedTuple):
    """The facts of a model's tokens that requests depend on."""

    # ``vocabulary`` counts ids that it can take, ``logits`` those of a token; answers end at ``eos_token_ids``, at
    # first those that ``generate`` would stop at.

    vocabulary: int
    logits: int
    eos_token_ids: frozenset[int]

    @classmethod
    def of(cls, model: PreTrainedModel) -> TokenFacts:
        return cls(vocabulary_of(model), logits_width(model), end_tokens(model))

    def also_ending_at(self, tokens: frozenset[int]) -> TokenFacts:
        """Return them with further end-of-sequence tokens, of those that there are logits for."""
        if tokens <= self.eos_token_ids:
            return self
        more = (token for token in tokens if token < self.logits)
        return self._replace(eos_token_ids=self.eos_token_ids.union(more))


def check_queue(waiting: int, more: int, most: int | None) -> None:
    """Raise QueueFullError if ``more`` requests would be too many."""
    if most is not None and waiting + more > most:
        raise QueueFullError(f"{waiting} requests wait already, and max_queue={most}; try again later")


def requests_for(
    prompt: Prompt,
    params: SamplingParams,
    model: TokenFacts,
    model_runner: ModelRunner,
    tokenizer: Any,
    forms: EngineGrammars | None = None,
    *,
    max_model_len: int | None = None,
    priority: int = 0,
    timeout: float | None = None,
    salt: Hashable = None,
    enter: Callable[[Request], None] | None = None,
    samplings: dict[int, RequestSampling] | None = None,
    keys: NDArray[np.int64] | None = None,
) -> list[Request]:
    """Return the answers that a prompt asks for.

    Args:
        forms: give answers theirs; None if there are none.
        priority: smaller ones run first.
        timeout: seconds after which they end with what they have.
        salt: requests with equal ones may read each other's cached pages.
        enter: lets a request have what it asks for besides tokens; None if it asks for nothing.
        samplings: of other requests of the call, by the identity of their settings: rows then share arrays.
        keys: ``[T]`` int64, by which the prefix cache knows the prompt's tokens; None for their ids.

    Raises:
        ValueError: the prompt is impossible, or with its answer never fits the positions or the pages; how it is to
            wait is impossible; or its settings do not fit the model.
    """
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params: give SamplingParams(...); got a {type(params).__name__}")
    _check_waiting(priority, timeout, salt)
    now = time.monotonic()
    ids = token_ids(prompt, tokenizer, model.vocabulary)
    most = _max_new(len(ids), params.max_tokens, model_runner, max_model_len or model_runner.max_positions)
    if params.min_tokens > most:
        raise ValueError(f"min_tokens={params.min_tokens}: there is room for {most} after a prompt of {len(ids)}")
    stops, eos, width = frozenset(params.stop_token_ids or ()), model.eos_token_ids, model.logits
    ends = stops if params.ignore_eos else stops | eos
    held = [None] * params.n if forms is None else forms.forms_of(params, eos, width)
    processors = tuple(map(Processor.of, params.logits_processors or ()))
    asked = [needed(TAPS.named(name)).TAP.asked(params=params) for name in params.features]
    requests: list[Request] = []
    samplings = {} if samplings is None else samplings
    if id(params) not in samplings:  # which keeps the settings
        samplings[id(params)] = RequestSampling(params, stops | eos, width, tokenizer)
    for index, sampling in enumerate(samplings[id(params)].samplings(ids)):
        if (form := held[index]) is not None:
            ends |= form.stops
        request = Request(
            prompt=ids if keys is None else keys,
            sampling=sampling,
            max_tokens=most,
            stop_token_ids=ends,
            stop_ids=stops if params.ignore_eos else stops - eos,
            known_length=not (ends or params.stop),
            priority=priority,
            deadline=None if timeout is None else now + timeout,
            salt=salt,
            index=index,
            prefix_owner=requests[0] if requests and enter is None else None,
            submitted=now,
        )
        for lets_have in filter(None, (enter, *asked)):
            lets_have(request)
        _constrain(request, processors, form, width)
        requests.append(request)
    return requests


def _constrain(request: Request, processors: tuple[Processor, ...], form: AnswerForm | None, vocabulary: int) -> None:
    """Have a request's tokens sampled late, if the host says which may come."""
    narrowing = tuple(part for part in request.parts.values() if part.narrows)
    if form is not None or processors or narrowing:
        mask = None if request.sampling is None else request.sampling.mask
        request.constraint = Constraint(processors, form, narrowing, mask)
        request.sampling = request.constraint.applied_to(request.sampling, vocabulary)


def _check_waiting(priority: int, timeout: float | None, salt: Hashable) -> None:
    if not isinstance(priority, Integral):
        raise ValueError(f"priority={priority!r}: give a whole number; smaller ones run first")
    if timeout is not None and not (isinstance(timeout, Real) and timeout > 0):
        raise ValueError(f"timeout={timeout!r}: give seconds above 0, or None for no limit")
    if not isinstance(salt, Hashable):
        raise ValueError(f"cache_salt={salt!r}: give something that can be hashed, as a string can")


def _max_new(prompt: int, max_tokens: int | None, model_runner: ModelRunner, longest: int) -> int:
    """Return how many tokens an answer can have, without a limit all that fit; ValueError if they never fit."""
    left, pool = longest - prompt, model_runner.pool
    _check_prompt(prompt, model_runner, longest, answered=max_tokens != 0)
    room = pool.tokens_in(pool.total) - prompt + 1  # the last token is never stored
    most = min(left, max(1, room)) if max_tokens is None else int(max_tokens)
    if most > left:
        raise ValueError(
            f"max_tokens={max_tokens}: with a prompt of {prompt} tokens that is more than "
            f"{_named(longest, model_runner)}; shorten the prompt, or give at most {left}"
        )
    needed = pool.pages_for(prompt + max(1, most) - 1)
    if needed > pool.total:
        raise ValueError(
            f"max_tokens={max_tokens}: a prompt of {prompt} tokens and {most} more need {needed} pages of "
            f"{pool.page_size} tokens, and there are {pool.total}; give fewer, or wrap with a larger kv_memory"
        )
    return most


def _check_prompt(tokens: int, model_runner: ModelRunner, longest: int, answered: bool) -> None:
    """Check that there is room for a prompt, and for one token after it if it is ``answered``."""
    pool = model_runner.pool
    if tokens + answered > longest:
        raise ValueError(
            f"prompt: {tokens} tokens leave no room for an answer in {_named(longest, model_runner)}; shorten it"
        )
    if (needed := pool.pages_for(tokens)) > pool.total:
        raise ValueError(
            f"prompt: {tokens} tokens and an answer of one need {needed} pages of {pool.page_size} tokens, and there "
            f"are {pool.total}; shorten it, or wrap with a larger kv_memory"
        )


def _named(longest: int, model_runner: ModelRunner) -> str:
    own = model_runner.max_positions
    return f"the model's {own} positions" if longest >= own else f"max_model_len={longest}"


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Return the end-of-sequence tokens that ``generate`` would stop at."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)  # classifiers have no such config
    return frozenset([ends] if isinstance(ends, int) else ends or ())
