"""Some modules of a model: which there are, and what their code may read of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import nn

from compiled_llm.model.modules import Children, holders, same

# The last one says whether HuggingFace has initialized a module's weights; no forward reads it.
_OF_EVERY_MODULE = (frozenset(vars(nn.Module())) - {"training"}) | {"_is_hf_initialized"}
_UNREAD_BY_LINEAR = frozenset({"training", "in_features", "out_features"})


class ModuleState:
    """Modules, remembered as they are now: the modules inside them, their attributes, and the order of their tensors.

    A root beside them is remembered by its attributes alone, so that nothing here keeps a model alive.
    """

    def __init__(self, modules: Sequence[nn.Module], root: nn.Module | None = None) -> None:
        self.modules = modules
        everything = [*modules] if root is None else [root, *modules]
        self._children = Children(everything)
        self._attributes = [vars(module) for module in everything]
        held = [(vars(module), name) for module in everything for name in holders(module)]
        self._holders, self._holder_names = [owner for owner, _ in held], [name for _, name in held]
        self._known_holders = self._holders_now()
        # Where there was no tensor, Dynamo notices the first: it guards how many a layer has.
        self._tensors = [tensors for owner, name in held if name != "_modules" and (tensors := owner[name])]
        read = [(vars(module), name) for module in everything for name in names_read(module)]
        self._owners, self._names = [owner for owner, _ in read], [name for _, name in read]
        self._known, self._tensor_names = self._now(), self._tensor_names_now()

    def has_its_modules(self) -> bool:
        """Whether the modules hold the same modules, and their tensors in the same dictionaries."""
        return self._children.valid() and same(self._known_holders, self._holders_now())

    def has_its_attributes(self) -> bool:
        """Whether the attributes are the same objects; the modules have been compared.

        Tensors are told apart by their order, so their names count.
        """
        return same(self._known, self._now()) and self._tensor_names == self._tensor_names_now()

    def valid(self) -> bool:
        """Whether both are as they were."""
        return self.has_its_modules() and self.has_its_attributes()

    def _holders_now(self) -> list[Any]:
        return list(map(dict.get, self._holders, self._holder_names))

    def _now(self) -> list[Any]:
        values = map(dict.get, self._owners, self._names)
        return [*map(type, self.modules), *map(vars, self.modules), *map(len, self._attributes), *values]

    def _tensor_names_now(self) -> list[str]:
        return list(chain.from_iterable(self._tensors))


def names_read(module: nn.Module) -> list[str]:
    """Return the names of the attributes that a module's code may read."""
    unread = _OF_EVERY_MODULE | _UNREAD_BY_LINEAR if type(module) is nn.Linear else _OF_EVERY_MODULE
    return [name for name in vars(module) if name not in unread]
