"""The tensors of a model: which there are, and where."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from compiled_llm.compat.huggingface import WRITTEN_BY_GENERATE
from compiled_llm.compat.torch.tensors import addresses_of, wrapped_in
from compiled_llm.model.version.module_tree import same

_PLAIN = (Tensor, nn.Parameter)


class Tensors:
    """The parameters, buffers and tensors in attributes of modules, remembered with their addresses."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._registered: list[dict[str, Any]] = [
            tensors for module in modules for tensors in (module._parameters, module._buffers) if tensors
        ]
        self._known = self._now()
        self._inside = _Inside(modules, self._known)
        self._existing = [tensor for tensor in (*self._known, *self._inside.known) if tensor is not None]
        self._addresses = addresses_of(self._existing)

    def valid(self) -> bool:
        """Whether they are the same, at the same addresses; the modules and their dictionaries have been compared."""
        same_objects = same(self._known, self._now()) and self._inside.valid()
        return same_objects and self._addresses == addresses_of(self._existing)

    def _now(self) -> list[Tensor | None]:
        return [*chain.from_iterable(map(dict.values, self._registered))]


class _Inside:
    """The tensors in attributes of modules, and those inside weights of other libraries.

    Attributes:
        known: all of them, each as often as it was found.
    """

    # A model of 8B has thousands, and each call asks. So what their holders have is compared first, object by object:
    # to look for the tensors among it takes milliseconds.

    def __init__(self, modules: Iterable[nn.Module], registered: Iterable[Tensor | None]) -> None:
        """Remember what is in modules, and in the tensors that they have ``registered``."""
        self._loose = [(vars(module), name) for module in modules for name in _attributes_with_tensors(module)]
        self._made_of_others = [tensor for tensor in registered if tensor is not None and type(tensor) not in _PLAIN]
        self.known = self._found()
        self._remember()

    def valid(self) -> bool:
        """Whether they are the same; those that are registered have been compared."""
        if self._complete and same(self._held, self._held_now()):
            return True
        if not same(self.known, self._found()):
            return False
        self._remember()  # attributes beside the tensors are others
        return True

    def _found(self) -> list[Tensor]:
        loose = (found for attributes, name in self._loose for found in _tensors_in(attributes.get(name)))
        return [*loose, *chain.from_iterable(map(tensors_inside, self._made_of_others))]

    def _remember(self) -> None:
        self._holders = [*chain.from_iterable(map(_holders_in, self._made_of_others))]
        self._held = self._held_now()
        self._complete = {*map(id, self.known)} <= {*map(id, self._held)}

    def _held_now(self) -> list[Any]:
        """Return all that is where the tensors were found."""
        loose = (entry for attributes, name in self._loose for entry in _entries_of(attributes.get(name)))
        attributes: list[Any] = [*map(vars, self._holders)]  # which torch.utils.swap_tensors exchanges
        return [*loose, *attributes, *chain.from_iterable(map(dict.values, attributes))]


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
    yield from (entry for entry in _entries_of(value) if isinstance(entry, Tensor))


def _entries_of(value: Any) -> Iterable[Any]:
    if type(value) in (list, tuple):
        return value  # type: ignore[no-any-return]
    if type(value) is dict:
        return value.values()
    return (value, *vars(value).values()) if _is_dataclass_object(value) else (value,)


def tensors_in_dataclass(value: object) -> Iterator[Tensor]:
    """Yield the tensors in the fields of a dataclass, in which modules of bitsandbytes keep scales."""
    if _is_dataclass_object(value):
        yield from (entry for entry in vars(value).values() if isinstance(entry, Tensor))


def _is_dataclass_object(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def tensors_inside(tensor: Tensor | None) -> Iterator[Tensor]:
    """Yield the tensors that a weight of another library is made of, or that it has beside its numbers."""
    if tensor is None or type(tensor) in _PLAIN:
        return
    if (wrapped := wrapped_in(tensor)) is not None:
        for inner in wrapped[0].values():
            yield inner
            yield from tensors_inside(inner)
        return
    attributes = chain.from_iterable(vars(holder).values() for holder in _holders_in(tensor))
    yield from (value for value in attributes if isinstance(value, Tensor) and value is not tensor)


def _holders_in(tensor: Tensor) -> Iterator[object]:
    """Yield the objects in whose attributes are the tensors that ``tensors_inside`` yields, if they are in any."""
    if type(tensor) in _PLAIN:
        return
    yield tensor
    if (wrapped := wrapped_in(tensor)) is not None:
        yield from chain.from_iterable(map(_holders_in, wrapped[0].values()))
    elif (state := getattr(tensor, "quant_state", None)) is not None:  # of bitsandbytes: scales, and those of these
        yield state
        if (nested := getattr(state, "state2", None)) is not None:
            yield nested
