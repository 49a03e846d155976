"""Restores a model's attributes after a trial run of its forward, which may write to anything it can reach."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_CONTAINERS = (dict, list, set)


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore attributes, containers and tensors of all modules afterwards, but not parameters."""
    tensors = _tensors(model)
    with attributes_restored(model):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in tensors:
                    tensor.copy_(value)


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Restore attributes and containers of all modules afterwards; what was written into tensors stays.

    Enough for fake tensors, which have no values; it takes as long as the model has modules.
    """
    saved = [(module, dict(module.__dict__), _contents(module)) for module in model.modules()]
    try:
        yield
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
    return {name: value.copy() for name, value in module.__dict__.items() if isinstance(value, _CONTAINERS)}


def _tensors(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors in attributes and containers, each with a copy; parameters are too big, and never written."""
    found: dict[int, Tensor] = {}
    for module in model.modules():
        for value in module.__dict__.values():
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, set)) else [value]
            for entry in inner:
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
