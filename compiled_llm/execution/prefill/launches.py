"""Launches of prefills: in a captured shape, replayed if there is its CUDA graph, or as they are."""

# What kernels do in their first launch cannot be captured, so each shape is launched once before its capture.

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import numpy as np

from compiled_llm.compilation.graphs.cuda_graphs import Filled
from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.inputs import PrefillInputs
from compiled_llm.compilation.program_list import PREFILL
from compiled_llm.execution.batch import ExtraInputs
from compiled_llm.execution.prefill.packer import PaddedChunk, PrefillPacker, unpack
from compiled_llm.execution.prefill.packing import NO_ROWS, PrefillChunk, null_extension
from compiled_llm.execution.prefill.shapes import PrefillShapes
from compiled_llm.execution.reporting.progress import TaskNumber
from compiled_llm.execution.state.prefill_room import COMPILED_ROWS, compiled_length
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.execution.steps.graph_manager import GraphManager
from compiled_llm.execution.steps.launch import Launch
from compiled_llm.execution.steps.steps import Steps
from compiled_llm.kvcache.row import Row

# Tokens whose logits are kept, that prefill is compiled with.
_KEPT = 5
# So many calls of forward that would have replayed a shape have taken as long as its capture does, for which they leave
# no time as decode steps do.
_SEEN = 8


