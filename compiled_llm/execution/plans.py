"""The plans of one model: made on the host, before the graph, for every attention group."""

# Which kernels they are for, and what a plan says, is the backend's business (``compiled_llm_ops.protocol``).

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from compiled_llm.compilation.graphs.captured_shapes import buckets_up_to
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.config import WrapConfig
from compiled_llm.execution.state.prefill_room import PrefillRoom
from compiled_llm.kinds.kind import Expands
from compiled_llm.kinds.rows import AttentionPlans
from compiled_llm.kvcache.memory import free, mark_static
from compiled_llm.kvcache.table import HostTable
from compiled_llm_ops import Geometry
from compiled_llm_ops.backends import backend_named
from compiled_llm_ops.contracts import PlannedBatch
from compiled_llm_ops.protocol import CapturedLaunch, Plan

logger = logging.getLogger("compiled_llm.graphs")

MAX_FOR_CAPTURED = 256 * 2**20
"""Bytes of workspace that captured prefills may ask for: those that need more gain least from capturing."""

_NOT_CAPTURED = _BEST_SCHEDULE = -1

_ABSORBED, _EXPANDED = 0, 1
"""Schedules of prefills where layers expand: those of any rows, and of rows without cached tokens."""


class Planner:
    """A planner of batches: each captured step has plans of its own, all others share one for each group."""

    # All plans of a model have one size, which programs may take as a constant.

    def __init__(
        self,
        layers: Sequence[Geometry | None],
        config: WrapConfig,
        device: torch.device,
        *,
        max_row_tokens: int,
        room: PrefillRoom,
        shapes: Sequence[StepKey] = (),
        expands: Expands | None = None,
    ) -> None:
        """Allocate the backend's workspace for ``layers``' geometries, None for those that attend without a plan."""
        # ``expands``: when layers attend to what they expand of new tokens, where rows have no others.
        self._name, self._backend, decode_ops = config.backend_on(device.type)
        # whether decode steps are planned, too; if not, they attend by ops that need no plan
        self.decodes = decode_ops is None
        self._device = device
        self._max_row_tokens = max_row_tokens
        self._groups = [group for group in dict.fromkeys(layers) if group is not None]
        # whether a plan holds the rows' exact lengths, so that each decode step is planned
        self.follows_tokens = any(group.rope_size for group in self._groups)
        if not self._groups:
            self._backend = backend_named("reference")  # which plans nothing
        self._group_of_layer = tuple(-1 if layer is None else self._groups.index(layer) for layer in layers)
        self._captures, self._expands = not config.leaves_attention_out, expands
        # A decode step has as many tokens as rows, or a small multiple of that.
        most = max(room.tokens, config.max_batch_size)  # tokens that a planned step can have
        self._plan_bytes = self._backend.plan_bytes(self._groups, device, most, room.rows)
        self._plans: dict[StepKey | None, list[Plan]] = {}
        self._schedules_of_one_row: dict[int, set[int]] = {}
        needed, wanted = self._workspace_for(config, shapes)
        with torch.inference_mode(False):
            self._workspace = self._backend.workspace(device, config.workspace_bytes or max(needed, wanted))
        mark_static(self._workspace.buffer)

    def load(self) -> None:
        """Begin to build or load the backend's kernels, which the first prefill waits for."""
        for group in self._groups:
            self._workspace.load(group)

    @property
    def workspace_bytes(self) -> int:
        return self._workspace.buffer.nbytes

    def release(self) -> None:
        """Give the workspace back; nothing may be planned afterwards."""
        free(self._workspace.buffer)

    @property
    def schedules(self) -> tuple[int, ...]:
        """Ways to divide a batch, or to attend; each has CUDA graphs of its own, if these hold attention."""
        if self._expands:
            return _ABSORBED, _EXPANDED
        return self._backend.schedules if self._captures else self._backend.schedules[:1]

    def fits(self, shape: StepKey) -> bool:
        """Return whether prefills of this shape can be captured."""
        # The workspace must hold their plans, however long the rows are; and a schedule from which only a mixture of
        # rows gains is not captured.
        if shape.schedule == self.schedules[0] or not self._captures or self._expands:
            return True
        return shape.schedule in self._of_one_row(shape.tokens) and self._needed(shape) <= self.workspace_bytes

    def schedule_for(self, queries: Sequence[int], lengths: Sequence[int]) -> int:
        """Return the schedule that is fastest for a prefill of rows with so many new tokens, and so many in all."""
        if self._expands:
            return _EXPANDED if self._expands(queries, lengths) else _ABSORBED
        return self._best(queries, lengths) if self._captures else self.schedules[0]

    def attends_alone(self, schedule: int) -> bool:
        """Return whether rows of such prefills have no cached tokens, and attend to what is expanded."""
        return self._expands is not None and schedule == _EXPANDED

    def forget(self, key: StepKey) -> None:
        """Let go of the plans of a captured prefill that is gone; other keys are ignored."""
        if key.is_prefill:
            self._plans.pop(key, None)

    # ---- what programs read

    def for_prefill(self, shape: StepKey | None = None) -> AttentionPlans:
        """Return the plans of a captured shape, or those of all other prefills."""
        alone = shape is not None and self.attends_alone(shape.schedule)
        return self._as_inputs(None if alone else shape)

    def for_decode(self, step: StepKey) -> AttentionPlans:
        plans = self._as_inputs(step)
        for tensor in plans.tensors:
            mark_static(tensor)
        return plans

    # ---- planning

    def plan_prefill(self, table: HostTable, shape: StepKey | None = None) -> None:
        """Plan a prefill or extend; ``shape`` is that of a captured prefill, None for any other."""
        if shape is not None and self.attends_alone(shape.schedule):
            return
        if shape is None or not self._captures:
            self._plan(shape, table, _NOT_CAPTURED, _BEST_SCHEDULE)
        else:
            self._plan(shape, table, shape.tokens, shape.schedule)

    def plan_decode(self, table: HostTable, step: StepKey) -> None:
        """Plan the decode steps of a bucket until a row enters another page, or with ``follows_tokens`` one."""
        # Plans depend on pages, not on tokens.
        if self._captures:
            self._plan(step, table, step.tokens, self._decode_schedule(step))
        else:
            self._plan(step, table, _NOT_CAPTURED, _BEST_SCHEDULE)

    def _plan(self, key: StepKey | None, table: HostTable, tokens: int, schedule: int) -> None:
        # Without the dispatcher of ``plan_paged_attention``: nothing traces this, and first tokens wait for it.
        columns = (table.qo_indptr, table.indptr, table.last_page_len)
        for group, plan in zip(self._groups, self._plans_of(key), strict=True):
            plan.decide(PlannedBatch(*columns, group, self._workspace.buffer, tokens, schedule))

    def _plans_of(self, key: StepKey | None) -> list[Plan]:
        if key not in self._plans:
            with torch.inference_mode(False):
                self._plans[key] = [self._backend.new_plan(self._workspace, self._plan_bytes) for _ in self._groups]
        return self._plans[key]

    def _as_inputs(self, key: StepKey | None) -> AttentionPlans:
        tensors = tuple(plan.tensor for plan in self._plans_of(key))
        return AttentionPlans(tensors, self._workspace.buffer, self._group_of_layer, self._name)

    # ---- schedules, and how much workspace they need

    def _workspace_for(self, config: WrapConfig, shapes: Sequence[StepKey]) -> tuple[int, int]:
        """Return the bytes that all launches need, and those to capture ``shapes``, if these are not too many."""
        needed = self._backend.workspace_bytes(self._groups, self._device)
        if not self._captures:
            return needed, 0
        wanted = max((self._needed(self._of_long_rows(shape)) for shape in shapes), default=0)
        if self.decodes:
            steps = [StepKey.decode(rows) for rows in buckets_up_to(config.max_batch_size)]
            decode = [CapturedLaunch(step.tokens, step.rows, self._decode_schedule(step)) for step in steps]
            needed = max(needed, *(self._backend.workspace_bytes(self._groups, self._device, step) for step in decode))
        if wanted > (config.workspace_bytes or max(needed, MAX_FOR_CAPTURED)):
            logger.info("not all prefills of long rows are captured: that takes workspace_bytes=%d", wanted)
        return needed, min(wanted, MAX_FOR_CAPTURED)

    def _needed(self, shape: StepKey) -> int:
        captured = CapturedLaunch(shape.tokens, shape.rows + 1, shape.schedule)
        return self._backend.workspace_bytes(self._groups, self._device, captured)

    def _of_long_rows(self, shape: StepKey) -> StepKey:
        """Return the shape of the schedule that is fastest for one row as long as rows may be."""
        return shape._replace(schedule=self._best([shape.tokens], [self._max_row_tokens]))

    def _of_one_row(self, tokens: int) -> set[int]:
        """Return the schedules that are fastest for one row, by how many tokens it has before so many new ones."""
        if tokens not in self._schedules_of_one_row:  # a prefill whose shape is not captured asks each time
            lengths = (tokens, tokens + 384, tokens + 768, tokens + 2048, self._max_row_tokens)
            best = {self._best([tokens], [min(length, self._max_row_tokens)]) for length in lengths}
            self._schedules_of_one_row[tokens] = best
        return self._schedules_of_one_row[tokens]

    def _decode_schedule(self, step: StepKey) -> int:
        """Return the schedule of all decode steps of a bucket: a captured launch has one."""
        return self._best([1] * step.rows, [self._max_row_tokens] * step.rows)

    def _best(self, queries: Sequence[int], lengths: Sequence[int]) -> int:
        return self._backend.best_schedule(self._groups, queries, lengths, self._device)
