"""Copies from host arrays to fixed device buffers that never wait for the device."""

# A copy from ordinary memory waits for the device, and one from pinned memory reads it later, so pinned memory must not
# be rewritten before its copy is done. Several pinned areas are used one after the other, each with an event after its
# copies, so that the host waits only when it is that many uploads ahead.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

AREAS = 32  # a step that drafts beside a prompt makes up to six uploads, and a few such steps are launched unread
_LARGEST = 2**20  # bytes of an area at most: what is larger has pinned memory of its own, which the allocator keeps
_ALIGNMENT = 8


class _Area(NamedTuple):
    """Host memory to copy from, as a tensor and as an array: to get one from the other takes longer than a copy."""

    memory: Tensor
    bytes: NDArray[np.uint8]

    @classmethod
    def of(cls, memory: Tensor) -> _Area:
        return cls(memory, memory.numpy())


class Staging:
    """Pinned areas used one after the other, and one that is lent; on a CPU the copies are plain ones."""

    def __init__(self, device: torch.device) -> None:
        """Areas grow to the largest upload."""
        self._device = device
        self._areas = [_Area.of(torch.empty(0, dtype=torch.uint8, device="cpu"))] * AREAS
        self._events = [torch.cuda.Event() for _ in range(AREAS)] if device.type == "cuda" else []
        self._current = 0
        self._lent = torch.empty(0, 0, dtype=torch.int32, device="cpu")
        self._lent_event = torch.cuda.Event() if self._events else None

    def lend(self, rows: int, columns: int) -> NDArray[np.int32]:
        """Return an array ``[rows, columns]`` from which ``upload_lent`` copies directly."""
        # It holds its previous contents, at first zeros. It is the caller's until the next call of this, which waits
        # for its copy to be done.
        if self._lent_event is not None:
            self._lent_event.synchronize()
        if self._lent.shape[0] < rows or self._lent.shape[1] != columns:
            pinned = self._lent_event is not None
            self._lent = torch.zeros(rows, columns, dtype=torch.int32, pin_memory=pinned, device="cpu")
        lent: NDArray[np.int32] = self._lent[:rows].numpy()
        return lent

    def upload_lent(self, rows: NDArray[np.int32], target: Tensor) -> None:
        """Copy ``rows`` ``[n, words]``, which may be the lent array, into the beginning of a tensor on the device."""
        lent, target = self._lent[: len(rows)], target[: len(rows)]
        if self._lent_event is None or rows.ctypes.data != lent.data_ptr() or rows.shape != lent.shape:
            self.upload([(rows.reshape(-1), target.view(-1))])
            return
        target.copy_(lent, non_blocking=True)
        self._lent_event.record()

    def upload(self, pairs: Sequence[tuple[NDArray[Any], Tensor]]) -> None:
        """Copy arrays (1-D, of any strides) into the beginnings of device tensors (same dtype), in stream order."""
        if not self._events:
            for array, target in pairs:
                target[: len(array)].numpy()[:] = array
            return
        nbytes = sum(_aligned(array.nbytes) for array, _ in pairs)
        if nbytes > _LARGEST:
            _copy(pairs, _Area.of(_pinned(nbytes)))
            return
        self._current = (self._current + 1) % AREAS
        self._events[self._current].synchronize()
        self.make_room(nbytes)
        _copy(pairs, self._areas[self._current])
        self._events[self._current].record()

    def to_device(self, arrays: Sequence[NDArray[Any]], targets: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return device tensors with the arrays' contents: ``targets``, and new ones for the other arrays."""
        if not (self._events or targets):
            return [torch.from_numpy(array.copy()) for array in arrays]
        tensors = [
            *targets,
            *(
                torch.empty(len(array), dtype=torch.from_numpy(array[:0].copy()).dtype, device=self._device)
                for array in arrays[len(targets) :]
            ),
        ]
        self.upload(list(zip(arrays, tensors, strict=True)))
        return tensors

    def make_room(self, nbytes: int) -> None:
        """Let each area hold so much: to pin memory takes a millisecond, and may wait for the device."""
        if not self._events or len(self._areas[0].bytes) >= min(nbytes, _LARGEST):
            return
        # One piece for all: each would take as long. Copies underway keep what they read, as the allocator knows them.
        size = min(1 << max(12, (nbytes - 1).bit_length()), _LARGEST)
        self._areas = [_Area.of(part) for part in _pinned(AREAS * size).split(size)]


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")


def _copy(pairs: Sequence[tuple[NDArray[Any], Tensor]], area: _Area) -> None:
    """Queue copies of arrays into the beginnings of device tensors, by way of an area."""
    start = 0
    for array, target in pairs:
        end = start + array.nbytes
        area.bytes[start:end].view(array.dtype)[:] = array  # a view of the array itself would need adjacent items
        target[: len(array)].copy_(area.memory[start:end].view(target.dtype), non_blocking=True)
        start += _aligned(array.nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Readback:
    """Numbers on their way to the host; reading them waits for this copy alone, not for later work."""

    def __init__(self, source: Tensor, idle: list[Readback] | None = None) -> None:
        """Allocate for as many numbers as ``source`` has; once these were read, it goes back to ``idle``, if any."""
        cuda = source.device.type == "cuda"
        self._host = torch.empty(len(source), dtype=source.dtype, pin_memory=cuda, device="cpu")
        self._array: NDArray[Any] = self._host.numpy()
        self._event = torch.cuda.Event() if cuda else None
        self._idle = idle

    def start(self, source: Tensor) -> None:
        """Start copying ``source``; it may be overwritten by later work on the stream."""
        self._host.copy_(source, non_blocking=True)
        if self._event is not None:
            self._event.record()

    @property
    def arrived(self) -> bool:
        """Whether reading surely waits for nothing."""
        return self._event is not None and self._event.query()

    def result(self) -> list[int]:
        """Return tokens, once."""
        if self._event is not None:  # here, and no call: each step comes by
            self._event.synchronize()
        tokens: list[int] = self._array.tolist()
        if self._idle is not None:
            self._idle.append(self)
        return tokens

    def array(self) -> NDArray[Any]:
        """Return a copy of the numbers, once."""
        if self._event is not None:
            self._event.synchronize()
        numbers: NDArray[Any] = self._array.copy()
        if self._idle is not None:
            self._idle.append(self)
        return numbers

    def memory(self) -> Tensor:
        """Return the host memory itself, of what was started once; nothing overwrites it."""
        self._wait()
        return self._host

    def _wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class Readbacks:
    """Readbacks to use again: to allocate pinned memory and an event takes longer than to copy a step's tokens."""

    def __init__(self) -> None:
        self._idle: defaultdict[tuple[int, torch.dtype], list[Readback]] = defaultdict(list)

    def start(self, source: Tensor) -> Readback:
        """Start copying ``source`` ``[N]``, of any type."""
        idle = self._idle[source.shape[0], source.dtype]
        readback = idle.pop() if idle else Readback(source, idle)
        readback._host.copy_(source, non_blocking=True)  # as in ``Readback.start``, and no call: each step comes by
        if readback._event is not None:
            readback._event.record()
        return readback

    @staticmethod
    def start_once(source: Tensor) -> Readback:
        """As ``start``, for so many numbers that a readback of each size would keep much memory; torch keeps that."""
        readback = Readback(source)
        readback.start(source)
        return readback
