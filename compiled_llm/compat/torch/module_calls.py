"""Tells when one module is called, in the way in which ``module.compile()`` replaces its call."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn


class _Noted:
    """A forward that calls a function, then the module. It keeps neither alive."""

    def __init__(self, module: nn.Module, note: Callable[[], object]) -> None:
        self._module = weakref.ref(module)
        self._note = weakref.WeakMethod(note)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, *args: object, **kwargs: object) -> object:
        if (note := self._note()) is not None:
            note()
        module = self._module()
        assert module is not None, "it is called by the module"
        return module._call_impl(*args, **kwargs)


def note_calls(module: nn.Module, note: Callable[[], object]) -> None:
    """Call ``note``, a bound method, before each call of a module, until ``stop_noting`` or ``module.compile()``."""
    # Programs that Dynamo traces do not: it goes from a module to its forward. Copies and pickles do not have it, and a
    # module that is compiled in place already stays as it is.
    if vars(module).get("_compiled_call_impl") is None:
        vars(module)["_compiled_call_impl"] = _Noted(module, note)


def stop_noting(module: nn.Module) -> None:
    """Undo ``note_calls``."""
    if isinstance(vars(module).get("_compiled_call_impl"), _Noted):
        del vars(module)["_compiled_call_impl"]
