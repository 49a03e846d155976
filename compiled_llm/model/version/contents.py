"""Contents of a model that a change of an attribute does not show: entries of containers, and values of tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from compiled_llm.compat.huggingface import WRITTEN_BY_GENERATE
from compiled_llm.compat.torch.tensors import versions_of
from compiled_llm.model.version.module_state import names_read
from compiled_llm.model.version.module_tree import same
from compiled_llm.model.version.tensors import tensors_in_dataclass, tensors_inside

Part = dict[Any, Any] | Collection[Any] | Callable[[], Any]
"""A part of a value through which others are read: its entries, or what a call returns."""

LISTS = (list, tuple, set, frozenset, deque)
MOST_ENTRIES = 10_000  # entries that one of them may have: a list of a million would take longer to compare than a step


def containers(value: object) -> Iterator[Part]:
    """Yield a value if it is a container, or the attributes of a config."""
    if isinstance(value, PretrainedConfig):
        yield vars(value)
    elif isinstance(value, (dict, *LISTS)) and len(value) <= MOST_ENTRIES:
        yield value


class Contents:
    """The entries of containers (dictionaries, lists, sets, configs) and those inside them, with tensors' writes."""

    # PEFT keeps the scales of adapters in such containers.

    def __init__(
        self,
        values: Iterable[Any],
        parts_of: Callable[[Any], Iterable[Part]] = containers,
        outside: Iterable[object] = (),
    ) -> None:
        """Remember what is found from ``values`` on, by what ``parts_of`` opens; ``outside`` is compared elsewhere."""
        self._dicts: list[dict[Any, Any]] = []
        self._lists: list[Collection[Any]] = []
        self._calls: list[Callable[[], Any]] = []
        self.tensors = self._find(values, parts_of, outside)  # those that were found, each once
        self._counting = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self._known = self._now()
        self._versions = self._versions_now()

    @classmethod
    def in_modules(cls, modules: Sequence[nn.Module]) -> Contents:
        """Return those of the attributes of modules, and their tensors."""
        names = ((vars(module), name) for module in modules for name in names_read(module))
        held = (attributes[name] for attributes, name in names if name not in WRITTEN_BY_GENERATE)
        registered = (held.values() for module in modules for held in (module._parameters, module._buffers))
        return cls(chain(held, *registered))

    def valid(self) -> bool:
        """Whether containers hold the same objects, and no tensor was written to."""
        return self._versions == self._versions_now() and self.same_objects()

    def same_objects(self) -> bool:
        """Whether containers hold the same objects."""
        return same(self._known, self._now())

    def _find(
        self, values: Iterable[Any], parts_of: Callable[[Any], Iterable[Part]], outside: Iterable[object]
    ) -> list[Tensor]:
        """Find what is to be compared; return the tensors in it."""
        left, tensors = list(values), list[Tensor]()
        seen = {id(value): value for value in outside}  # held, so that no other object gets the id of one
        while left:
            value = left.pop()
            if id(value) in seen:
                continue
            if isinstance(value, Tensor):
                seen[id(value)] = value
                tensors.append(value)
                left += tensors_inside(value)
                continue
            left += tensors_in_dataclass(value)
            for part in parts_of(value):
                seen[id(value)] = value
                left += self._remember(part)
        return tensors

    def _remember(self, part: Part) -> Iterable[Any]:
        """Compare a part from now on; return what is inside it."""
        if isinstance(part, dict):
            self._dicts.append(part)
            return dict.values(part)
        if isinstance(part, LISTS):
            self._lists.append(part)
            return part
        assert callable(part), "it is no collection"
        self._calls.append(part)
        return (part(),)

    def _now(self) -> list[Any]:
        entries = chain(self._dicts, map(dict.values, self._dicts), self._lists)
        return [*chain.from_iterable(entries), *(call() for call in self._calls)]

    def _versions_now(self) -> list[int]:
        return versions_of(self._counting)
