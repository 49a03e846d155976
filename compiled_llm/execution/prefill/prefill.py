"""Prefill and extend: new tokens of some rows, packed one after the other, in chunks of a bounded size."""

# Shapes: T packed tokens, L tokens whose logits are wanted, C of them after which a token is sampled, V vocabulary.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from compiled_llm.compilation.graphs.captured_shapes import CapturedShapes
from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.inputs import Pooling
from compiled_llm.execution.batch import Extension, Tap, TokenSpan, outputs_of, rows_of
from compiled_llm.execution.plans import Planner
from compiled_llm.execution.prefill.launches import PrefillLaunches
from compiled_llm.execution.prefill.packer import PrefillPacker
from compiled_llm.execution.prefill.packing import NO_ROWS, PrefillChunk, chunks, token_count
from compiled_llm.execution.prefill.shapes import PrefillShapes
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.execution.steps.graph_manager import GraphManager
from compiled_llm.execution.steps.steps import Steps
from compiled_llm.kvcache.row import Row


class Prefill:
    """The prefills of one model.

    Attributes:
        shapes: say how many tokens a launch has, and to which shape it is padded.
        packer: packs rows into what programs read.
        launches: run chunks, and what they run is compiled and captured there.
    """

    def __init__(
        self,
        state: RunnerState,
        graph_manager: GraphManager,
        planner: Planner,
        captured: CapturedShapes,
        steps: Steps,
    ) -> None:
        self._state = state
        self._events = graph_manager.events
        self.shapes = PrefillShapes(state, graph_manager, planner, captured)
        self.packer = PrefillPacker(state, planner, captured.largest)
        self.launches = PrefillLaunches(state, graph_manager, steps, self.shapes, self.packer)
        state.step_table.anchors["prefill"] = [*self.shapes.anchors]
        state.step_table.when_dropped.append(planner.forget)

    def run(
        self,
        extensions: Sequence[Extension],
        keep: NDArray[np.int64] | None = None,
        remember: bool = True,
        exact: bool = False,
        taps: Sequence[Tap] = (),
        pooling: Pooling = "",
    ) -> StepOutputs:
        """Run new tokens of some rows, packed: ``[L, V]`` logits, and, if ``keep`` is None, ``[L]`` int64 tokens.

        Args:
            extensions: at most ``max_batch_size`` rows, each already grown by its tokens.
            keep: ``[L]`` ascending, which packed tokens' logits are wanted; if None, the last of each row that ends.
            remember: whether the rows' slots keep the tokens that are sampled.
            exact: run in the shape that follows from the rows alone, captured or not, and in no larger one.
            pooling: what is wanted in place of logits.
        """
        extra = next((own.extra for own in extensions if own.extra is not None), None)
        asked = NO_ROWS._replace(wants=outputs_of(taps), pooling=pooling, extra=extra)
        self.launches.make_ready(asked, waiting=len(extensions))
        if extra is not None:
            self._events.used[extra.program.name] += 1
        slots = self._state.slots.of([], 0)
        if keep is None:
            keep, slots = self._sampled(extensions, remember)
        if self._state.taps or self._state.pool.states is not None:
            extensions = self._placed(extensions)
        self._state.arena.flush()
        whole = asked._replace(rows=extensions, keep=keep, slots=slots)
        parts = []
        start = 0
        for rows in self._cut(whole):
            end = start + token_count(rows)
            outputs = self.launches.run(whole.part(rows, start, end), exact)
            if taps:
                spans = _spans(extensions, start, end)
                for tap in taps:
                    tap.launched(spans, outputs)
            parts.append(StepOutputs(outputs.logits, outputs.tokens, {}))
            start = end
        for own in self._state.taps:
            own.inspect()
            own.stored(rows_of(extensions), [extension.ids for extension in extensions])
        if len(parts) == 1:
            return parts[0]
        return StepOutputs(torch.cat([part.logits for part in parts]), torch.cat([part.tokens for part in parts]), {})

    def _sampled(self, extensions: Sequence[Extension], remember: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the last packed tokens of rows that end, and the slots for the tokens after them."""
        lasts = np.cumsum([len(extension.ids) for extension in extensions]) - 1
        ending = [extension for extension in extensions if extension.is_last]
        rows = rows_of(ending) if remember else []
        return lasts[[extension.is_last for extension in extensions]], self._state.slots.of(rows, len(ending))

    def _placed(self, extensions: Sequence[Extension]) -> Sequence[Extension]:
        """Let taps write what the launches read of these rows, and say where their states lie."""
        if self._state.taps:
            rows = rows_of(extensions)
            places = self._state.slots.places(rows)
            for tap in self._state.taps:
                tap.placed(rows, places, [len(extension.ids) for extension in extensions])
            extensions = [own._replace(place=place) for own, place in zip(extensions, places, strict=True)]
        if self._state.pool.states is not None:
            extensions = [_with_states(extension) for extension in extensions]
        return extensions

    def _cut(self, chunk: PrefillChunk) -> Iterator[list[Extension]]:
        """Cut rows into those of each launch."""
        state = self._state
        most = state.config.prefill_tokens
        # What no CUDA graph gives is not cut; and more logits than rows would be there twice while they are joined.
        if chunk.extra is None and not chunk.wants and len(chunk.keep) <= len(chunk.rows):
            most = self.shapes.most_tokens(chunk.queries, chunk.lengths)
        return chunks(chunk.rows, most, state.config.page_size, self.shapes.holds, state.spare_states)


def _spans(extensions: Sequence[Extension], start: int, end: int) -> list[TokenSpan]:
    """Return whose the packed tokens from ``start`` to ``end`` are; the rows have grown by all of theirs."""
    spans, at = [], 0
    for extension in extensions:
        row, count = cast(Row, extension.row), len(extension.ids)
        first, last = max(start - at, 0), min(end - at, count)
        if first < last:
            spans.append(TokenSpan(row, row.exact_length - count + first, last - first))
        at += count
    return spans


def _with_states(extension: Extension) -> Extension:
    states = cast(Row, extension.row).states
    assert states is not None, "its pool has some"
    return extension._replace(states=states.step)
