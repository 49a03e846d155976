"""FlashInfer's plans for the prefills of one model: made on the host, before the graph, for every attention group.

On a CPU, and for decode, the ops read the page table themselves and there is nothing to plan.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from compiled_llm.compilation.inputs import Shape
from compiled_llm.config import WrapConfig
from compiled_llm.execution.batch import Extension
from compiled_llm.kvcache.memory import stored_head_dim
from compiled_llm.kvcache.table import HostTable
from compiled_llm.model.layer_probe import Layer
from compiled_llm_ops import Geometry, PageTable

if TYPE_CHECKING:
    from compiled_llm_ops.flashinfer.plan import FlashInferPlan
    from compiled_llm_ops.flashinfer.workspace import Workspace

logger = logging.getLogger("compiled_llm.graphs")

MOST_FOR_RECORDED = 256 * 2**20
"""Bytes of scratch memory that recorded prefills may ask for: those that need more gain least from recording."""


def attention_groups(
    layers: Sequence[Layer], page_size: int, dtype: torch.dtype, device: torch.device
) -> list[Geometry]:
    """Return the geometries of the layers, each once: a window or other head sizes need a plan of their own."""
    groups = {
        Geometry(
            layer.query_heads,
            layer.kv_heads,
            stored_head_dim(layer, device),
            page_size,
            layer.window_left,
            layer.logits_soft_cap,
            dtype,
            dtype,
        ): None
        for layer in layers
    }
    return list(groups)


class Planner:
    """Plans for prefills: for those that graphs capture by shape, for all others anew."""

    def __init__(
        self,
        groups: Sequence[Geometry],
        config: WrapConfig,
        device: torch.device,
        longest: int,
        shapes: Sequence[Shape] = (),
    ) -> None:
        """Allocate FlashInfer's workspace on CUDA; nothing on a CPU.

        Args:
            groups: of the model's layers.
            config: the options of ``wrap``.
            device: where the model lives.
            longest: tokens that a row may have.
            shapes: prefills that are recorded, not split.
        """
        self._longest = longest
        self._groups = list(groups) if device.type == "cuda" else []
        self._prefill: list[FlashInferPlan] = []
        self._recorded_prefills: dict[Shape, tuple[Tensor, list[FlashInferPlan]]] = {}
        self._workspace: Workspace | None = None
        self._processors = 0
        if self._groups:
            from compiled_llm_ops.flashinfer.workspace import Workspace

            self._processors = torch.cuda.get_device_properties(device).multi_processor_count
            wanted = max((self._split_bytes(shape) for shape in shapes if self._may_split(shape)), default=0)
            self._workspace = Workspace(device, config.workspace_bytes or self._default_workspace(wanted))
            if wanted > self.workspace_bytes:
                logger.info("not all prefills of long rows are recorded: that takes workspace_bytes=%d", wanted)

    def load(self) -> None:
        """Begin to build or load FlashInfer's kernels, which the first prefill waits for."""
        if self._workspace is not None:
            for group in self._groups:
                self._workspace.load(group)

    @property
    def workspace_bytes(self) -> int:
        """Size of FlashInfer's float workspace, in bytes; 0 on a CPU."""
        return 0 if self._workspace is None else self._workspace.float_buffer.nbytes

    def fits(self, shape: Shape) -> bool:
        """Return whether prefills of this shape can be recorded.

        Where blocks share keys, their plans must fit the workspace, however long the rows are; and with so many tokens
        that only a mixture of long and short rows gains by it, nothing is recorded.
        """
        return not shape.split or (self._may_split(shape) and self._split_bytes(shape) <= self.workspace_bytes)

    def splits(self, batch: Sequence[Extension]) -> bool:
        """Return whether a prefill of these rows is faster if blocks share the keys of a row."""
        return self._worth_splitting(
            [len(extension.ids) for extension in batch], [extension.row.length for extension in batch]
        )

    def plan_prefill(self, columns: PageTable, table: HostTable, shape: Shape | None = None) -> None:
        """Plan a prefill or extend whose page table lies in ``columns``.

        Args:
            columns: the page table on the device.
            table: the same on the host.
            shape: of a prefill that is recorded, over the same columns each time; None for any other.
        """
        if shape is None:
            plans = self._prefill = [self._make(group, columns, None) for group in self._groups]
        else:
            known = self._recorded_prefills.get(shape)
            if known is None or known[0] is not columns.indptr:
                made = [self._make(group, columns, shape) for group in self._groups]
                known = self._recorded_prefills[shape] = columns.indptr, made
            plans = known[1]
        for plan in plans:
            plan.plan(_host(table))

    def freeze_prefill(self, shape: Shape) -> None:
        """Note that a graph has captured the plans of a prefill."""
        for plan in self._recorded_prefills[shape][1]:
            plan.freeze()

    def _may_split(self, shape: Shape) -> bool:
        return self._worth_splitting([shape.tokens], [self._longest])

    def _worth_splitting(self, queries: Sequence[int], lengths: Sequence[int]) -> bool:
        if not self._groups:
            return False
        from compiled_llm_ops.flashinfer.splitting import worth_splitting

        given = np.array(queries), np.array(lengths)
        return any(worth_splitting(group, *given, self._processors) for group in self._groups)

    def _split_bytes(self, shape: Shape) -> int:
        from compiled_llm_ops.flashinfer.splitting import static_split_bytes

        sizes = [static_split_bytes(group, shape.tokens, shape.rows + 1, self._processors) for group in self._groups]
        return max(sizes)

    def _default_workspace(self, wanted: int) -> int:
        """Return the bytes that all prefills need, and as far as that is not too much those ``wanted`` to record."""
        from compiled_llm_ops.flashinfer.splitting import split_bytes

        return max(min(wanted, MOST_FOR_RECORDED), *(split_bytes(group, self._processors) for group in self._groups))

    def _make(self, group: Geometry, columns: PageTable, shape: Shape | None) -> FlashInferPlan:
        from compiled_llm_ops.flashinfer.plan import FlashInferPlan

        assert self._workspace is not None
        rows = columns.last_page_len.shape[0]
        split = None if shape is None else shape.split
        return FlashInferPlan(
            group, columns, rows=rows, workspace=self._workspace, static=shape is not None, split=split
        )


def _host(table: HostTable) -> PageTable:
    return PageTable(*(torch.from_numpy(column) for column in table))
