"""Arguments that differ from call to call, compared whole, as there are hundreds of values; Dynamo would guard them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, compress, zip_longest
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.compilation.kept.paths import PER_CALL, Path

_KIND = attrgetter("dtype", "device", "requires_grad")
_PLAIN = (bool, int, str, type(None), torch.dtype, torch.device, torch._ops.OpOverload)


class UnknownError(ValueError):
    """An argument holds something that cannot be compared in another process; the message is its type."""


class _Level(NamedTuple):
    """Values that lie equally deep in arguments; the entries of those that hold others are the next level."""

    types: list[type]
    holding: list[bool]
    lengths: list[int]  # of those that hold others
    plain: list[bool]
    values: list[Any]  # of those that are plain
    tensors: list[bool]


class Alike:
    """Arguments that differ from call to call, described by those of one call: others are alike but for sizes, or not.

    Attributes:
        paths: where tensors lie, in the order of ``tensors``.
        form: the description in words, the same in each process.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """UnknownError if ``arguments`` hold something that cannot be described."""
        self.paths: list[Path] = []
        self.form: list[str] = []
        self._levels: list[_Level] = []
        level: list[tuple[Path, Any]] = [((name,), arguments[name]) for name in PER_CALL]
        while level:
            self._levels.append(_described([value for _, value in level]))
            self.form += (_in_words(value) for _, value in level)
            self.paths += (path for path, value in level if isinstance(value, Tensor))
            level = [((*path, name), entry) for path, value in level for name, entry in _entries(value)]
        found = self._found(arguments)
        assert found is not None, "they are like themselves"
        self._known = _kinds(found)
        self.form.append(f"equal ones of {self._known[-1]}")

    def tensors(self, arguments: Mapping[str, Any]) -> list[Tensor] | None:
        """Return the tensors in arguments that are alike; None if these are not."""
        found = self._found(arguments)
        return None if found is None or _kinds(found) != self._known else found

    def _found(self, arguments: Mapping[str, Any]) -> list[Tensor] | None:
        level: list[Any] = [arguments[name] for name in PER_CALL]
        found = list[Tensor]()
        for known in self._levels:
            if [*map(type, level)] != known.types or [*compress(level, known.plain)] != known.values:
                return None
            holding = [*compress(level, known.holding)]
            if [*map(len, holding)] != known.lengths:
                return None
            found += compress(level, known.tensors)
            level = [*chain.from_iterable(holding)]
        return found


def form_differs(form: Sequence[str], kept: Sequence[str]) -> str:
    """Return in words how arguments differ from those of a kept program."""
    pairs = zip_longest(form, kept, fillvalue="nothing")
    return next(f"an argument is {now}, and was {then}" for now, then in pairs if now != then)


def _described(level: Sequence[Any]) -> _Level:
    holding = [isinstance(value, (tuple, list)) for value in level]
    tensors = [isinstance(value, Tensor) for value in level]
    plain = [not (holds or is_tensor) for holds, is_tensor in zip(holding, tensors, strict=True)]
    lengths = [*map(len, compress(level, holding))]
    return _Level([*map(type, level)], holding, lengths, plain, [*compress(level, plain)], tensors)


def _in_words(value: object) -> str:
    kind = type(value)
    if isinstance(value, Tensor):
        return f"a {kind.__name__}, {value.dtype} {value.device} {value.dim()} {value.requires_grad}"
    if isinstance(value, (tuple, list)):
        return f"{kind.__module__}.{kind.__qualname__} {len(value)}"
    if isinstance(value, _PLAIN):
        return repr(value)
    raise UnknownError(f"{kind.__module__}.{kind.__qualname__}")


def _entries(value: object) -> Sequence[tuple[str | int, Any]]:
    if not isinstance(value, (tuple, list)):
        return ()
    return [*zip(getattr(value, "_fields", range(len(value))), value, strict=True)]


def _kinds(tensors: Sequence[Tensor]) -> tuple[list[Any], list[int], list[int]]:
    """Return types, devices and dimensions of tensors, and which ones are the same."""
    return [*map(_KIND, tensors)], [*map(Tensor.dim, tensors)], equal_ones([*map(id, tensors)])


def equal_ones(numbers: Sequence[int | None]) -> list[int]:
    """Return for each number the last place where it stands: the same wherever the same places have equal numbers."""
    last = dict(zip(numbers, range(len(numbers)), strict=True))
    return [*map(last.__getitem__, numbers)]
