"""A run of a model on fake tensors, in which each layer is noted by what it does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from compiled_llm.compilation.layer_state import layout, plain
from compiled_llm.model.attention import BATCH_ARGUMENT


class NoOutlineError(Exception):
    """The model must be traced whole; the message says why."""


@functools.cache
def traced_class(kind: Any) -> Any:
    """Return a subclass of a layer's class that tells its ``_tracer`` what it does."""

    def forward(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        original = functools.partial(kind.forward, self)
        tracer: LayerTracer = self._tracer
        return tracer.trace(self._number, original, hidden, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward})


class LayerTracer(TorchFunctionMode):
    """Notes what the layers of a model do in one run.

    Attributes:
        calls: for each layer the functions that it has called, and their arguments.
    """

    def __init__(self, tensors: Sequence[Sequence[Tensor]], faked: Callable[[Any], Any]) -> None:
        """Nothing has been called yet.

        Args:
            tensors: each layer's own.
            faked: puts fake tensors in place of others, so that nothing is written to those.
        """
        super().__init__()
        self._faked = faked
        self.calls: list[Hashable] = []
        self._kept: list[object] = [tensors]  # so that no id is used twice
        self._names: dict[int, tuple[int | None, str, tuple[int, ...]]] = {}  # by id: layer, role, number
        self._layer: int | None = None
        self._lines: list[Hashable] = []
        for layer, own in enumerate(tensors):
            for number, tensor in enumerate(own):
                self._names[id(tensor)] = layer, "own", (number,)

    def trace(self, layer: int, original: Callable[..., Tensor], hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run a layer's ``original`` forward and note what it does.

        Raises:
            NoOutlineError: it is not the next layer, or its output is not like ``hidden``.
        """
        if layer != len(self.calls) or self._layer is not None:
            raise NoOutlineError("layers are not called one after the other")
        self._layer, self._lines = layer, []
        self._name(hidden, "hidden")
        others = {name: value for name, value in kwargs.items() if name != BATCH_ARGUMENT}
        self._lines.append((self._describe(args), self._describe(others), id(kwargs.get(BATCH_ARGUMENT))))
        out = original(hidden, *args, **kwargs)
        if not isinstance(out, Tensor) or layout(out) != layout(hidden):
            raise NoOutlineError("a layer gives something else than it takes")
        self._lines.append(self._describe(out))
        self.calls.append(tuple(self._lines))
        self._names.pop(id(out))
        self._layer = None
        return out

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a call."""
        result = func(*self._faked(args), **self._faked(kwargs or {}))
        line = func, self._describe(args), self._describe(kwargs)
        if self._layer is not None:
            self._lines.append(line)
            for place, tensor in enumerate(result if isinstance(result, (tuple, list)) else [result]):
                if isinstance(tensor, Tensor) and id(tensor) not in self._names:
                    self._name(tensor, "made", len(self._lines), place)
        return result

    def _name(self, tensor: Tensor, what: str, *number: int) -> None:
        self._kept.append(tensor)
        self._names[id(tensor)] = self._layer, what, number

    def _describe(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            return self._describe_tensor(value)
        if isinstance(value, (tuple, list)):
            return type(value), *map(self._describe, value)
        if isinstance(value, dict):
            return dict, *map(self._describe, value.items())
        if isinstance(value, slice):
            return slice, *map(self._describe, (value.start, value.stop, value.step))
        self._kept.append(value)
        return plain(value)

    def _describe_tensor(self, tensor: Tensor) -> Hashable:
        self._kept.append(tensor)
        layer, what, number = self._names.get(id(tensor), (self._layer, "other", (id(tensor),)))
        if layer != self._layer and what == "made":
            raise NoOutlineError("a layer reads what another one has made")
        return what, number, None if layer == self._layer else layer
