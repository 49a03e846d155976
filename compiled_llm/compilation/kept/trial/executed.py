"""The code that a thread executes, each function once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

from torch.overrides import TorchFunctionMode

_IMPORTING = ("_find_and_load", "_handle_fromlist")
_OF_C = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)


class ExecutedCode:
    """The code that runs in this thread in the block.

    What is left out: imports, what runs as objects are dropped, and what functions of torch do with tensors, whose
    version says it.

    Attributes:
        codes: the code, each with the name of the module that it belongs to.
        whole: whether all of it was seen: not if somebody else watches this thread.
    """

    def __init__(self) -> None:
        self.codes: list[tuple[CodeType, str]] = []
        self.whole = False
        self._known: set[int] = set()  # their ids: to hash code takes longer than to run it
        self._imports = 0
        self._below, self._entered = _Below(self._note), ExitStack()

    def __enter__(self) -> ExecutedCode:
        self.whole = sys.gettrace() is None
        if self.whole:
            self._entered.enter_context(self._below)
            sys.settrace(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self.whole:
            self.whole = sys.gettrace() == self._note
            sys.settrace(None)
            self._entered.close()

    def _note(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if id(code) in self._known:
            return None
        if code.co_name in _IMPORTING and code.co_filename.startswith("<frozen importlib"):
            self._imports += 1
            return self._leave
        if not self._imports and code.co_name != "__del__":
            self._known.add(id(code))
            self.codes.append((code, str(frame.f_globals.get("__name__"))))
        return None

    def _leave(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "return":
            self._imports -= 1
        return self._leave


class _Below(TorchFunctionMode):
    """Watches nothing while torch computes: on tensors without values, that is most of what runs."""

    def __init__(self, watch: Callable[..., Any]) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_of_torch(func) or sys.gettrace() != self._watch:
            return func(*args, **(kwargs or {}))
        sys.settrace(None)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            sys.settrace(self._watch)


def _is_of_torch(function: Any) -> bool:
    """Whether a function is torch's, and no op, whose kernels may be anybody's."""
    if isinstance(function, FunctionType):
        return function.__module__.partition(".")[0] == "torch"
    return isinstance(function, _OF_C)
