"""Where tensors lie in a program's arguments: names of attributes, and numbers of entries, from the outermost on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

Path = tuple[str | int, ...]

PER_CALL = ("inputs", "tables", "pages")
"""The arguments that differ from call to call; their kinds and layouts are compared in each."""


def look_up(arguments: Mapping[str, Any], path: Path) -> Any:
    """Return what lies there; AttributeError, LookupError or TypeError if nothing does."""
    value: Any = arguments[str(path[0])]
    for step in path[1:]:
        value = value[step] if isinstance(step, int) or isinstance(value, dict) else getattr(value, step)
    return value


def paths_of_tensors(arguments: Mapping[str, Any]) -> dict[int, Path]:
    """Return the path of each tensor, by its identity: those that differ from call to call, then the model's."""
    found: dict[int, Path] = {}
    for name in PER_CALL:
        for path, tensor in tensors_in(arguments[name], (name,)):
            found.setdefault(id(tensor), path)
    for number, spec in enumerate(arguments["specs"]):
        for place, scale in enumerate(spec.scales):
            if isinstance(scale, Tensor):
                found.setdefault(id(scale), ("specs", number, "scales", place))
    for path, tensor in tensors_of_model(arguments["model"]):
        found.setdefault(id(tensor), path)
    return found


def tensors_in(value: object, path: Path) -> Iterator[tuple[Path, Tensor]]:
    """Yield tensors in named tuples, tuples and lists."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", range(len(value)))
        for name, entry in zip(names, value, strict=True):
            yield from tensors_in(entry, (*path, name))


def tensors_of_model(model: nn.Module) -> Iterator[tuple[Path, Tensor]]:
    """Yield a model's parameters, buffers and tensors in attributes; one that has several names, for each."""
    for name, module in model.named_modules(remove_duplicate=False):
        place: Path = ("model", *filter(None, name.split(".")))
        for held in (module._parameters, module._buffers, vars(module)):
            for own, tensor in held.items():
                if isinstance(tensor, Tensor):
                    yield (*place, own), tensor
