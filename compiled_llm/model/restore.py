"""Restores a model's attributes after a trial run of its forward, which may write to anything it can reach."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

_CONTAINERS = (dict, list, set)
_Saved = tuple[nn.Module, dict[str, Any], dict[str, Any]]
"""A module, its attributes, and what those of them held that are containers."""


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore attributes, containers and tensors of all modules afterwards, but not parameters."""
    with attributes_restored(model) as saved:
        tensors = _tensors(saved)
        try:
            yield
        finally:
            for tensor, value in tensors:
                # A forward under inference mode leaves tensors that may be written to under it alone.
                with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
                    tensor.copy_(value)


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[list[_Saved]]:
    """Restore attributes and containers of all modules afterwards; what was written into tensors stays."""
    # Enough for fake tensors, which have no values; it takes as long as the model has modules.
    saved = [(module, dict(module.__dict__), _contents(module)) for module in model.modules()]
    try:
        yield saved
    finally:
        for module, attributes, contents in saved:
            _restore(module.__dict__, attributes)
            for name, content in contents.items():
                _restore(attributes[name], content)


@contextmanager
def data_restored(model: nn.Module) -> Iterator[None]:
    own = [(tensor, tensor.data, tensor.device) for tensor in (*model.parameters(), *model.buffers())]
    try:
        yield
    finally:
        for tensor, data, device in own:
            if tensor.device != device:
                tensor.data = data


def _contents(module: nn.Module) -> dict[str, Any]:
    """Return copies of a module's containers: of most modules nearly all are empty, and those share one."""
    containers = ((name, value) for name, value in module.__dict__.items() if isinstance(value, _CONTAINERS))
    return {name: value.copy() if value else () for name, value in containers}


def _tensors(saved: Iterable[_Saved]) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors in attributes and containers, each with a copy; parameters are too big, and never written."""
    found: dict[int, Tensor] = {}
    for _, attributes, contents in saved:
        full = (content.values() if isinstance(content, dict) else content for content in contents.values() if content)
        for entry in chain(attributes.values(), *full):
            if isinstance(entry, Tensor) and not isinstance(entry, nn.Parameter):
                found[id(entry)] = entry
    return [(tensor, tensor.detach().clone()) for tensor in found.values()]


def _restore(container: Any, content: Any) -> None:
    """Restore a container's entries; an unchanged one is left alone, since other threads may be reading it."""
    if not (container or content) or _entries(container) == _entries(content):
        return
    if isinstance(container, list):
        container[:] = content
    elif isinstance(container, (dict, set)):
        container.clear()
        container.update(content)


def _entries(container: Any) -> list[Any]:
    """Return the identities of a container's entries, in order."""
    if isinstance(container, dict):
        return [*container, *map(id, container.values())]
    return list(map(id, container))
