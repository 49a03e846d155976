"""What FlashInfer's wrappers have in common: a workspace that names the device, and tables that plans write.

With CUDA graphs, tables have fixed addresses, those of the user's buffers: captured launches follow what is written to
them, by ``plan`` or by the user.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Planned:
    """A wrapper that is planned before it runs.

    Its workspace is not written: it names the device.
    """

    def __init__(self, float_workspace_buffer: Tensor, use_cuda_graph: bool) -> None:
        self.device = float_workspace_buffer.device
        self._use_cuda_graph = use_cuda_graph

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans write to the user's buffers."""
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Name another device's workspace. Neither is written.

        Args:
            float_workspace_buffer: any tensor on the device.
            int_workspace_buffer: not read.
        """
        self.device = float_workspace_buffer.device

    def end_forward(self) -> None:
        """Do nothing; FlashInfer has it for old code."""

    def _buffer(self, name: str, buffer: Tensor | None) -> Tensor | None:
        """Return the user's buffer for a table, None without CUDA graphs.

        Raises:
            ValueError: CUDA graphs need one, and there is none.
        """
        if not self._use_cuda_graph:
            return None
        if not isinstance(buffer, Tensor):
            raise ValueError(f"{name} must be a tensor with use_cuda_graph=True; got {buffer!r}")
        return buffer

    def _place(self, non_blocking: bool, **tables: tuple[Tensor, Tensor | None]) -> list[Tensor]:
        """Return tables as their buffers, into which they are written, or else on the device.

        A table may be shorter than its buffer, which is returned whole.

        Args:
            non_blocking: whether copies may go on after the return.
            tables: each with its buffer, by the buffer's name.

        Raises:
            ValueError: a buffer is too short for its table; nothing is written.
        """
        for name, (table, buffer) in tables.items():
            if buffer is not None and len(table) > len(buffer):
                raise ValueError(f"{name} has room for {len(buffer)} entries; got {len(table)}: make it longer")
        return [self._placed(table, buffer, non_blocking) for table, buffer in tables.values()]

    def _placed(self, table: Tensor, buffer: Tensor | None, non_blocking: bool) -> Tensor:
        if buffer is None:
            return table.to(self.device, non_blocking=non_blocking)
        # From pageable memory, a copy that goes on might read what the caller has changed.
        buffer[: len(table)].copy_(table, non_blocking=non_blocking and table.device == buffer.device)
        return buffer


def as_index(table: Tensor) -> Tensor:
    """Return a table of offsets or page numbers as int32 or int64, which ops read."""
    return table if table.dtype in (torch.int32, torch.int64) else table.to(torch.int32)
