"""Each step's logits and scores, for calls that get them: ``output_logits`` and ``output_scores``."""

# The fast loop copies logits on the device, after each step, without waiting. HuggingFace's own processors make scores
# of them when the tokens are known, at the end. Shapes: B rows, T prompt columns, G tokens so far, V vocabulary.

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from compiled_llm.execution.batch import StepOutput, Tap
from compiled_llm.huggingface.call.call import PagedCall


class StepScores(Tap):
    """The step outputs that a call returns."""

    def __init__(self, call: PagedCall) -> None:
        self._call = call
        self._wants_scores = call.wants_scores("output_scores")
        self._wants_logits = call.wants_scores("output_logits")
        self._logits: list[Tensor | None] = []
        self._scores: list[Tensor] = []

    def sampled(self, step: StepOutput) -> None:
        """Keep the logits of a step of all rows, in their order; runs in the model's executor."""
        assert step.logits is not None
        self._logits.append(step.logits.to(torch.float32, copy=True))

    def record(self, scores: Tensor, logits: Tensor) -> None:
        """Keep a step's scores and logits, where the loop has both."""
        self._logits.append(logits if self._wants_logits else None)
        if self._wants_scores:
            self._scores.append(scores)

    def logits(self, steps: int) -> tuple[Tensor, ...] | None:
        """Return the logits of the first steps, of more launched, ``[B, V]`` float32 each; None if not asked for."""
        return tuple(self._logits_of(step) for step in range(steps)) if self._wants_logits else None

    def scores(self, ids: Tensor) -> tuple[Tensor, ...] | None:
        """Return the scores of the steps that sampled the last G tokens of ``ids`` ``[B, T + G]``; as ``logits``."""
        if not self._wants_scores:
            return None
        prompt = self._call.input_ids.shape[1]
        for step in range(len(self._scores), ids.shape[1] - prompt):
            before = cast(torch.LongTensor, ids[:, : prompt + step])
            self._scores.append(self._call.processors(before, cast(torch.FloatTensor, self._logits_of(step))))
            if not self._wants_logits:
                self._logits[step] = None
        return tuple(self._scores)

    def _logits_of(self, step: int) -> Tensor:
        logits = self._logits[step]
        assert logits is not None, "kept if the call returns them"
        return logits.to(self._call.input_ids.device)
