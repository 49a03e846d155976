"""Notes what the layers of a model do in one run on fake tensors."""

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
    """Return a class of layers that tell a watch what they do."""

    def forward(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        inside = functools.partial(kind.forward, self)
        watch: LayerTracer = self._watch
        return watch.see(self._number, inside, hidden, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward})


class LayerTracer(TorchFunctionMode):
    """Sees what the layers of a model do in one run.

    Attributes:
        calls: for each layer the functions that it called, and on what.
    """

    def __init__(self, own: Sequence[Sequence[Tensor]], faked: Callable[[Any], Any]) -> None:
        """Nothing has been called yet.

        Args:
            own: each layer's tensors.
            faked: puts fake tensors in place of others, so that nothing is written to those.
        """
        super().__init__()
        self._faked = faked
        self.calls: list[Hashable] = []
        self._kept: list[object] = [own]  # so that nothing takes another's identity
        self._names: dict[int, tuple[int | None, str, tuple[int, ...]]] = {}  # a layer, and what it is to that
        self._layer: int | None = None
        self._lines: list[Hashable] = []
        for layer, tensors in enumerate(own):
            for number, tensor in enumerate(tensors):
                self._names[id(tensor)] = layer, "own", (number,)

    def see(self, layer: int, inside: Callable[..., Tensor], hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run a layer and note what it does.

        Raises:
            NoOutlineError: it is not the next one, or does not give what it takes, changed.
        """
        if layer != len(self.calls) or self._layer is not None:
            raise NoOutlineError("layers are not called one after the other")
        self._layer, self._lines = layer, []
        self._name(hidden, "hidden")
        others = {name: value for name, value in kwargs.items() if name != BATCH_ARGUMENT}
        self._lines.append((self._describe(args), self._describe(others), id(kwargs.get(BATCH_ARGUMENT))))
        out = inside(hidden, *args, **kwargs)
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
