"""Columns of numbers on the device, all of whose changes the host writes by one copy and one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from compiled_llm.execution.state.staging import Staging
from compiled_llm.kvcache.memory import mark_for_any_room

_WORD = 4  # bytes
_ALIGNED = 16  # words, as PyTorch's allocator aligns: inputs that are not are copied before each step


class _Column(NamedTuple):
    tensor: Tensor
    start: int
    words: int


class Arena:
    """Columns of numbers of four or eight bytes in one piece of device memory, which begin as zeros."""

    # Writes are collected on the host until ``flush``. Programs may write into the columns, too; their numbers stay
    # where the host writes none.

    def __init__(self, columns: Mapping[str, tuple[int, torch.dtype]], device: torch.device, staging: Staging) -> None:
        self._staging = staging
        words = {name: dtype.itemsize // _WORD for name, (_, dtype) in columns.items()}
        sizes = {name: -(-columns[name][0] * words[name] // _ALIGNED) * _ALIGNED for name in columns}
        total = sum(sizes.values())
        self._memory = torch.zeros(total, dtype=torch.int32, device=device)
        self._host = np.zeros(total, dtype=np.int32)
        self.written: list[NDArray[np.int64]] = []  # the places of the writes that are due
        self._columns: dict[str, _Column] = {}
        start = 0
        for name, (count, dtype) in columns.items():
            own = self._memory[start : start + count * words[name]].view(dtype)
            # A storage of its own: of inputs that share one, those that a program writes are rebuilt from it.
            self._columns[name] = _Column(mark_for_any_room(from_dlpack(own)), start, words[name])
            start += sizes[name]

    def __getitem__(self, name: str) -> Tensor:
        """A column, at a fixed address."""
        return self._columns[name].tensor

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def write(self, name: str, at: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Write numbers ``values`` ``[n]`` at places ``at`` ``[n]`` of a column, with the next ``flush``."""
        column = self._columns[name]
        if column.words == 2:
            at = (2 * at[:, None] + np.arange(2)).reshape(-1)
        at = column.start + at
        self._host[at] = values.view(np.int32)
        self.written.append(at)

    def flush(self) -> None:
        """Queue all writes before the next launch."""
        if not self.written:
            return
        at = np.concatenate(self.written)
        # Of a place that was written twice, each copy is the latest.
        both = np.concatenate([at.view(np.uint8), self._host[at].view(np.uint8)])
        (there,) = self._staging.to_device([both])
        where, what = there[: at.nbytes].view(torch.int64), there[at.nbytes :].view(torch.int32)
        self._memory.index_copy_(0, where, what)
        self.written.clear()
