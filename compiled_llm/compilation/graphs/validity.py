"""Whether a model is still what a CUDA graph was recorded from: a replay notices nothing by itself.

Two things are looked at. ``Guards`` are Dynamo's own, about everything that the compiled program takes for granted
(attributes, hooks, grad mode, sizes and types of tensors). They say nothing of *which* tensors there are, since a
compiled program takes any that fit: ``Weights`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn

from compiled_llm.compat import guards_for
from compiled_llm.model.modules import Children, same


class Guards:
    """Dynamo's guards of a compiled function, for the arguments that it was recorded with."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        anew: Callable[[int | None], dict[str, Any]] = lambda glance: {},
    ) -> None:
        """Find the compiled entry that serves these arguments.

        Args:
            function: made by ``own_copy``, and called with the arguments before.
            arguments: by name.
            anew: returns those that are made anew for each glance.
        """
        self._arguments = arguments
        self._anew = anew
        self._check = guards_for(function, arguments | anew(None))

    def hold(self, glance: int | None = None) -> bool:
        """Whether a call would run the same compiled code as before.

        Args:
            glance: a number for a while in which nobody can change the model, so that guards which look at the same
                parts of it need not do so one after the other.
        """
        return bool(self._check(self._arguments | self._anew(glance)))


class Weights:
    """The tensors of a model and where they lie."""

    def __init__(self, model: nn.Module) -> None:
        """Remember them."""
        modules = list(model.modules())
        self._children = Children(modules)
        self._tensors: list[dict[str, Any]] = [
            tensors for module in modules for tensors in (module._parameters, module._buffers) if tensors
        ]
        self._loose = [(vars(module), name) for module in modules for name in _attributes_with_tensors(module)]
        self._known_tensors = self._tensors_now()
        self._existing = [tensor for tensor in self._known_tensors if tensor is not None]
        self._addresses = self._addresses_now()

    def hold(self) -> bool:
        """Whether all modules, parameters, buffers and tensors in attributes are the same, at the same addresses."""
        return (
            self._children.hold()
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
    registered = ("_parameters", "_buffers")
    return [name for name, value in vars(module).items() if name not in registered and list(_tensors_in(value))]


def _tensors_in(value: object) -> Iterator[Tensor]:
    """Yield an attribute's tensor, or those in a list, tuple or dict."""
    entries = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
    for entry in entries:  # type: ignore[attr-defined]
        if isinstance(entry, Tensor):
            yield entry
