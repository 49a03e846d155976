"""The hidden states of each step, and what traced hooks emit in it, for calls that get them.

Shapes: B rows, Q new columns of the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from compiled_llm.compilation.graphs.outputs import Emitted
from compiled_llm.execution.batch import Tap, TokenSpan
from compiled_llm.execution.state.emitted_steps import EmittedSteps
from compiled_llm.huggingface.cache.emitted_columns import EmittedColumns, RowColumns, StepEmitted, WantedOutputs
from compiled_llm.huggingface.call.call import PagedCall
from compiled_llm.kvcache.row import Row


class StepStates(Tap):
    """A reader of what each step emits: of the prompts together, and then of one token a row."""

    def __init__(self, call: PagedCall, wanted: WantedOutputs) -> None:
        self._call, self._wanted, self._first = call, wanted, 0
        self.wants = wanted.outputs
        self._rows: list[Row] = []
        self._prompts: EmittedColumns | None = None
        self._shared: list[tuple[int, int]] = []  # of each row the one that it begins as, and with how many tokens
        self._steps: EmittedSteps | None = None

    @classmethod
    def of(cls, call: PagedCall) -> StepStates | None:
        """Return a reader for a call; None if it gets nothing besides tokens and scores."""
        wanted = WantedOutputs.of(call.config.output_hidden_states, call.runtime.facts.hooks)
        return cls(call, wanted) if wanted and call.config.return_dict_in_generate else None

    def begin(self, rows: Sequence[Row], new: Sequence[int]) -> None:
        """Note the rows of the call, and of each how many of its last tokens are computed: others have the rest."""
        call, first = self._call, self._call.cache.seen
        self._first, width = first, call.last - first
        self._rows = list(rows)
        places: dict[Row, RowColumns] = {}
        for number, (row, update, count) in enumerate(zip(rows, call.updates, new, strict=True)):
            columns = np.where(update.columns < first, -1, number * width + update.columns - first)
            shared = len(columns) - count
            places[row] = RowColumns(update.kept + shared, columns[shared:])
            self._shared.append((call.leaders[number], shared))
        staging = call.model_runner.state.staging
        self._prompts = EmittedColumns(self._wanted, staging, places, (len(rows), width))

    def launched(self, spans: Sequence[TokenSpan], emitted: Emitted, later: int = 0) -> None:
        """Keep a copy."""
        assert self._prompts is not None, "the call has begun"
        if self._prompts.left:
            self._prompts.launched(spans, emitted)
            return
        if not later:
            assert [span.row for span in spans[: len(self._rows)]] == self._rows, "a step is of all rows"
        if self._steps is None:
            self._steps = EmittedSteps([slice(len(self._rows))], self._wanted.chosen(emitted).keys())
        self._steps.keep(emitted)

    def read_steps(self, steps: int) -> list[StepEmitted]:
        """Return what the first steps have emitted; the loop may have launched more than it has read.

        It is ``[B, Q, ...]`` of the prompts, zeros for masked tokens, and then ``[B, 1, ...]``.
        """
        assert self._prompts is not None, "the call has begun"
        prompts = self._call.emitted  # by a forward of their own, or else in steps
        if prompts is None:
            prompts = self._prompts.outputs().map(self._with_shared)
        later = [] if self._steps is None else self._steps.by_step()
        return [prompts, *(StepEmitted(step, prompts.layers) for step in later)][:steps]

    def _with_shared(self, tensor: Tensor) -> Tensor:
        """Return prompts' tensors with the beginnings that were computed for another row."""
        for number, (leads, shared) in enumerate(self._shared):
            if shared:
                own, other = (self._call.updates[row].columns[:shared] - self._first for row in (number, leads))
                tensor[number, own] = tensor[leads, other]
        return tensor
