"""Contents of modules' dictionaries, lists and configs: assigning to them does not change the modules' attributes.

PEFT keeps the scales of adapters in such containers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from compiled_llm.model.modules import same

_LISTS = (list, tuple, set, frozenset, deque)
_MOST = 10_000
"""Entries that one of them may have: a list of a million would take longer to compare than a step."""


class Contents:
    """The entries of dictionaries, lists, tuples, sets, deques and configs, and of those inside them."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.tensors: list[Tensor] = []
        self._dicts: list[dict[Any, Any]] = []
        self._lists: list[Collection[Any]] = []
        self._find(values)
        self._known = self._now()

    def valid(self) -> bool:
        """Whether they hold the same objects."""
        return same(self._known, self._now())

    def _find(self, values: Iterable[Any]) -> None:
        left, seen = list(values), set()
        while left:
            value = left.pop()
            if isinstance(value, PretrainedConfig):
                value = vars(value)
            if not isinstance(value, (Tensor, dict, *_LISTS)) or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                self.tensors.append(value)
            elif len(value) > _MOST:
                continue
            elif isinstance(value, dict):
                self._dicts.append(value)
                left += dict.values(value)
            else:
                self._lists.append(value)
                left += value

    def _now(self) -> list[Any]:
        return list(chain.from_iterable(chain(self._dicts, map(dict.values, self._dicts), self._lists)))
