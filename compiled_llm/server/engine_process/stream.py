"""One request as its client sees it: the engine's tokens, and how many of them were sent."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from compiled_llm.engine.answer import Answer
from compiled_llm.engine.apart.unwanted import UnwantedError
from compiled_llm.engine.device_loss import DeviceLostError
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.input_processing.input_processor import QueueFullError
from compiled_llm.engine.steps.request import InvalidRequestError, RequestError
from compiled_llm.engine.thread.handle import RequestHandle
from compiled_llm.features import needed
from compiled_llm.protocol.messages import (
    EmittedPiece,
    Ended,
    Entry,
    Kind,
    PooledVector,
    PromptScores,
    PromptTokens,
    Refused,
    Submit,
    Summary,
    Update,
)
from compiled_llm.requests.outputs import Logprob
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.requests.structured_outputs import GrammarsMissingError, StructuredOutputsParams
from compiled_llm.server.parts import SERVED_IMAGES

K = TypeVar("K", int, str)

logger = logging.getLogger("compiled_llm.server")

MAX_ANSWERS = 1024  # how many answers to one prompt a client can ask for: each takes memory at once
_SCORES_AT_ONCE = 256  # tokens of a prompt whose log-probabilities are sent together: others wait for some milliseconds
_BYTES_AT_ONCE = 2**20  # of what was emitted of an answer's tokens, at least one token's


def begun(engine: Engine, submit: Submit, max_tokens: int, wanted: Callable[[], bool]) -> Stream | Refused:
    """Submit a client's request, and return the stream of its tokens, or why it is refused.

    Args:
        max_tokens: that a request may have.

    Raises:
        UnwantedError: the request is not ``wanted`` any more.
    """
    try:
        return Stream(submit.request, _submitted(engine, submit, max_tokens, wanted), submit.pictured is not None)
    except UnwantedError:
        raise
    except QueueFullError as error:
        return Refused(submit.request, "full", str(error))
    except (TypeError, ValueError, GrammarsMissingError) as error:
        return Refused(submit.request, "invalid", str(error))
    except RuntimeError as error:  # the engine is asleep, or the model cannot be run now
        return Refused(submit.request, "unavailable", str(error))
    except Exception as error:  # a fault of ours ends this request alone
        logger.exception("compiled_llm: a request could not begin")
        return Refused(submit.request, "failed", _fault(error))


def _submitted(engine: Engine, submit: Submit, max_tokens: int, wanted: Callable[[], bool]) -> RequestHandle:
    params = _params(submit.params)
    if params.n > MAX_ANSWERS:
        raise ValueError(
            f"SamplingParams: n={params.n}: an engine process gives at most {MAX_ANSWERS} answers to a prompt"
        )
    waiting: dict[str, Any] = {
        "priority": submit.priority,
        "timeout": submit.timeout,
        "cache_salt": submit.cache_salt,
        "hidden_states": submit.hidden_states,
        "emitted": submit.emitted,
        "pooled": submit.pooled,
    }
    if submit.pictured is None:
        return engine.submit(submit.prompt, params, **waiting)
    return needed(SERVED_IMAGES).submitted(engine, submit.pictured, params, max_tokens, wanted, **waiting)


def _params(plain: dict[str, Any]) -> SamplingParams:
    if "logits_processors" in plain:
        raise ValueError("SamplingParams: logits_processors: functions cannot be sent to an engine process")
    form = plain.get("structured_outputs")
    if isinstance(form, dict):
        plain = {**plain, "structured_outputs": StructuredOutputsParams(**form)}
    return SamplingParams(**plain)


class Stream:
    """The updates of a request, as its client, who calls it ``number``, is sent them."""

    def __init__(self, number: int, handle: RequestHandle, tells_prompt: bool = False) -> None:
        """``tells_prompt``: the client does not know the prompt's tokens, and is sent them."""
        first = handle.requests[0]
        self._tells_prompt = tells_prompt
        self.handle = handle
        self._scores_tokens = first.part("logprobs") is not None
        # whether what is sent keeps others waiting: log-probabilities and what was emitted do
        self.takes_long = self._scores_tokens or first.part("hidden_states") is not None
        self._number = number
        self._open = tuple(_SendCursor(answer) for answer in handle.answers)
        self._scores: Sequence[dict[int, Logprob]] | None = None
        self._scored = 0  # how many of them were sent
        self._pieces: Iterator[PooledVector | EmittedPiece] = itertools.chain(self._vectors(), self._emitted_pieces())

    @property
    def unsent(self) -> int:
        return sum(sent.answer.tokens - sent.tokens for sent in self._open)

    @property
    def ended(self) -> bool:
        return not self._open

    def updates(self) -> Iterator[Update]:
        """Yield the new tokens of each answer; they count as sent."""
        for sent in self._open:
            if (update := self._update(sent)) is not None:
                yield update

    def _update(self, sent: _SendCursor) -> Update | None:
        answer = sent.answer
        done, tokens = answer.done, answer.tokens_behind(sent.tokens)  # in this order: no token comes after the end
        if not (tokens or done):
            return None
        entries = self._entries(sent, tokens) if self._scores_tokens else None
        sent.tokens += len(tokens)
        if not done:
            return Update(self._number, answer.request.index, tokens, entries)
        self._open = tuple(other for other in self._open if other is not sent)
        return Update(self._number, answer.request.index, tokens, entries, _ended(answer))

    def _entries(self, sent: _SendCursor, tokens: list[int]) -> list[list[Entry]] | None:
        scores = sent.answer.request.part("logprobs")
        logprobs = None if scores is None else scores.entries(tokens, sent.tokens)
        return None if logprobs is None else list(map(_entries, logprobs))

    def summary(self) -> Summary:
        return Summary(self._number, **self.handle.figures())

    def next_part(self) -> PromptTokens | PromptScores | EmittedPiece | PooledVector | None:
        """Return the next message of those that come in parts; None if there is none now, or all were sent."""
        if self._tells_prompt:
            self._tells_prompt = False
            return PromptTokens(self._number, self.handle.requests[0].prompt_ids.tolist())
        return self._prompt_scores() or (next(self._pieces, None) if self.ended else None)

    def _vectors(self) -> Iterator[PooledVector]:
        if (vector := self.handle.answers[0].pooled) is not None:
            yield PooledVector(self._number, vector.tobytes())

    def _emitted_pieces(self) -> Iterator[EmittedPiece]:
        for answer in self.handle.answers:
            found = itertools.chain(_items(answer.hidden_states), _items(answer.emitted))
            for key, tensor in found:
                width = max(1, tensor[:1].nbytes)
                for part in tensor.split(max(1, _BYTES_AT_ONCE // width)):
                    numbers = part.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                    dtype = str(part.dtype).removeprefix("torch.")
                    yield EmittedPiece(self._number, answer.index, key, dtype, list(part.shape), numbers)

    def _prompt_scores(self) -> PromptScores | None:
        """Return the next log-probabilities of the prompt's tokens, which are all there with the first token."""
        request = self.handle.requests[0]
        if (scores := request.part("logprobs")) is None or not (request.tokens or request.done):
            return None
        if self._scores is None:
            self._scores = scores.scored_entries()
        elif self._scored >= len(self._scores):
            return None
        if self._scores is None:
            return None
        start, self._scored = self._scored, self._scored + _SCORES_AT_ONCE
        return PromptScores(self._number, list(map(_entries, self._scores[start : self._scored])))

    def fail(self, reason: str) -> None:
        """End what has not ended, with an error."""
        self.handle.fail(RequestError(reason))


def _items(tensors: Mapping[K, Tensor] | None) -> Iterator[tuple[int | str, Tensor]]:
    return iter(() if tensors is None else tensors.items())


class _SendCursor:
    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.tokens = 0


def _entries(logprobs: dict[int, Logprob]) -> list[Entry]:
    return [(token, entry.logprob, entry.rank) for token, entry in logprobs.items()]


def _ended(answer: Answer) -> Ended:
    error = answer.error
    kind: Kind = "invalid" if isinstance(error, InvalidRequestError) else "failed"
    sentence = None if error is None else _sentence(error)
    return Ended(answer.finish_reason or "cancelled", answer.stop_reason, sentence, kind)


def _sentence(error: BaseException) -> str:
    """Return an error's message for a client; of others than ours it may name files of this machine."""
    return str(error) if isinstance(error, (RequestError, DeviceLostError)) else _fault(error)


def _fault(error: BaseException) -> str:
    return f"the request has failed of {type(error).__name__}; the engine process's log says more"
