"""Signatures of methods that ``generate`` asks for several times a call, and that ``inspect`` makes anew each time."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


class MethodSignature(inspect.Signature):
    """A method's signature, which keeps what is left of it when the method is bound."""

    @classmethod
    def of(cls, method: Callable[..., Any]) -> MethodSignature:
        """Return that of a method as its class has it, to be set as ``__signature__``."""
        own = inspect.signature(method)
        signature = cls(list(own.parameters.values()), return_annotation=own.return_annotation)
        signature._rest = tuple(own.parameters.values())[1:]
        signature._bound = own.replace(parameters=signature._rest)
        return signature

    _rest: tuple[inspect.Parameter, ...] | None = None
    _bound: inspect.Signature

    def replace(self, **changes: Any) -> inspect.Signature:  # type: ignore[override]
        """Return a signature with changes; ``inspect`` asks for one without the first parameter."""
        if changes.keys() == {"parameters"} and changes["parameters"] == self._rest:
            return self._bound
        return inspect.Signature(list(self.parameters.values()), return_annotation=self.return_annotation).replace(
            **changes
        )
