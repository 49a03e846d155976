"""The outputs of a request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]
"""An end-of-sequence token, one of ``stop_token_ids`` or a stop string; ``max_tokens``; ``cancel()``; the deadline; or
what ``error`` says."""


class Logprob(NamedTuple):
    """The log-probability of a token.

    Attributes:
        logprob: the natural logarithm of its probability.
        rank: 1 plus the number of more likely tokens; equally likely tokens have the same rank.
    """

    logprob: float
    rank: int


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        index: which of the ``n`` answers it is.
        token_ids: its tokens, the one that ended it included.
        finish_reason: ``"stop"`` for an end-of-sequence token, one of ``stop_token_ids`` or a stop string, ``"length"``
            for ``max_tokens``, ``"cancelled"``, ``"timeout"``, or ``"error"``.
        text: the tokens decoded, without the stop string or token that has ended it; None if the engine has no
            tokenizer.
        error: the error that ended it, with the finish reason ``"error"``.
        stop_reason: the stop string, or the one of ``stop_token_ids``, that has ended it; None if something else has.
        logprobs: for each token, with ``SamplingParams(logprobs=...)``: by token id, its own entry first, then those of
            the most likely tokens.
        hidden_states: for each layer as ``submit(hidden_states=...)`` has named it, ``[tokens, hidden]`` in the model's
            dtype on the CPU: of all tokens that were computed, which are the prompt's and the answer's but for the
            last, which was sampled and never fed in. Fewer if it was cancelled before.
        emitted: of the same tokens, what traced hooks have emitted: ``[tokens, ...]`` on the CPU by each name of
            ``submit(emitted=...)``.
        pooled: with ``submit(pooled=True)``, once it has ended well, the numbers of the prompt's last token, float32:
            its last hidden state, or the scores of a classifier.
    """

    index: int
    token_ids: list[int]
    finish_reason: FinishReason
    text: str | None = None
    error: BaseException | None = field(default=None, repr=False)
    stop_reason: int | str | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = field(default=None, repr=False)
    hidden_states: dict[int, Tensor] | None = field(default=None, repr=False, compare=False)
    emitted: dict[str, Tensor] | None = field(default=None, repr=False, compare=False)
    pooled: array[float] | None = field(default=None, repr=False)

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum over its tokens; None without ``logprobs``."""
        if self.logprobs is None:
            return None
        return sum((next(iter(entries.values())).logprob for entries in self.logprobs), 0.0)


class Figures(TypedDict):
    """The figures of a prompt's answers: fields of ``RequestOutput``."""

    cached_tokens: int
    queue_seconds: float | None
    first_token_seconds: float | None
    seconds: float


@dataclass(frozen=True)
class RequestOutput:
    """The output of one prompt.

    ``token_ids``, ``text``, ``finish_reason``, ``stop_reason``, ``error``, ``hidden_states`` and ``emitted`` are those
    of the first answer.

    Attributes:
        outputs: the ``n`` answers.
        cached_tokens: how many of the prompt's tokens were not computed, because the prefix cache had them.
        queue_seconds: from ``submit`` until it first ran; None if it never did.
        first_token_seconds: from ``submit`` until its first token was read; None if there was none.
        seconds: from ``submit`` until its last answer ended.
        prompt_logprobs: for each token of the prompt, with ``SamplingParams(prompt_logprobs=...)``, as ``logprobs`` of
            an answer; None in place of the first.
    """

    prompt_token_ids: list[int]
    outputs: list[Completion]
    cached_tokens: int
    queue_seconds: float | None
    first_token_seconds: float | None
    seconds: float
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = field(default=None, repr=False)

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def text(self) -> str | None:
        return self.outputs[0].text

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string, or the one of ``stop_token_ids``, that has ended the first answer."""
        return self.outputs[0].stop_reason

    @property
    def error(self) -> BaseException | None:
        """The error that ended the first answer, with the finish reason ``"error"``."""
        return self.outputs[0].error

    @property
    def hidden_states(self) -> dict[int, Tensor] | None:
        """Those of the first answer, by layer; None if none were asked for."""
        return self.outputs[0].hidden_states

    @property
    def emitted(self) -> dict[str, Tensor] | None:
        """What traced hooks have emitted of the first answer's tokens, by name; None if it was not asked for."""
        return self.outputs[0].emitted


class LabelDiagnostics(NamedTuple):
    """How far a model has answered with a label at all.

    Attributes:
        label_mass: the probability of all labels together, over the whole vocabulary.
        argmax_is_label: whether the most likely token is one of them.
    """

    label_mass: float
    argmax_is_label: bool


class Decisions(dict[str, dict[str, Any]]):
    """The answers by the names of the questions, as ``transformers.pipeline("decision")`` gives them.

    Attributes:
        diagnostics: by name, how far the model has answered with a label at all.
        prompt_tokens: of all prompts together.
        cached_tokens: how many of these were not computed, because another question has the same beginning, or the
            prefix cache had them.
    """

    diagnostics: dict[str, LabelDiagnostics]
    prompt_tokens: int
    cached_tokens: int
