"""A run of a model on fake tensors, in which each layer is noted by what it does.

A function takes a tenth of a millisecond and more on fake tensors, and a layer calls a hundred. So a layer with modules
like those of an earlier one is told what that one was given, as long as it calls the same functions on the same things.
Functions that give back a tensor that was there before, or nothing, do run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from compiled_llm.compat import Fakes, stands_for_plain
from compiled_llm.compilation.tracing.layer_state import is_plain, layout, plain
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


class _Call(NamedTuple):
    """What a layer has called.

    Attributes:
        line: the function and its arguments, described.
        result: what it gave, if the same call of another layer need not run: plain, or tensors that it has made.
    """

    line: Hashable
    result: Any


_UNKNOWN = object()
"""In place of a result."""


class LayerTracer(TorchFunctionMode):
    """Notes what the layers of a model do in one run."""

    def __init__(self, tensors: Sequence[Sequence[Tensor]], similar: Sequence[int], fakes: Fakes) -> None:
        """Nothing has been called yet.

        Args:
            tensors: each layer's own.
            similar: for each layer the first with equal modules and tensors of the same layouts.
            fakes: what takes the place of tensors, so that nothing is written to those.
        """
        super().__init__()
        self._fakes = fakes
        self._similar = similar
        self._called: list[list[_Call]] = []  # by the layers so far; at the end of each, what it gave
        self._kept: list[object] = [tensors]  # so that no id is used twice
        self._names: dict[int, tuple[int | None, str, tuple[int, ...]]] = {}  # by id: layer, role, number
        self._layer: int | None = None
        self._lines: list[_Call] = []
        self._expected: list[_Call] = []
        for layer, own in enumerate(tensors):
            for number, tensor in enumerate(own):
                self._names[id(tensor)] = layer, "own", (number,)

    @property
    def calls(self) -> list[Hashable]:
        """For each layer the functions that it has called, with their arguments, and what it gave."""
        return [tuple(call.line for call in lines) for lines in self._called]

    def trace(self, layer: int, original: Callable[..., Tensor], hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run a layer's ``original`` forward and note what it does.

        Raises:
            NoOutlineError: it is not the next layer, or its output is not like ``hidden``.
        """
        if layer != len(self._called) or self._layer is not None:
            raise NoOutlineError("layers are not called one after the other")
        self._layer, self._lines = layer, []
        self._expected = self._called[self._similar[layer]] if self._similar[layer] < layer else []
        self._name(hidden, "hidden")
        others = {name: value for name, value in kwargs.items() if name != BATCH_ARGUMENT}
        given = layout(hidden), self._describe(args), self._describe(others), id(kwargs.get(BATCH_ARGUMENT))
        self._expects(given)
        self._lines.append(_Call(given, _UNKNOWN))
        out = original(hidden, *args, **kwargs)
        if not isinstance(out, Tensor) or layout(out) != layout(hidden):
            raise NoOutlineError("a layer gives something else than it takes")
        self._lines.append(_Call(self._describe(out), _UNKNOWN))
        self._called.append(self._lines)
        self._names.pop(id(out))
        self._layer = None
        return out

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a call."""
        line = func, self._describe(args), self._describe(kwargs)
        expected = _UNKNOWN if self._layer is None else self._expects(line)
        if expected is not _UNKNOWN:
            result = self._again(expected)
        else:
            result = func(*self._fakes.of(args), **self._fakes.of(kwargs or {}))
        if self._layer is None:
            return result
        self._lines.append(_Call(line, result if self._can_be_expected(result) else _UNKNOWN))
        for place, tensor in enumerate(_entries(result)):
            if isinstance(tensor, Tensor) and id(tensor) not in self._names:
                self._name(tensor, "made", len(self._lines), place)
        return result

    def _expects(self, line: Hashable) -> Any:
        """Return what the same call gave in the similar layer; once one differs, nothing is expected any more."""
        place = len(self._lines)
        if place < len(self._expected) and self._expected[place].line == line:
            return self._expected[place].result
        self._expected = []
        return _UNKNOWN

    def _can_be_expected(self, result: Any) -> bool:
        """Whether a result is plain, or tensors that nobody has seen before.

        Without one, a function was called for what it changes.
        """
        if isinstance(result, Tensor) or type(result) in (tuple, list):
            return all(
                stands_for_plain(entry) and not entry.requires_grad and id(entry) not in self._names
                for entry in _entries(result)
            )
        return result is not None and (type(result) is torch.Size or is_plain(result))

    def _again(self, result: Any) -> Any:
        if isinstance(result, Tensor):
            return self._fakes.another(result)
        return type(result)(map(self._again, result)) if type(result) in (tuple, list) else result

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


def _entries(result: Any) -> Sequence[Any]:
    """Return what a function gave one by one."""
    return result if isinstance(result, (tuple, list)) else [result]
