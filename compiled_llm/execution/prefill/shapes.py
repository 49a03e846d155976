"""Which sizes the launches of prefills have: how many tokens at most, and the shape to which they are padded."""

# What is decided here follows from the rows and from which CUDA graphs there are; nothing is packed, launched, or
# captured.
# Shapes: B rows, L tokens whose logits are wanted, V vocabulary.

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from compiled_llm.compilation.graphs.captured_shapes import CapturedShapes
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.execution.plans import Planner
from compiled_llm.execution.prefill.packing import PrefillChunk
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.execution.steps.graph_manager import GraphManager
from compiled_llm.model.inputs import vocabulary_of

# Where prefills are captured, logits and hidden states of all of their tokens may each take such a part of a device's
# memory for good.
_SCORES, _STATES = 1 / 64, 1 / 256


class PrefillShapes:
    """The shapes of one model's prefills.

    Attributes:
        captures: whether any prefill is captured.
        holds: whether a launch may have so many tokens, pages and rows; None if any may.
        anchors: a few shapes in which any prefill can run while its own is captured, the most important first.
        simplest: the schedule of prefills that can run any batch.
    """

    def __init__(
        self, state: RunnerState, graph_manager: GraphManager, planner: Planner, captured: CapturedShapes
    ) -> None:
        self._table = state.step_table
        self._graph_manager = graph_manager
        self._planner = planner
        self._captured = captured
        self._page_size = state.config.page_size
        self._prefill_tokens = state.config.prefill_tokens
        # Indexers score all pages of a launch. Its memory follows from their number, and a CUDA graph has but one.
        self.captures = graph_manager.cuda_graphs.ours and state.scores is None
        self.holds = None if state.scores is None else state.scores.holds
        self.simplest = planner.schedules[0]
        model = state.facts.model
        width = model.config.get_text_config(decoder=True).hidden_size
        self._most_scored = _tokens_in(state, _SCORES, vocabulary_of(model))
        self._most_with_states = _tokens_in(state, _STATES, (len(state.facts.layers) + 1) * width)
        self.anchors = self._find_anchors()
        # If the largest shape does not stay captured, more launches are but more work for the host.
        largest = captured.largest
        stays = largest is not None and largest.tokens in {anchor.tokens for anchor in self.anchors}
        self._whole = largest.tokens if largest is not None and stays else math.inf  # so many tokens are never cut

    def _find_anchors(self) -> list[StepKey]:
        shapes = [*filter(self.fits, self._with_schedules(self._captured.anchors(), [self.simplest]))]
        most = self._table.budget.max_graphs
        # If there may be but a few, half of them are for decode steps, and for what is used most.
        return shapes if most is None else shapes[: (most + 1) // 2]

    # ---- all there are

    def all(self) -> list[StepKey]:
        """Return all shapes in which prefills may be captured; some may not fit."""
        return self._with_schedules(self._captured.all(), self._planner.schedules)

    def of_rows(self, rows: int) -> list[StepKey]:
        """Return the shapes that prefills of ``rows`` rows are padded to and captured in, smallest first."""
        return [*filter(self.fits, self._with_schedules(self._captured.of(rows), self._planner.schedules))]

    def _with_schedules(self, shapes: Sequence[StepKey], schedules: Sequence[int]) -> list[StepKey]:
        if not self.captures:
            return []
        return [shape._replace(schedule=schedule) for shape in shapes for schedule in schedules]

    def fits(self, shape: StepKey) -> bool:
        """Return whether a shape can be captured."""
        return self._table.get(shape) is not None or self._planner.fits(shape)

    @property
    def schedules_of_programs(self) -> list[int]:
        """One schedule of each program that reads ids; rows without cached tokens may have a program of their own."""
        return [self.simplest, *filter(self._planner.attends_alone, self._planner.schedules)]

    # ---- the shape of a launch

    def padded(self, chunk: PrefillChunk) -> StepKey | None:
        """Return the captured shape of a launch, or the one in which it can be captured; None if it cannot."""
        # Logits are wanted of as many tokens as there are rows, and tokens sampled from all of them or none; or of most
        # tokens, and none is sampled. What a CUDA graph gives stays allocated: there is none that gives hidden states
        # of many tokens.
        if not self.captures or len(chunk.slots) not in (0, len(chunk.keep)):
            return None
        if self._graph_manager.programs.full():  # a new CUDA graph would have no guards
            return None
        few_logits = len(chunk.keep) <= len(chunk.rows)
        if chunk.extra is not None and not (chunk.extra.captured and few_logits and not (chunk.wants or chunk.pooling)):
            return None
        shape = self._smallest(chunk)
        if shape is None or len(chunk.keep) <= shape.rows:
            return shape
        scored = 2 * len(chunk.keep) >= sum(chunk.queries) and shape.tokens <= self._most_scored
        return shape._replace(phase="scoring") if scored else None

    def _smallest(self, chunk: PrefillChunk) -> StepKey | None:
        queries = chunk.queries
        shape = self._captured.smallest(sum(queries), len(queries))
        if shape is None or (chunk.wants and shape.tokens > self._most_with_states):
            return None
        program = "" if chunk.extra is None else chunk.extra.program.name
        shape = shape._replace(wants=chunk.wants, pooling=chunk.pooling, program=program)
        schedules = [self.simplest] if program else self._schedules_for(queries, chunk.lengths)
        return self._first_that_fits(shape, schedules)

    def _schedules_for(self, queries: Sequence[int], lengths: Sequence[int]) -> Iterator[int]:
        # A schedule that only this mixture of rows gains by is not captured; that of one row of as many tokens may be.
        yield self._planner.schedule_for(queries, lengths)
        tokens = sum(queries)
        yield self._planner.schedule_for([tokens], [max(*lengths, tokens)])

    def _first_that_fits(self, shape: StepKey, schedules: Iterable[int]) -> StepKey | None:
        for schedule in schedules:
            if self.fits(wanted := shape._replace(schedule=schedule)):
                return wanted
        return None  # larger ones fit even less

    def schedule_for(self, chunk: PrefillChunk) -> int:
        """Return the schedule of a launch that is not padded; programs that read extra inputs have one."""
        return self.simplest if chunk.extra is not None else self._planner.schedule_for(chunk.queries, chunk.lengths)

    # ---- how many tokens a launch has

    def most_tokens(self, queries: Sequence[int], lengths: Sequence[int]) -> int:
        """Return how many tokens of rows a launch has at most; less than it may have where captured ones are faster."""
        # This follows from the rows alone, whatever is captured so far: a call that is repeated is cut as before.
        most, tokens = self._prefill_tokens, sum(queries)
        if tokens <= self._whole or self._graph_manager.programs.full():
            return most
        pairs = sum([new * length - new * (new - 1) // 2 for new, length in zip(queries, lengths, strict=True)])
        at_once = min(tokens, most)
        return self._captured.cut(at_once, pairs * at_once // tokens) or most

    def is_one_launch(self, queries: Sequence[int], lengths: Sequence[int]) -> bool:
        """Return whether rows of ``queries`` ``[B]`` new of ``lengths`` ``[B]`` tokens run in one launch."""
        if sum(queries) > self.most_tokens(queries, lengths):
            return False
        pages = sum(-(-length // self._page_size) for length in lengths)
        if self.holds is not None and not self.holds(sum(queries), pages, len(queries)):
            return False
        shape = self._captured.smallest(sum(queries), len(queries)) if self.captures else None
        return shape is None or self._first_that_fits(shape, self._schedules_for(queries, lengths)) is not None

    def tokens_computed(self, queries: Sequence[int]) -> int:
        """Return the tokens that a launch of rows with so many new ones computes, padding included."""
        shape = self._captured.smallest(sum(queries), len(queries)) if self.captures else None
        return sum(queries) if shape is None else shape.tokens


def _tokens_in(state: RunnerState, part: float, numbers: int) -> float:
    """Return of how many tokens, with so many numbers each, this part of the device's memory can keep all."""
    if state.device.type != "cuda":
        return math.inf
    memory = torch.cuda.get_device_properties(state.device).total_memory
    return memory * part / (numbers * state.facts.model.dtype.itemsize)