class PrefillLaunches:
    """The launches of one model's prefills, and the programs and CUDA graphs that they run."""

    def __init__(
        self,
        state: RunnerState,
        graph_manager: GraphManager,
        steps: Steps,
        shapes: PrefillShapes,
        packer: PrefillPacker,
    ) -> None:
        self._state = state
        self._graph_manager = graph_manager
        self._steps = steps
        self._shapes = shapes
        self._packer = packer
        self._table = state.step_table
        self._empty: dict[str, ExtraInputs] = {}  # those of no tokens, by the program that was compiled with them

    # ---- compiled

    @property
    def is_ready(self) -> bool:
        """Whether the program that reads token ids is compiled."""
        return PREFILL in self._graph_manager.prefills

    @property
    def extras(self) -> tuple[ExtraInputs, ...]:
        """The extra inputs of no tokens, of each compiled program that reads any."""
        prepared = self._graph_manager.prefills
        return tuple(empty for program, empty in self._empty.items() if program in prepared)

    def make_ready(
        self, like: PrefillChunk = NO_ROWS, waiting: int = 0, number: TaskNumber | None = None, anchors: bool = True
    ) -> None:
        """Compile the program of a chunk, if it is not compiled yet, for a call of ``waiting`` rows that waits for it.

        With ``anchors``, a few shapes are captured, too.
        """
        manager, program, extra = self._graph_manager, like.program, like.extra
        checked = self._steps.check_model_if_due()
        if program in manager.prefills or manager.eager:
            return
        if not checked:
            manager.check_model()
        with manager.preparing(program, waiting, program, number=number):
            self._compile(like)
        manager.prefills.add(program)
        if like.wants or like.pooling:
            return
        if extra is not None:
            self._empty[program] = extra.empty()
        if anchors and (extra is None or extra.captured):
            self.capture_anchors("" if extra is None else program)

    def _compile(self, like: PrefillChunk) -> None:
        """Launch each program of a chunk once over rows of padding."""
        state, page_size = self._state, self._state.config.page_size
        length = compiled_length(state.facts.layers, state.device, state.max_positions, page_size)
        rows = [null_extension(length, page_size)] * COMPILED_ROWS
        keep, slots = np.zeros(_KEPT, dtype=np.int64), state.slots.of([], _KEPT - 1)
        chunk = like._replace(rows=rows, keep=keep, slots=slots)
        for schedule in self._shapes.schedules_of_programs if like.extra is None else [self._shapes.simplest]:
            self._launch(self._packer.inputs(chunk, schedule))

    # ---- run

    def run(self, chunk: PrefillChunk, exact: bool) -> StepOutputs:
        """Run a chunk; if ``exact``, in the shape that follows from its rows alone, captured or not."""
        if (shape := self._shapes.padded(chunk)) is None:
            outputs = self._run_as_it_is(chunk)
        else:
            launch = self._steps.ready(shape, exact=exact)
            self._steps.want_padded(shape, launch.key, partial(self._begin_capture, shape))
            outputs = self._run_padded(launch, chunk)
        logits, tokens = outputs.logits[: len(chunk.keep)], outputs.tokens[: len(chunk.slots)]
        if shape is not None:  # the next one overwrites them
            logits, tokens = logits.clone(), tokens.clone()
        return StepOutputs(logits, tokens, outputs.emitted)

    def _run_as_it_is(self, chunk: PrefillChunk) -> StepOutputs:
        chunk = self._packer.least_sizes(chunk)
        return self._launch(self._packer.inputs(chunk, self._shapes.schedule_for(chunk)))

    def _run_padded(self, launch: Launch, chunk: PrefillChunk) -> StepOutputs:
        """Run a chunk padded to the launch's shape: replay it, or launch it and have it captured."""
        slots, entry = self._state.slots, launch.entry
        shape = launch.key
        padded = self._packer.padded(chunk, shape, self._empty[shape.program] if shape.program else None)
        # Calls that sample nothing leave captures no time, so one that pays is made at once.
        now = launch.captures_now if len(chunk.slots) == len(chunk.keep) else self._pays(launch.wanted)
        program = partial(self._launch_padded, padded, background=not now)
        running = [cast(Row, extension.row) for extension in chunk.rows if extension.is_next]
        forgettable = not slots.remember(running)  # else the host lacks what would have to be written again
        if entry is None or not (forgettable or self._steps.may_replay(entry)):
            return launch.over(program)()
        assert entry.filled is not None
        fed = slots.fed() if running or self._state.taps else None  # the replay overwrites what it feeds in
        self._packer.fill(padded, entry.filled)
        outputs = launch()
        # Checked while the device computes. All it reads is there, since the weights are; and if the model computes
        # something else now, all it writes is written again.
        if not forgettable or self._steps.may_replay(entry):
            return outputs
        slots.restore(padded.packed.slots, fed)
        return program()

    def _pays(self, shape: StepKey) -> bool:
        """Whether its launches, with this one, have taken calls as long, since its last capture, as another would."""
        entry = self._table.entry(shape)
        return entry.misses + 1 >= _SEEN * (entry.captures + 1) and entry.state != "failed"

    def _pad(self, shape: StepKey, chunk: PrefillChunk = NO_ROWS) -> PaddedChunk:
        return self._packer.padded(chunk, shape, self._empty[shape.program] if shape.program else None)

    def _launch(self, inputs: PrefillInputs) -> StepOutputs:
        manager = self._graph_manager
        with manager.paged():
            return manager.programs.prefill(manager.arguments(inputs))

    # ---- captured

    def capture_anchors(self, program: str = "") -> None:
        """Capture, as far as there is room, a few shapes in which any prefill can run while its own is captured."""
        # Those that read ids are evicted after all others. ``program`` names a compiled one that reads extra inputs.
        anchors = [shape._replace(program=program) for shape in self._shapes.anchors]
        self.capture_shapes(sorted(anchors), only_with_room=True)

    def capture_shapes(self, shapes: Sequence[StepKey], only_with_room: bool = False) -> None:
        """Capture prefills of those shapes that are not captured yet; ``only_with_room`` evicts no others for them."""
        new = [shape for shape in shapes if self._table.get(shape) is None]
        if not (self._shapes.captures and new):
            return
        self.make_ready(anchors=False)
        for program in dict.fromkeys(shape.program for shape in new):
            same = [shape for shape in new if shape.program == program]
            self._capture_new(same, program or PREFILL, only_with_room)

    def _capture_new(self, shapes: Sequence[StepKey], program: str, only_with_room: bool) -> None:
        """Capture shapes of one compiled program."""
        manager, largest = self._graph_manager, max(shape.tokens for shape in shapes)
        with manager.preparing(f"{program} of up to {largest} tokens", 0, program):
            for shape in reversed(shapes):  # the largest first: what it leaves in the pool serves the others
                if self._table.get(shape) is None and not (only_with_room and self._table.full):
                    with manager.cuda_graphs.accounted(f"{program} of {shape.tokens} tokens, {shape.rows} rows"):
                        self._launch_padded(self._pad(shape), background=False)

    def _launch_padded(self, chunk: PaddedChunk, background: bool) -> StepOutputs:
        """Launch a padded prefill over new tensors, and capture it, now or in the ``background``."""
        outputs, capture = self._launched(chunk, background)
        if background:
            self._graph_manager.cuda_graphs.want(chunk.shape, capture)
        else:
            capture()
        return outputs

    def _begin_capture(self, shape: StepKey) -> Callable[[], None]:
        """Run a shape that has only run in a larger one over rows of padding; return what begins its capture."""
        return self._launched(self._pad(shape), background=True)[1]

    def _launched(self, chunk: PaddedChunk, background: bool) -> tuple[StepOutputs, Callable[[], None]]:
        """Launch a padded prefill over new tensors; return its outputs, and what captures it."""
        inputs, filled = self._packer.new_inputs(chunk)
        self._packer.fill(chunk, filled)
        unpack(inputs, filled)
        outputs = self._launch(inputs)
        nbytes = 2 * filled.nbytes + sum(plan.nbytes for plan in inputs.plans.tensors)  # filled, and copied to inputs
        first, given = partial(unpack, inputs, filled), Filled(filled, nbytes)
        capture = self._graph_manager.capture
        return outputs, partial(capture, chunk.shape, inputs, outputs, first, given, background)
