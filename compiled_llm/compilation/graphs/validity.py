"""Whether a CUDA graph may still be replayed: a replay would not notice that the model has changed.

Two things are checked. ``Guards`` are Dynamo's own, about all assumptions of the compiled program (attributes, hooks,
grad mode, sizes and types of tensors). They say nothing about *which* tensors there are, since a compiled program takes
any that fit: ``Weights`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn

from compiled_llm.compat.huggingface import WRITTEN_BY_GENERATE
from compiled_llm.compat.torch.dynamo import guards_for
from compiled_llm.model.modules import Children, holders, same


class Guards:
    """Dynamo's guards of a compiled function, for the arguments that it was captured with."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        rebuild: Callable[[int | None], dict[str, Any]] = lambda glance: {},
        called_with: dict[str, Any] | None = None,
    ) -> None:
        """``find`` looks for the guards.

        Args:
            function: made by ``own_copy``, and called with the arguments before.
            arguments: by name.
            rebuild: returns those that are made again for each check, given its ``glance``.
            called_with: those of the call that is captured, if they are made already.
        """
        self._function = function
        self._arguments = arguments
        self._rebuild = rebuild
        self._called_with = called_with
        self._check: Callable[[dict[str, Any]], bool] | None = None

    def find(self) -> None:
        """Find the code compiled for the arguments, right before a call with them is captured; any thread may.

        RuntimeError if there is none: the call would compile.
        """
        arguments, self._called_with = self._called_with or self._arguments | self._rebuild(None), None
        self._check = guards_for(self._function, arguments)

    def valid(self, glance: int | None = None) -> bool:
        """Whether a call would run the same compiled code as before.

        ``glance`` numbers a period in which no thread can change the model. Checks that several guards share are then
        made once; None makes all of them.
        """
        assert self._check is not None, "found before"
        return bool(self._check(self._arguments | self._rebuild(glance)))


class Weights:
    """The tensors of a model and their addresses."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._children = Children(modules)
        held = [(vars(module), name) for module in modules for name in holders(module)]
        self._owners, self._names = [owner for owner, _ in held], [name for _, name in held]
        self._held = [owner[name] for owner, name in held]
        self._tensors: list[dict[str, Any]] = [
            tensors for module in modules for tensors in (module._parameters, module._buffers) if tensors
        ]
        self._loose = [(vars(module), name) for module in modules for name in _attributes_with_tensors(module)]
        self._known_tensors = self._tensors_now()
        self._existing = [tensor for tensor in self._known_tensors if tensor is not None]
        self._addresses = self._addresses_now()

    def valid(self) -> bool:
        """Whether all modules, parameters, buffers and tensors in attributes are the same, at the same addresses."""
        return (
            all(map(is_, self._held, map(dict.get, self._owners, self._names)))
            and self._children.valid()
            and same(self._known_tensors, self._tensors_now())
            and self._addresses == self._addresses_now()
        )

    def _tensors_now(self) -> list[Tensor | None]:
        registered = chain.from_iterable(map(dict.values, self._tensors))
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
