"""Prefill and extend: new tokens of some rows, packed one after the other, in chunks of a bounded size."""

# Shapes: B rows, T packed tokens, L tokens whose logits are wanted, C of them after which a token is sampled, V
# vocabulary, S page size.

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compilation.graphs.captured_shapes import CapturedShapes
from compiled_llm.compilation.graphs.cuda_graphs import Filled
from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.graphs.step_key import StepKey, pools
from compiled_llm.compilation.inputs import ExtraTensors, PrefillInputs
from compiled_llm.compilation.program_list import PREFILL, with_outputs
from compiled_llm.execution.batch import Extension, ExtraInputs, Tap, TokenSpan, outputs_of
from compiled_llm.execution.plans import Planner
from compiled_llm.execution.prefill.extra_memory import ExtraMemory
from compiled_llm.execution.prefill.packing import (
    Packed,
    as_bytes,
    chunks,
    null_extension,
    pack,
    padded,
    token_count,
)
from compiled_llm.execution.reporting.progress import TaskNumber
from compiled_llm.execution.state.prefill_room import COMPILED_ROWS, compiled_length
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.execution.steps.graph_manager import GraphManager
from compiled_llm.execution.steps.launch import Launch
from compiled_llm.execution.steps.steps import Steps
from compiled_llm.kvcache.row import Row
from compiled_llm.kvcache.table import HostTable
from compiled_llm.model.inputs import vocabulary_of

# Tokens whose logits are kept, that prefill is compiled with.
_KEPT = 5
# So many calls of forward that would have replayed a shape have taken as long as its capture does, for which they leave
# no time as decode steps do.
_SEEN = 8
# Where prefills are captured, logits and hidden states of all of their tokens may each take such a part of a device's
# memory for good.
_SCORES, _STATES = 1 / 64, 1 / 256


