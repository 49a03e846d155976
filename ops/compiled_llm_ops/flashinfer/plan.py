"""Plans: how FlashInfer divides a batch, decided on the host, and launches that follow it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_llm_ops.contracts import Geometry, PagedAttention, PlannedBatch
from compiled_llm_ops.flashinfer.append import readable
from compiled_llm_ops.flashinfer.planner import (
    NUMBERS,
    HostColumns,
    decide,
    fields_of,
    kernels_of,
    schedule_of,
    tokens_of,
)
from compiled_llm_ops.flashinfer.splitting import WHOLE
from compiled_llm_ops.flashinfer.workspace import FlashInferWorkspace, pinned
from compiled_llm_ops.protocol import KERNELS, Launch, own


class FlashInferPlan:
    """One attention group's plan, made and launched on one stream: its copy overwrites what earlier launches read."""

    # ``numbers`` are the fields of FlashInfer's ``PrefillPlanInfo``, or for ``fa3`` of its ``PrefillPlanSM90Info``, for
    # MLA of its ``MLAPlanInfo``, and zeros. A launch reads every one of them on the host: the sizes and switches
    # choose kernels and grids, and the offsets are added to the addresses of plan and workspace. So a captured launch
    # has them baked in, and from then on ``decide`` raises if one changes.

    kernels: Mapping[str, Launch] = KERNELS["flashinfer"]

    def __init__(self, workspace: FlashInferWorkspace, nbytes: int) -> None:
        """``workspace`` is on the same device; ``nbytes`` is the size of ``tensor``."""
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=workspace.device)
        self.numbers = pinned(8 * NUMBERS).view(torch.int64).zero_()
        self._numbers = self.numbers.numpy()  # read and written in each plan, at a tenth of what a tensor costs
        self._workspace = workspace
        self.launching = workspace.launching  # a thread may capture while another one launches
        self._geometry: Geometry | None = None
        self._rows = self._tokens = 0
        self._schedule = WHOLE
        self._fixed: tuple[Geometry | None, int, int, int] | None = None
        self._captured: list[int] | None = None
        self._waiting: PlannedBatch | None = None
        self._columns = HostColumns.of(0)
        own(self)

    def decide(self, batch: PlannedBatch) -> None:
        """As ``Plan.decide``; while the kernels are being built, the first launch does this instead.

        Raises:
            ValueError: a captured launch has fewer tokens, the plan is too small, or there is no kernel.
            RuntimeError: the workspace is too small, a graph is being captured, or FlashInfer's plan differs from that
                of a captured launch; the graph must not be replayed then.
        """
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("plan_paged_attention: a CUDA graph is being captured; plan before the capture")
        self._geometry = batch.geometry
        self._rows = len(batch.last_page_len)
        batch = batch._replace(schedule=schedule_of(batch, self._workspace.device, self._workspace.processors))
        if self._workspace.is_loading(self._geometry, kernels_of(batch.schedule)):
            columns = {name: getattr(batch, name).copy() for name in ("qo_indptr", "indptr", "last_page_len")}
            self._waiting = batch._replace(**columns)
        else:
            self._decide(batch)

    def _decide(self, batch: PlannedBatch) -> None:
        self._waiting = None
        fixed = self._geometry, self._rows, batch.captured_tokens, batch.schedule
        if self._columns.rows != self._rows:
            self._columns = HostColumns.of(self._rows)
        known = self._numbers.tolist() if fixed == self._fixed else None
        numbers = decide(batch, self.tensor, self._columns, known, self._workspace)
        self._check_captured(numbers)
        self._fixed = fixed
        self._schedule = batch.schedule
        self._tokens = tokens_of(batch)
        self._numbers[:] = numbers

    def launch(self, args: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        """As ``Plan.launch``; RuntimeError if nothing was planned, ValueError for other shapes or dtypes."""
        self._run(args, out, lse, q_scale=args.scale)

    def launch_functor(self, args: Any, further: Sequence[Any], out: Tensor, lse: Tensor | None) -> None:
        """Launch kernels with a functor; ``further`` are its tensors and numbers, ``args`` else as of ``launch``."""
        self._run(args, out, lse, *further)

    def _run(self, args: Any, out: Tensor, lse: Tensor | None, *further: Any, **options: Any) -> None:
        wrapper, numbers = self.to_launch(args)
        with self.launching:
            query = readable(_of_each_kv_head(args.query, args.key_scale))
            _set_batch(wrapper, numbers, self._tokens, args)
            try:
                wrapper.run(query, args.pages, *further, **options, out=out, lse=lse, return_lse=lse is not None)
            finally:
                _forget_batch(wrapper)
        if args.value_scale is not None:
            _of_each_kv_head(out, args.value_scale, written=out)

    def to_launch(self, args: Any) -> tuple[Any, list[int]]:
        """The wrapper that launches, with ``launching`` held, and the plan's numbers, which a capture bakes in."""
        if self._waiting is not None:
            self._decide(self._waiting)
        numbers = self._numbers.tolist()
        if not any(numbers):
            raise RuntimeError("paged_attention: nothing was planned; call plan_paged_attention() before the launch")
        self._check_launch(args)
        if torch.cuda.is_current_stream_capturing():
            self._captured = numbers
        wrapper = self._workspace.wrapper(args.geometry, kernels_of(self._schedule))
        return wrapper, numbers[: len(fields_of(self._schedule, args.geometry))]

    def _check_captured(self, numbers: list[int]) -> None:
        if self._captured is None or numbers == self._captured:
            return
        changed = [
            f"{name} was {old} and is now {new}"
            for name, old, new in zip(self._fields, self._captured, numbers, strict=False)
            if old != new
        ]
        raise RuntimeError(
            f"plan_paged_attention: a captured graph of {self._rows} rows no longer fits its plan: "
            f"{', '.join(changed)}; capture the graph again before replaying it"
        )

    @property
    def _fields(self) -> tuple[str, ...]:
        assert self._geometry is not None, "a batch is planned"
        return fields_of(self._schedule, self._geometry)

    def _check_launch(self, args: Any) -> None:
        launched = args.geometry, args.last_page_len.shape[0], args[0].shape[0]
        planned = self._geometry, self._rows, self._tokens
        if launched != planned:
            names = ("geometry", "rows", "tokens")
            different = [
                f"{name} {found} (planned: {wanted})"
                for name, found, wanted in zip(names, launched, planned, strict=True)
                if found != wanted
            ]
            raise ValueError(f"paged_attention: the plan is of another batch: {', '.join(different)}")


def _of_each_kv_head(states: Tensor, scale: Tensor | None, written: Tensor | None = None) -> Tensor:
    """Queries or outputs ``[T, H, D]`` times the ``scale`` ``[K]`` of their kv head: kernels have none by head."""
    # In one kernel, rounded once, into ``written`` if given.
    if scale is None:
        return states
    grouped = states.unflatten(1, (len(scale), -1))
    result = torch.empty_like(states) if written is None else written
    torch.mul(grouped, scale[:, None, None], out=result.view(grouped.shape))
    return result


def _set_batch(wrapper: Any, numbers: list[int], tokens: int, args: Any) -> None:
    wrapper._plan_info = numbers
    wrapper._qo_indptr_last = tokens
    wrapper._int_workspace_buffer = args.plan
    wrapper._float_workspace_buffer = args.workspace
    wrapper._qo_indptr_buf = args.qo_indptr
    wrapper._paged_kv_indptr_buf = args.indptr
    wrapper._paged_kv_indices_buf = args.indices
    wrapper._paged_kv_last_page_len_buf = args.last_page_len


def _forget_batch(wrapper: Any) -> None:
    """Let go of tensors: one that a graph made must not outlive its capture."""
    wrapper._qo_indptr_buf = wrapper._paged_kv_indptr_buf = wrapper._paged_kv_indices_buf = None
    wrapper._paged_kv_last_page_len_buf = wrapper._float_workspace_buffer = None
