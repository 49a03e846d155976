"""One request as its client sees it: the engine's tokens and columns, and how far they were sent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Raw

from compiled_llm.engine.apart.unwanted import UnwantedError
from compiled_llm.engine.device_loss import DeviceLostError
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.input_processing.input_processor import QueueFullError
from compiled_llm.engine.steps.request import InvalidRequestError, RequestError
from compiled_llm.features import needed
from compiled_llm.protocol.messages import Ended, Kind, Piece, PromptTokens, Refused, Submit, Summary, Update
from compiled_llm.requests.answer import Answer
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.requests.structured_outputs import GrammarsMissingError, StructuredOutputsParams
from compiled_llm.server.parts import SERVED_IMAGES

logger = logging.getLogger("compiled_llm.server")

MAX_ANSWERS = 1024  # how many answers to one prompt a client can ask for: each takes memory at once


def begun(engine: Engine, submit: Submit, max_tokens: int, wanted: Callable[[], bool]) -> Stream | Refused:
    """Submit a client's request, and return the stream of its tokens, or why it is refused.

    Args:
        max_tokens: that a request may have.

    Raises:
        UnwantedError: the request is not ``wanted`` any more.
    """
    try:
        return Stream(submit.request, _submitted(engine, submit, max_tokens, wanted), submit.image_prompt is not None)
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
    options = {
        "priority": submit.priority,
        "timeout": submit.timeout,
        "cache_salt": submit.cache_salt,
        **submit.wanted,
    }
    if submit.image_prompt is None:
        return engine.submit(submit.prompt, params, **options)
    return needed(SERVED_IMAGES).submitted(engine, submit.image_prompt, params, max_tokens, wanted, **options)


def _params(plain: dict[str, Any]) -> SamplingParams:
    if "logits_processors" in plain:
        raise ValueError("SamplingParams: logits_processors: functions cannot be sent to an engine process")
    form = plain.get("structured_outputs")
    if isinstance(form, dict):
        plain = {**plain, "structured_outputs": StructuredOutputsParams(**form)}
    return SamplingParams(**plain)


class Stream:
    """A cursor over a request's answers: what its client, who calls it ``number``, has been sent of them."""

    def __init__(self, number: int, handle: RequestHandle, tells_prompt: bool = False) -> None:
        """``tells_prompt``: the client does not know the prompt's tokens, and is sent them."""
        self.handle = handle
        self._number = number
        self._open = tuple(handle.answers)
        self._sent = [0] * len(handle.answers)  # tokens of each
        # Whether what is sent keeps others waiting.
        self.takes_long = any(column.takes_long for record in handle.requests for column in record.parts.values())
        self._has_columns = any(record.parts for record in handle.requests)
        self.ended = False  # whether all tokens have been sent
        self._pieces = self._all_pieces(tells_prompt)
        self.has_pieces = tells_prompt or self._has_columns

    @property
    def unsent(self) -> int:
        return sum(answer.tokens - self._sent[answer.index] for answer in self._open)

    def updates(self) -> list[Update]:
        """Return the new tokens of each answer; they count as sent."""
        found = []
        for answer in self._open:
            sent = self._sent[answer.index]
            done, tokens = answer.done, answer.tokens_after(sent)  # in this order: no token comes after the end
            if not (tokens or done):
                continue
            columns = _columns(answer, sent, tokens) if self._has_columns else None
            self._sent[answer.index] = sent + len(tokens)
            if done:
                self._open = tuple(other for other in self._open if other is not answer)
                self.ended = not self._open
            found.append(Update(self._number, answer.index, tokens, columns, _ended(answer) if done else None))
        return found

    def _all_pieces(self, tells_prompt: bool) -> Iterator[PromptTokens | Piece | None]:
        if tells_prompt:
            yield PromptTokens(self._number, list(self.handle.prompt))
        for answer in self.handle.answers:
            for name, column in answer.record.parts.items():
                for data in column.pieces(answer):
                    yield None if data is None else Piece(self._number, answer.index, name, data)

    def next_piece(self) -> PromptTokens | Piece | None:
        """Return the next message of those that come in pieces; None if there is none now, or all were sent."""
        return next(self._pieces, None)

    def summary(self) -> Summary:
        figures = self.handle.figures
        assert figures is not None, "its answers have ended"
        return Summary(self._number, **figures)

    def fail(self, reason: str) -> None:
        """End what has not ended, with an error."""
        self.handle.fail(RequestError(reason))


def _columns(answer: Answer, sent: int, tokens: list[int]) -> dict[str, Raw] | None:
    both = ((name, column.encoded_rows(sent, tokens)) for name, column in answer.record.parts.items())
    return {name: data for name, data in both if data is not None} or None


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
