"""The tensors of a model: which there are, and where."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from compiled_llm.compat.huggingface import WRITTEN_BY_GENERATE
from compiled_llm.compat.torch.tensors import wrapped_in
from compiled_llm.model.version.module_tree import same

_PLAIN = (Tensor, nn.Parameter)


class Tensors:
    """The parameters, buffers and tensors in attributes of modules, remembered with their addresses."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._registered: list[dict[str, Any]] = [
            tensors for module in modules for tensors in (module._parameters, module._buffers) if tensors
        ]
        self._loose = [(vars(module), name) for module in modules for name in _attributes_with_tensors(module)]
        self._made_of_others = [
            (tensors, name)
            for tensors in self._registered
            for name, tensor in tensors.items()
            if tensor is not None and type(tensor) not in _PLAIN
        ]
        self._known = self._now()
        self._existing = [tensor for tensor in self._known if tensor is not None]
        self._addresses = self._addresses_now()

    def valid(self) -> bool:
        """Whether they are the same, at the same addresses; the modules and their dictionaries have been compared."""
        return same(self._known, self._now()) and self._addresses == self._addresses_now()

    def _now(self) -> list[Tensor | None]:
        registered = chain.from_iterable(map(dict.values, self._registered))
        return [
            *registered,
            *(found for attributes, name in self._loose for found in _tensors_in(attributes.get(name))),
            *(found for tensors, name in self._made_of_others for found in tensors_inside(tensors.get(name))),
        ]

    def _addresses_now(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._existing))


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield a module's own parameters and buffers, the tensors inside these, and those in its dataclasses."""
    for tensor in chain(module._parameters.values(), module._buffers.values()):
        if tensor is not None:
            yield tensor
            yield from tensors_inside(tensor)
    for value in vars(module).values():
        yield from tensors_in_dataclass(value)


def _attributes_with_tensors(module: nn.Module) -> list[str]:
    others = {"_parameters", "_buffers", *WRITTEN_BY_GENERATE}
    return [name for name, value in vars(module).items() if name not in others and list(_tensors_in(value))]


def _tensors_in(value: object) -> Iterator[Tensor]:
    """Yield an attribute if it is a tensor, or the tensors in it if it is a list, tuple, dict or dataclass."""
    for entry in _entries_of(value):
        if isinstance(entry, Tensor):
            yield entry


def _entries_of(value: Any) -> Iterable[Any]:
    if type(value) in (list, tuple):
        return value  # type: ignore[no-any-return]
    return value.values() if type(value) is dict else (value, *tensors_in_dataclass(value))


def tensors_in_dataclass(value: object) -> Iterator[Tensor]:
    """Yield the tensors in the fields of a dataclass, in which modules of bitsandbytes keep scales."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from (entry for entry in vars(value).values() if isinstance(entry, Tensor))


def tensors_inside(tensor: Tensor | None) -> Iterator[Tensor]:
    """Yield the tensors that a weight of another library is made of, or that it has beside its numbers."""
    if tensor is None or type(tensor) in _PLAIN:
        return
    if (wrapped := wrapped_in(tensor)) is not None:
        for inner in wrapped[0].values():
            yield inner
            yield from tensors_inside(inner)
        return
    attributes = [*vars(tensor).values()]
    if (state := getattr(tensor, "quant_state", None)) is not None:  # of bitsandbytes: scales, and those of these
        attributes += (*vars(state).values(), *vars(getattr(state, "state2", None) or _Nothing).values())
    yield from (value for value in attributes if isinstance(value, Tensor) and value is not tensor)


class _Nothing:
    """An object without tensors."""
