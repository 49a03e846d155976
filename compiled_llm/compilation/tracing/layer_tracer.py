"""Runs a model on fake tensors, and notes each layer's calls."""

# A function takes a tenth of a millisecond and more on fake tensors, and a layer calls a hundred. So a layer with
# modules like those of an earlier one gets that one's results, as long as it calls the same functions on the same
# things. Functions that return an existing tensor, or None, do run.

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from compiled_llm.compat.torch.tensors import Fakes, stands_for_plain
from compiled_llm.compilation.tracing.layer_description import is_plain, layout, plain
from compiled_llm.model.attention import BATCH_ARGUMENT


class NoOutlineError(Exception):
    """The model must be traced whole; the message says why."""


@functools.cache
def traced_class(kind: Any) -> Any:
    """Return a subclass of a layer's class that reports its calls to its ``_tracer``."""

    def forward(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        original = functools.partial(kind.forward, self)
        tracer: LayerTracer = self._tracer
        return tracer.trace(self._number, original, hidden, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward})


class _TracedCall(NamedTuple):
    """A function call of a layer."""

    line: Hashable  # the function and its arguments, described
    result: Any  # reused if another layer makes the same call: plain, or new tensors


_UNKNOWN = object()  # in place of a result


class LayerTracer(TorchFunctionMode):
    """A record of the calls of a model's layers in one run."""

    def __init__(self, tensors: Sequence[Sequence[Tensor]], similar: Sequence[int], fakes: Fakes) -> None:
        super().__init__()
        self._fakes = fakes
        self._similar = similar
        self._called: list[list[_TracedCall]] = []  # by the layers so far; at the end of each, what it gave
        self._kept: list[object] = [tensors]  # so that no id is used twice
        self._names: dict[int, tuple[int | None, str, tuple[int, ...]]] = {}  # by id: layer, role, number
        # what each layer returns in a tuple with its output, each entry None; None if it returns that alone
        self.beside: list[tuple[None, ...] | None] = []
        self._layer: int | None = None
        self._lines: list[_TracedCall] = []
        self._expected: list[_TracedCall] = []
        for layer, own in enumerate(tensors):
            for number, tensor in enumerate(own):
                self._names[id(tensor)] = layer, "own", (number,)

    @property
    def calls(self) -> list[Hashable]:
        """For each layer its function calls, with their arguments and results."""
        return [tuple(call.line for call in lines) for lines in self._called]

    def trace(
        self, layer: int, original: Callable[..., Any], hidden: Tensor, *args: object, **kwargs: object
    ) -> object:
        """Run a layer's ``original`` forward and note its calls; NoOutlineError if its turn or output is unexpected."""
        if layer != len(self._called) or self._layer is not None:
            raise NoOutlineError("layers are not called one after the other")
        self._layer, self._lines = layer, []
        self._expected = self._called[self._similar[layer]] if self._similar[layer] < layer else []
        self._name(hidden, "hidden")
        others = {name: value for name, value in kwargs.items() if name != BATCH_ARGUMENT}
        given = layout(hidden), self._describe(args), self._describe(others), id(kwargs.get(BATCH_ARGUMENT))
        self._expects(given)
        self._lines.append(_TracedCall(given, _UNKNOWN))
        returned = original(hidden, *args, **kwargs)
        out, beside = (returned[0], returned[1:]) if type(returned) is tuple else (returned, None)
        if (
            not isinstance(out, Tensor)
            or layout(out) != layout(hidden)
            or any(entry is not None for entry in beside or ())
        ):
            raise NoOutlineError("a layer gives something else than it takes")
        self.beside.append(beside)
        self._lines.append(_TracedCall(self._describe(out), _UNKNOWN))
        self._called.append(self._lines)
        self._names.pop(id(out))
        self._layer = None
        return returned

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        line = func, self._describe(args), self._describe(kwargs)
        expected = _UNKNOWN if self._layer is None else self._expects(line)
        if expected is not _UNKNOWN:
            result = self._again(expected)
        else:
            result = func(*self._fakes.of(args), **self._fakes.of(kwargs or {}))
        if self._layer is None:
            return result
        self._lines.append(_TracedCall(line, result if self._can_be_expected(result) else _UNKNOWN))
        for place, tensor in enumerate(_entries(result)):
            if isinstance(tensor, Tensor) and id(tensor) not in self._names:
                self._name(tensor, "made", len(self._lines), place)
        return result

    def _expects(self, line: Hashable) -> object:
        """Return the result of the same call in the similar layer; once a call differs, no more are reused."""
        place = len(self._lines)
        if place < len(self._expected) and self._expected[place].line == line:
            return self._expected[place].result
        self._expected = []
        return _UNKNOWN

    def _can_be_expected(self, result: object) -> bool:
        """Whether a result is plain, or new tensors; a function without one was called for its side effects."""
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

    def _describe(self, value: object) -> Hashable:
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


def _entries(result: object) -> Sequence[Any]:
    return result if isinstance(result, (tuple, list)) else [result]
