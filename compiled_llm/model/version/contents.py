"""Contents of a model that a change of an attribute does not show: entries of containers, and values of tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from compiled_llm.compat.huggingface import WRITTEN_BY_GENERATE
from compiled_llm.compat.torch.tensors import version_of
from compiled_llm.model.version.module_state import names_read
from compiled_llm.model.version.module_tree import same

_LISTS = (list, tuple, set, frozenset, deque)
_MOST = 10_000
"""Entries that one of them may have: a list of a million would take longer to compare than a step."""


class Contents:
    """The entries of dictionaries, lists, tuples, sets, deques and configs, and of those inside them.

    PEFT keeps the scales of adapters in such containers. And how often each tensor was written to: parameters, buffers,
    and those in attributes and containers.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._dicts: list[dict[Any, Any]] = []
        self._lists: list[Collection[Any]] = []
        self._tensors = [tensor for tensor in self._find(values) if not tensor.is_inference()]
        self._known, self._versions = self._now(), self._versions_now()

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> Contents:
        """Return those of the attributes of modules, and their tensors."""
        names = ((vars(module), name) for module in modules for name in names_read(module))
        held = (attributes[name] for attributes, name in names if name not in WRITTEN_BY_GENERATE)
        registered = (held.values() for module in modules for held in (module._parameters, module._buffers))
        return cls(chain(held, *registered))

    def valid(self) -> bool:
        """Whether containers hold the same objects, and no tensor was written to."""
        return self._versions == self._versions_now() and same(self._known, self._now())

    def _find(self, values: Iterable[Any]) -> list[Tensor]:
        """Find the containers; return the tensors in them."""
        left, seen, tensors = list(values), set(), list[Tensor]()
        while left:
            value = left.pop()
            if isinstance(value, PretrainedConfig):
                value = vars(value)
            if not isinstance(value, (Tensor, dict, *_LISTS)) or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                tensors.append(value)
            elif len(value) > _MOST:
                continue
            elif isinstance(value, dict):
                self._dicts.append(value)
                left += dict.values(value)
            else:
                self._lists.append(value)
                left += value
        return tensors

    def _now(self) -> list[Any]:
        return list(chain.from_iterable(chain(self._dicts, map(dict.values, self._dicts), self._lists)))

    def _versions_now(self) -> list[int]:
        return list(map(version_of, self._tensors))