class Prefill:
    """The prefills of one model.

    Attributes:
        extra_memory: where CUDA graphs read extra inputs.
    """

    def __init__(
        self,
        state: RunnerState,
        graph_manager: GraphManager,
        planner: Planner,
        shapes: CapturedShapes,
        steps: Steps,
    ) -> None:
        self._state = state
        self._table = state.step_table
        self._steps = steps
        self._graph_manager = graph_manager
        self._cuda_graphs = graph_manager.cuda_graphs
        # Indexers score all pages of a launch. Its memory follows from their number, and a CUDA graph has but one.
        self._captures = self._cuda_graphs.ours and state.scores is None
        self._holds = None if state.scores is None else state.scores.holds
        self._planner = planner
        self._shapes = shapes
        self._page_size = state.config.page_size
        self._taps = state.taps
        self.extra_memory = ExtraMemory()
        self._bringing: dict[str, ExtraInputs] = {}  # that of no tokens, by the program that it was compiled with
        self._padding = state.slots.padding if state.taps else None
        self._stateful = state.pool.states is not None
        self._table.when_dropped.append(planner.forget)
        model = state.facts.model
        self._most_scored = _tokens_in(state, _SCORES, vocabulary_of(model) * model.dtype.itemsize)
        width = model.config.get_text_config(decoder=True).hidden_size
        states = (len(state.facts.layers) + 1) * width * model.dtype.itemsize
        self._most_with_states = _tokens_in(state, _STATES, states)
        self._anchors = self._find_anchors()
        self._table.anchors["prefill"] = [*self._anchors]
        # If the largest shape does not stay captured, more launches are but more work for the host.
        largest = shapes.largest
        stays = largest is not None and largest.tokens in {anchor.tokens for anchor in self._anchors}
        self._whole = largest.tokens if largest is not None and stays else math.inf  # so many tokens are never cut

    # ---- compiled

    @property
    def is_ready(self) -> bool:
        """Whether the program that reads token ids is compiled."""
        return PREFILL in self._graph_manager.prefills

    def make_ready(
        self,
        waiting: int = 0,
        number: TaskNumber | None = None,
        anchors: bool = True,
        wants: tuple[str, ...] = (),
        extra: ExtraInputs | None = None,
    ) -> None:
        """Compile prefill, if it is not compiled yet, for a call of ``waiting`` rows that waits for it."""
        # ``anchors`` are captured, too; ``wants`` are further outputs; what rows have ``extra`` has its own program.
        graph_manager = self._graph_manager
        program = with_outputs(PREFILL if extra is None else extra.program.name, wants)
        checked = self._steps.check_model_if_due()
        if program in graph_manager.prefills or graph_manager.eager:
            return
        if not checked:
            graph_manager.check_model()
        with graph_manager.preparing(program, waiting, program, number=number):
            state = self._state
            length = compiled_length(state.facts.layers, state.device, state.max_positions, self._page_size)
            null = [null_extension(length, self._page_size)] * COMPILED_ROWS
            slots, keep = state.slots.of([], _KEPT - 1), np.zeros(_KEPT, dtype=np.int64)
            for schedule in self._schedules_of_programs(extra is not None):
                self._launch(self._laid_out(null, keep, slots, schedule, wants, extra))
        graph_manager.prefills.add(program)
        if wants:
            return
        if extra is not None:
            self._bringing[program] = extra.empty()
        if anchors and (extra is None or extra.captured):
            self.capture_anchors("" if extra is None else program)

    @property
    def extras(self) -> tuple[ExtraInputs, ...]:
        """The inputs beside ids of each compiled program that reads any, for a prefill that has none."""
        prepared = self._graph_manager.prefills
        return tuple(none for program, none in self._bringing.items() if program in prepared)

    def _schedules_of_programs(self, own_inputs: bool) -> list[int]:
        """Return a schedule for each program that prefills run in; there is one for those with inputs of their own."""
        alone = [schedule for schedule in self._planner.schedules if self._planner.attends_alone(schedule)]
        return [self._planner.schedules[0], *([] if own_inputs else alone)]

    def capture_anchors(self, extra: str = "") -> None:
        """Capture, as far as there is room, a few shapes in which any prefill can run while its own is captured."""
        # Those that read ids are evicted after all others. ``extra`` names a compiled program that reads more.
        anchors = [shape._replace(program=extra) for shape in self._anchors]
        self.capture_shapes(sorted(anchors), only_with_room=True)

    def _find_anchors(self) -> list[StepKey]:
        if not self._captures:
            return []
        schedule, most = self._planner.schedules[0], self._table.budget.max_graphs
        shapes = [shape._replace(schedule=schedule) for shape in self._shapes.anchors()]
        shapes = [shape for shape in shapes if self._planner.fits(shape)]
        # If there may be but a few, half of them are for decode steps, and for what is used most.
        return shapes if most is None else shapes[: (most + 1) // 2]

    # ---- run

    def run(
        self,
        extensions: Sequence[Extension],
        keep: NDArray[np.int64] | None = None,
        remember: bool = True,
        exact: bool = False,
        taps: Sequence[Tap] = (),
    ) -> StepOutputs:
        """Run new tokens of some rows, packed: ``[L, V]`` logits, and, if ``keep`` is None, ``[L]`` int64 tokens.

        Args:
            extensions: at most ``max_batch_size`` rows, each already grown by its tokens.
            keep: ``[L]`` ascending, which packed tokens' logits are wanted; if None, the last of each row that ends.
            remember: whether the rows' slots keep the tokens that are sampled.
            exact: run in the shape that follows from the rows alone, captured or not, and in no larger one.
        """
        wants = outputs_of(taps)
        extra = _brought_in(extensions)
        self.make_ready(waiting=len(extensions), wants=wants, extra=extra)
        if extra is not None:
            self._graph_manager.events.used[extra.program.name] += 1
        slots = self._state.slots.of([], 0)
        if keep is None:
            ending = [extension for extension in extensions if extension.is_last]
            lasts = np.cumsum([len(extension.ids) for extension in extensions]) - 1
            keep = lasts[[extension.is_last for extension in extensions]]
            rows = [cast(Row, extension.row) for extension in ending] if remember else []
            slots = self._state.slots.of(rows, len(ending))
        if self._taps:
            extensions = self._placed(extensions)
        self._state.arena.flush()
        if self._stateful:
            extensions = [_with_states(extension) for extension in extensions]
        # What no CUDA graph gives is not cut; and more logits than rows would be there twice while they are joined.
        may_replay = extra is None and (not wants or pools(wants)) and len(keep) <= len(extensions)
        most = self._state.config.prefill_tokens
        if may_replay:
            queries = [len(extension.ids) for extension in extensions]
            most = self._most_at_once(queries, [extension.row.exact_length for extension in extensions])
        start, parts = 0, []
        for chunk in chunks(extensions, most, self._page_size, self._holds, self._state.spare_states):
            end = start + token_count(chunk)
            first, last = keep.searchsorted((start, end))
            outputs = self._run_chunk(chunk, keep[first:last] - start, slots[first:last], exact, wants, extra)
            if taps:
                spans = _spans(extensions, start, end)
                for tap in taps:
                    tap.launched(spans, outputs.emitted)
            parts.append(outputs._replace(emitted={}))
            start = end
        for own in self._taps:
            own.inspect()
            own.stored(_rows(extensions), [extension.ids for extension in extensions])
        if len(parts) == 1:
            return parts[0]
        return StepOutputs(torch.cat([part.logits for part in parts]), torch.cat([part.tokens for part in parts]), {})

    def _most_at_once(self, queries: Sequence[int], lengths: Sequence[int]) -> int:
        """Return how many tokens of rows a launch has at most; less than it may have where captured ones are faster."""
        # This follows from the rows alone, whatever is captured so far: a call that is repeated is cut as before.
        most, tokens = self._state.config.prefill_tokens, sum(queries)
        if tokens <= self._whole or self._graph_manager.programs.full():
            return most
        pairs = sum([new * length - new * (new - 1) // 2 for new, length in zip(queries, lengths, strict=True)])
        at_once = min(tokens, most)
        return self._shapes.cut(at_once, pairs * at_once // tokens) or most

    def _placed(self, extensions: Sequence[Extension]) -> list[Extension]:
        """Let taps write what the launches read of these rows."""
        rows = _rows(extensions)
        places = self._state.slots.places(rows)
        for tap in self._taps:
            tap.placed(rows, places, [len(extension.ids) for extension in extensions])
        return [extension._replace(place=place) for extension, place in zip(extensions, places, strict=True)]

    def _run_chunk(
        self,
        chunk: list[Extension],
        keep: NDArray[np.int64],
        slots: NDArray[np.int64],
        exact: bool,
        wants: tuple[str, ...],
        extra: ExtraInputs | None,
    ) -> StepOutputs:
        """Run one chunk; ``slots`` ``[C]`` are those of the rows that end in it, or empty."""
        wanted, sampled = len(keep), len(slots)
        shape = self._shape_to_replay(chunk, wanted, slots, wants, extra)
        if shape is not None:
            launch = self._steps.ready(shape, exact=exact)
            self._steps.want_padded(shape, launch.key, functools.partial(self._begin_capture, shape))
            logits, tokens, emitted = self._run_shape(launch, chunk, keep, slots)
            return StepOutputs(logits[:wanted].clone(), tokens[:sampled].clone(), emitted)  # overwritten by the next
        # A symbolic size is at least 2.
        if len(chunk) == 1:
            missing = max(0, 2 - token_count(chunk))
            chunk = [*chunk, null_extension(missing, self._page_size)]
        if wanted < 2:
            keep = np.concatenate([keep, np.zeros(2 - wanted, dtype=np.int64)])
        if sampled < 2:
            slots = np.concatenate([slots, self._state.slots.of([], 2 - sampled)])
        schedule = self._planner.schedules[0] if extra is not None else self._schedule_for(chunk)
        logits, tokens, emitted = self._launch(self._laid_out(chunk, keep, slots, schedule, wants, extra))
        return StepOutputs(logits[:wanted], tokens[:sampled], emitted)

    def _schedule_for(self, chunk: Sequence[Extension]) -> int:
        queries = [len(extension.ids) for extension in chunk]
        return self._planner.schedule_for(queries, [extension.row.exact_length for extension in chunk])

    def _laid_out(
        self,
        chunk: list[Extension],
        keep: NDArray[np.int64],
        slots: NDArray[np.int64],
        schedule: int,
        wants: tuple[str, ...],
        extra: ExtraInputs | None,
    ) -> PrefillInputs:
        """Copy a prefill into new tensors on the device, and plan it, which chooses its own schedule."""
        state = self._state
        packed, table = pack(chunk, keep, slots, self._page_size, self._padding, self._stateful)
        alone = self._planner.attends_alone(schedule)
        columns, indices = state.staging.to_device(packed), state.prefill_indices
        if indices is not None:
            state.staging.upload([(table.indices, indices)])
        else:
            (own,) = state.staging.to_device([table.indices])
            indices = _of_any_size(own)
        inputs = self._as_inputs(columns, indices, None)._replace(alone=alone, wants=wants)
        if extra is not None:
            inputs = inputs._replace(extra=extra.pack(chunk, state.staging))
        if not alone:
            self._planner.plan_prefill(table)
        return inputs

    @property
    def _indices(self) -> Tensor:
        assert self._state.prefill_indices is not None, "no prefill of layers with indexers is captured"
        return self._state.prefill_indices

    def _as_inputs(self, columns: Sequence[Tensor], indices: Tensor, shape: StepKey | None) -> PrefillInputs:
        """Return device tensors, in the order of ``Packed``, as inputs of the program, with the plans of a shape."""
        named = Packed(*columns)._asdict()  # type: ignore[arg-type]
        named |= {"ids": named["ids"][None], "positions": named["positions"][None]}
        if not self._taps:
            named["places"] = None
        if not self._stateful:
            named |= {"read": None, "write": None}
        alone = shape is not None and self._planner.attends_alone(shape.schedule)
        plans = self._planner.for_prefill(shape)
        taps = tuple(tap.inputs for tap in self._taps)
        return PrefillInputs(indices=indices, plans=plans, alone=alone, taps=taps, **named)

    def _launch(self, inputs: PrefillInputs) -> StepOutputs:
        graph_manager = self._graph_manager
        with graph_manager.paged():
            return graph_manager.programs.prefill(graph_manager.arguments(inputs))

    # ---- captured

    def all_shapes(self) -> list[StepKey]:
        """Return all shapes in which prefills may be captured; some may not fit."""
        return self._in_schedules(self._shapes.all())

    def _in_schedules(self, shapes: Sequence[StepKey]) -> list[StepKey]:
        if not self._captures:
            return []
        return [shape._replace(schedule=schedule) for shape in shapes for schedule in self._planner.schedules]

    def fits(self, shape: StepKey) -> bool:
        return self._planner.fits(shape)

    def captured_shapes(self, rows: int) -> list[StepKey]:
        """Return the shapes that prefills of ``rows`` rows are padded to and captured in, smallest first."""
        return [shape for shape in self._in_schedules(self._shapes.of(rows)) if self._planner.fits(shape)]

    def capture_shapes(self, shapes: Sequence[StepKey], only_with_room: bool = False) -> None:
        """Capture prefills of those shapes that are not captured yet; ``only_with_room`` evicts no others for them."""
        new = [shape for shape in shapes if self._table.get(shape) is None]
        if not (self._captures and new):
            return
        self.make_ready(anchors=False)
        for extra in dict.fromkeys(shape.program for shape in new):
            self._capture_new([shape for shape in new if shape.program == extra], extra or PREFILL, only_with_room)

    def _capture_new(self, shapes: Sequence[StepKey], program: str, only_with_room: bool) -> None:
        """Capture shapes of one compiled program."""
        largest, none = max(shape.tokens for shape in shapes), np.zeros(0, dtype=np.int64)
        with self._graph_manager.preparing(f"{program} of up to {largest} tokens", 0, program):
            for shape in reversed(shapes):  # the largest first: what it leaves in the pool serves the others
                if self._table.get(shape) is None and not (only_with_room and self._table.full):
                    with self._cuda_graphs.accounted(f"{program} of {shape.tokens} tokens, {shape.rows} rows"):
                        packed, table = self._padded(shape, [], none, none)
                        self._launch_shape(shape, packed, table, self._brought_to(shape, []), background=False)

    def _shape_to_replay(
        self,
        chunk: Sequence[Extension],
        wanted: int,
        slots: NDArray[np.int64],
        wants: tuple[str, ...],
        extra: ExtraInputs | None,
    ) -> StepKey | None:
        """Return the shape in which a prefill can be captured; None if it cannot."""
        # Logits are wanted of as many tokens as there are rows, and tokens sampled from all of them or none; or of most
        # tokens, and none is sampled. What a CUDA graph gives stays allocated: there is none that gives hidden states
        # of many tokens.
        if not self._captures or len(slots) not in (0, wanted):
            return None
        if self._graph_manager.programs.full():  # a new CUDA graph would have no guards
            return None
        queries = [len(extension.ids) for extension in chunk]
        if extra is not None:
            captured = extra.captured and not wants and wanted <= len(chunk)
            return self._shape_with(extra, queries) if captured else None
        shape = self._shape_for(queries, [extension.row.exact_length for extension in chunk], wants)
        if shape is None or wanted <= shape.rows:
            return shape
        scored = 2 * wanted >= sum(queries) and shape.tokens <= self._most_scored
        return shape._replace(phase="scoring") if scored else None

    def _shape_with(self, extra: ExtraInputs, queries: Sequence[int]) -> StepKey | None:
        """Return the shape of rows that bring something, whose program is compiled for one schedule."""
        shape = self._shapes.smallest(sum(queries), len(queries))
        if shape is None:
            return None
        shape = shape._replace(schedule=self._planner.schedules[0], program=extra.program.name)
        return shape if self._table.get(shape) is not None or self._planner.fits(shape) else None

    def _pays(self, shape: StepKey) -> bool:
        """Whether its launches, with this one, have taken calls as long, since its last capture, as another would."""
        entry = self._table.entry(shape)
        return entry.misses + 1 >= _SEEN * (entry.captures + 1) and entry.state != "failed"

    def _shape_for(self, queries: Sequence[int], lengths: Sequence[int], wants: tuple[str, ...] = ()) -> StepKey | None:
        shape = self._shapes.smallest(sum(queries), len(queries))
        if shape is None or (wants and not pools(wants) and shape.tokens > self._most_with_states):
            return None
        shape = shape._replace(wants=wants)
        # A schedule that only this mixture of rows gains by is not captured; that of one row of as many tokens may be.
        for batch in ((queries, lengths), ([sum(queries)], [max(*lengths, sum(queries))])):
            shape = shape._replace(schedule=self._planner.schedule_for(*batch))
            if self._table.get(shape) is not None or self._planner.fits(shape):
                return shape
        return None  # larger ones fit even less

    def is_one_launch(self, queries: Sequence[int], lengths: Sequence[int]) -> bool:
        """Return whether rows of ``queries`` ``[B]`` new of ``lengths`` ``[B]`` tokens run in one launch."""
        if sum(queries) > self._most_at_once(queries, lengths):
            return False
        pages = sum(-(-length // self._page_size) for length in lengths)
        if self._holds is not None and not self._holds(sum(queries), pages, len(queries)):
            return False
        captured = self._captures and self._shapes.smallest(sum(queries), len(queries)) is not None
        return not captured or self._shape_for(queries, lengths) is not None

    def tokens_computed(self, queries: Sequence[int]) -> int:
        """Return the tokens that a launch of rows with so many new ones computes, padding included."""
        tokens = sum(queries)
        shape = self._shapes.smallest(tokens, len(queries)) if self._captures else None
        return tokens if shape is None else shape.tokens

    def _begin_capture(self, shape: StepKey) -> Callable[[], None]:
        """Run a shape that has only run in a larger one over rows of padding; return what begins its capture."""
        # What kernels do in their first launch cannot be captured.
        none = np.zeros(0, dtype=np.int64)
        packed, table = self._padded(shape, [], none, none)
        _, capture = self._launched(shape, packed, table, self._brought_to(shape, []))
        return functools.partial(capture, background=True)

    def _run_shape(
        self,
        launch: Launch,
        chunk: list[Extension],
        keep: NDArray[np.int64],
        slots: NDArray[np.int64],
    ) -> StepOutputs:
        """Run a prefill padded to the launch's shape: replay it, or launch it and have it captured."""
        state, shape, entry = self._state, launch.key, launch.entry
        packed, table = self._padded(shape, chunk, keep, slots)
        extra = self._brought_to(shape, chunk)
        background = not (launch.captures_now if len(slots) == len(keep) else self._pays(launch.wanted))
        program = functools.partial(self._launch_shape, shape, packed, table, extra, background)
        running = [cast(Row, extension.row) for extension in chunk if extension.is_next]
        forgettable = not state.slots.remember(running)  # else the host lacks what would have to be written again
        if entry is None or not (forgettable or self._steps.is_valid(entry)):
            return launch.over(program)()
        assert entry.filled is not None
        fed = state.slots.fed() if running or self._taps else None  # the replay overwrites what it feeds in
        self._upload(packed, table, shape, entry.filled)
        self._fixed(shape, extra)
        outputs = launch()
        # Checked while the device computes. All it reads is there, since the weights are; and if the model computes
        # something else now, all it writes is written again.
        if not forgettable or self._steps.is_valid(entry):
            return outputs
        state.slots.restore(packed.slots, fed)
        return program()

    def _launch_shape(
        self, shape: StepKey, packed: Packed, table: HostTable, extra: ExtraTensors | None, background: bool
    ) -> StepOutputs:
        """Launch a padded prefill over new tensors, and capture it, now or in the ``background``."""
        outputs, capture = self._launched(shape, packed, table, extra)
        if background:
            self._cuda_graphs.want(shape, functools.partial(capture, background=True))
        else:
            capture(background=False)
        return outputs

    def _launched(
        self, shape: StepKey, packed: Packed, table: HostTable, extra: ExtraTensors | None
    ) -> tuple[StepOutputs, Callable[..., None]]:
        """Launch a padded prefill over new tensors; return its outputs, and what captures it."""
        inputs, filled = self._in_new_tensors(shape, packed, extra)
        self._upload(packed, table, shape, filled)
        _unpack(inputs, filled)
        outputs = self._launch(inputs)
        return outputs, functools.partial(self._capture, shape, inputs, filled, outputs)

    def _padded(
        self, shape: StepKey, chunk: list[Extension], keep: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> tuple[Packed, HostTable]:
        logits, sampled = shape.outputs
        keep = np.concatenate([keep, np.zeros(logits - len(keep), dtype=np.int64)])
        slots = np.concatenate([slots, self._state.slots.of([], sampled - len(slots))])
        return pack(padded(chunk, shape, self._page_size), keep, slots, self._page_size, self._padding, self._stateful)

    def _brought_to(self, shape: StepKey, chunk: Sequence[Extension]) -> ExtraTensors | None:
        """Return extra inputs, laid out in new tensors of a padded shape; None if its program reads ids."""
        if not shape.program:
            return None
        none = self._bringing[shape.program]
        laid_out: ExtraTensors = none.pack(padded(chunk, shape, self._page_size), self._state.staging)
        return laid_out

    def _fixed(self, shape: StepKey, extra: ExtraTensors | None) -> ExtraTensors | None:
        """Return extra inputs where CUDA graphs read it, filled."""
        largest = self._shapes.largest
        if extra is None or largest is None:
            return None
        return self.extra_memory.filled(extra, shape.tokens, largest.tokens)

    def _in_new_tensors(
        self, shape: StepKey, packed: Packed, extra: ExtraTensors | None
    ) -> tuple[PrefillInputs, Tensor]:
        """Return the inputs of a captured prefill, and the tensor from which they are filled."""
        columns = self._state.staging.to_device(packed)
        inputs = self._as_inputs(columns, self._indices, shape)._replace(wants=shape.wants)
        inputs = inputs._replace(extra=self._fixed(shape, extra))
        (filled,) = self._state.staging.to_device([as_bytes(packed)])
        return inputs, filled

    def _capture(
        self, shape: StepKey, inputs: PrefillInputs, filled: Tensor, like: StepOutputs, background: bool
    ) -> None:
        own = 2 * filled.nbytes + sum(plan.nbytes for plan in inputs.plans.tensors)  # filled, and copied to inputs
        first = functools.partial(_unpack, inputs, filled)
        self._graph_manager.capture(shape, inputs, like, first, Filled(filled, own), background)

    def _upload(self, packed: Packed, table: HostTable, shape: StepKey, filled: Tensor) -> None:
        state = self._state
        state.staging.upload([(as_bytes(packed), filled), (table.indices, self._indices)])
        self._planner.plan_prefill(table, shape)


def _rows(extensions: Sequence[Extension]) -> list[Row]:
    return [cast(Row, extension.row) for extension in extensions]


def _brought_in(extensions: Sequence[Extension]) -> ExtraInputs | None:
    """Return what the first row that brings something has extra; None if none does."""
    return next((own.extra for own in extensions if own.extra is not None), None)


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


def _tokens_in(state: RunnerState, part: float, nbytes: int) -> float:
    """Return of how many tokens, of so many bytes each, this part of the device's memory can keep something."""
    if state.device.type != "cuda":
        return math.inf
    return torch.cuda.get_device_properties(state.device).total_memory * part / nbytes


def _with_states(extension: Extension) -> Extension:
    states = cast(Row, extension.row).states
    assert states is not None, "its pool has some"
    return extension._replace(states=states.step)


def _of_any_size(tensor: Tensor) -> Tensor:
    torch._dynamo.mark_dynamic(tensor, 0)
    return tensor


def _unpack(inputs: PrefillInputs, packed: Tensor) -> None:
    """Fill the inputs of a prefill that was uploaded in one tensor: copies inside a graph take the host no time."""
    start = 0
    for name in Packed._fields:
        if (own := getattr(inputs, name)) is None:
            continue
        column = own.view(-1).view(torch.uint8)
        column.copy_(packed[start : start + len(column)])
        start += len(column)
