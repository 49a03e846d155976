"""What the code of some modules may read of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from operator import sub
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from compiled_llm.compat.huggingface import CAPTURING, LEFT_BY_TRAINERS
from compiled_llm.model.version.module_tree import same
from compiled_llm.model.version.training import CHECKPOINTING

_LATE = (CHECKPOINTING, "_gradient_checkpointing_func", CAPTURING, *LEFT_BY_TRAINERS)
"""Attributes that modules may get at any time, and from which nothing follows for us."""
# The last one says whether HuggingFace has initialized a module's weights; no forward reads it. From flags of training
# nothing follows in calls that our programs serve.
UNREAD = frozenset(vars(nn.Module())) | {*_LATE, "_is_hf_initialized"}
UNREAD_BY_LINEAR = frozenset({"in_features", "out_features"})
_HOLDERS = ("_modules", "_parameters", "_buffers")


class ModuleState:
    """The attributes of modules, and tensors' names and order; of a root attributes alone: no model is kept alive."""

    def __init__(self, modules: Sequence[nn.Module], root: nn.Module | None = None) -> None:
        self.modules = modules
        everything = [*modules] if root is None else [root, *modules]
        self._attributes = [vars(module) for module in everything if not _may_get_more(module)]
        self._growing = [vars(module) for module in everything if _may_get_more(module)]
        held = [(vars(module), name) for module in everything for name in _HOLDERS if vars(module)[name]]
        self._holders = [owner for owner, _ in held]
        self._holder_names = [name for _, name in held]
        self._known_holders = self._holders_now()
        # Where there was no tensor, Dynamo notices the first: it guards how many a layer has.
        self._tensors = [tensors for owner, name in held if name != "_modules" and (tensors := owner[name])]
        read = [(vars(module), name) for module in everything for name in names_read(module)]
        self._owners = [owner for owner, _ in read]
        self._names = [name for _, name in read]
        self._known = self._now()
        self._tensor_names = self._tensor_names_now()

    def has_its_dictionaries(self) -> bool:
        """Whether they hold modules and tensors in the same dictionaries."""
        return same(self._known_holders, self._holders_now())

    def has_its_attributes(self) -> bool:
        """Whether attributes are the same objects (dictionaries are compared); tensors' names count."""
        return same(self._known, self._now()) and self._tensor_names == self._tensor_names_now()

    def _holders_now(self) -> list[Any]:
        return list(map(dict.get, self._holders, self._holder_names))

    def _now(self) -> list[Any]:
        values = map(dict.get, self._owners, self._names)
        lengths = *map(len, self._attributes), *_read_lengths(self._growing)
        return [*map(type, self.modules), *map(vars, self.modules), *lengths, *values]

    def _tensor_names_now(self) -> list[str]:
        return list(chain.from_iterable(self._tensors))


def names_read(module: nn.Module) -> list[str]:
    """Return the names of the attributes that a module's code may read."""
    unread = UNREAD | UNREAD_BY_LINEAR if type(module) is nn.Linear else UNREAD
    return [name for name in vars(module) if name not in unread]


def _may_get_more(module: nn.Module) -> bool:
    return hasattr(module, CHECKPOINTING) or isinstance(module, PreTrainedModel)


def _read_lengths(modules: Sequence[dict[str, Any]]) -> Iterator[int]:
    """Return how many attributes each module has, without those that it may get at any time."""
    # Without a call of Python's for each module: they are counted before each call of a model.
    late = (map(dict.__contains__, modules, repeat(name)) for name in _LATE)
    return map(sub, map(len, modules), map(sum, zip(*late, strict=True)))
