"""Cached signatures of methods: ``generate`` reads them several times a call, and ``inspect`` is slow."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


class MethodSignature(inspect.Signature):
    """A method's signature, which caches its bound form."""

    @classmethod
    def of(cls, method: Callable[..., Any]) -> MethodSignature:
        """Return the signature of a class's method, to be set as ``__signature__``."""
        whole = inspect.signature(method)
        signature = cls(list(whole.parameters.values()), return_annotation=whole.return_annotation)
        signature._rest = tuple(whole.parameters.values())[1:]
        signature._bound = whole.replace(parameters=signature._rest)
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
