"""Whether a CUDA graph may still be replayed: a replay would not notice that the model has changed."""

# Two things are checked. ``Guards`` are Dynamo's own, about all assumptions of the compiled program (attributes, hooks,
# grad mode, sizes and types of tensors): only Dynamo knows them, each program has its own, and they look at more than
# the model. They say nothing about *which* tensors there are, since a compiled program takes any that fit:
# ``ModelVersion`` does.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from compiled_llm.compat.torch.dynamo import guards_for


class Checks(Protocol):
    """What has to hold for a captured call."""

    def find(self) -> None:
        """Find it out, right before the call is captured, or raise RuntimeError."""

    def valid(self) -> bool:
        """Whether it still holds."""
        ...


class Guards:
    """Dynamo's guards of a compiled function, for the arguments that it was captured with."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        rebuild: Callable[[], dict[str, Any]] = dict,
        called_with: dict[str, Any] | None = None,
    ) -> None:
        """The guards of ``function``, ``own_copy``'s; ``rebuild`` returns arguments made again for each check."""
        self._function = function
        self._arguments = arguments
        self._rebuild = rebuild
        self._called_with = called_with
        self._check: Callable[[dict[str, Any]], bool] | None = None

    def find(self) -> None:
        """Find the code compiled for the arguments, right before a call is captured, or raise RuntimeError."""
        arguments, self._called_with = self._called_with or self._arguments | self._rebuild(), None
        self._check = guards_for(self._function, arguments)

    def valid(self) -> bool:
        """Whether a call would run the same compiled code as before."""
        assert self._check is not None, "found before"
        return bool(self._check(self._arguments | self._rebuild()))
