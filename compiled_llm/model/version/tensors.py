"""The tensors of a model: which there are, and where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from compiled_llm.compat.huggingface import WRITTEN_BY_GENERATE
from compiled_llm.model.version.module_tree import same


class Tensors:
    """The parameters, buffers and tensors in attributes of modules, remembered with their addresses."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._registered: list[dict[str, Any]] = [
            tensors for module in modules for tensors in (module._parameters, module._buffers) if tensors
        ]
        self._loose = [(vars(module), name) for module in modules for name in _attributes_with_tensors(module)]
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
        ]

    def _addresses_now(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._existing))


def _attributes_with_tensors(module: nn.Module) -> list[str]:
    others = {"_parameters", "_buffers", *WRITTEN_BY_GENERATE}
    return [name for name, value in vars(module).items() if name not in others and list(_tensors_in(value))]


def _tensors_in(value: object) -> Iterator[Tensor]:
    """Yield an attribute if it is a tensor, or the tensors in it if it is a list, tuple or dict."""
    entries = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
    for entry in entries:  # type: ignore[attr-defined]
        if isinstance(entry, Tensor):
            yield entry
