"""Host copies of a call's tensors: reading one from the device waits for the device."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class HostCopies:
    """Copies of tensors that do not change during a call, each read once."""

    def __init__(self) -> None:
        # the positions that the call has made for rows without padding: 0, 1, 2, … in each
        self.counted: Tensor | None = None
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, value: object) -> Any:
        """Return a tensor's copy on the host; anything else is returned as it is."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._known:
            self.note(value, value.cpu())
        return self._known[id(value)][1]

    def note(self, tensor: Tensor, copy: Tensor) -> None:
        self._known[id(tensor)] = tensor, copy  # keeps the tensor alive, so that its id stays its own
