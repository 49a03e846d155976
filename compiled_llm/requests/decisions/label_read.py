"""One question's prompt, and what the log-probabilities of its labels say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from compiled_llm.requests.outputs import Completion, LabelDiagnostics, Logprob
from compiled_llm.requests.sampling_params import SamplingParams


class LabelRead(NamedTuple):
    """A prompt after which the labels of a question's options are read.

    Attributes:
        question: transformers' ``Question``.
        prompt: its tokens.
        labels: the token of each option's label.
        temperature: divides the labels' log-probabilities.
    """

    question: Any
    prompt: list[int]
    labels: tuple[int, ...]
    temperature: float

    @property
    def params(self) -> SamplingParams:
        """With which an engine reads the labels: the one token that it draws is the most likely."""
        return SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprob_token_ids=self.labels)

    def answer(self, completion: Completion) -> tuple[dict[str, Any], LabelDiagnostics]:
        """Return transformers' answer, and diagnostics; RuntimeError if the request has ended before it was read."""
        if not completion.logprobs:
            raise completion.error or RuntimeError(
                f"question {self.question.name!r}: its request ended before its labels were read "
                f"({completion.finish_reason})"
            )
        logprobs = self._of_labels(completion.logprobs[0])
        mass = math.fsum(map(math.exp, logprobs))
        probabilities = softmax([logprob / self.temperature for logprob in logprobs])
        diagnostics = LabelDiagnostics(min(1.0, mass), completion.token_ids[0] in self.labels)
        return self.question.answer(probabilities), diagnostics

    def _of_labels(self, entries: Mapping[int, Logprob]) -> list[float]:
        return [entries[label].logprob for label in self.labels]


def softmax(scores: Sequence[float]) -> list[float]:
    """Return the probabilities that follow from scores."""
    most = max(scores)
    weights = [math.exp(score - most) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
