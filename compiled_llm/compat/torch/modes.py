"""Detects modes, transforms, tracing and global hooks of the caller that see or change operations or modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.nn.modules import module as modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle


def inside_torch_modes() -> bool:
    """Return whether this thread is inside modes that a graph would bake in, such as ``with torch.device(...)``."""
    inside: bool = torch._C._len_torch_function_stack() > 0 or torch._C._len_torch_dispatch_stack() > 0
    return inside


def observer_of_operations() -> str | None:
    """Return the name of an observer of each operation of this thread, which would miss a graph's; or None."""
    # That is a mode of the caller's (``FlopCounterMode``), a transform of ``torch.func``, a forward derivative or
    # ``torch.jit.trace``. A default device has no effect in a graph, whose tensors all name theirs.
    modes = _dispatch_modes() or _function_modes()
    if modes:
        return modes[-1].lstrip("_")
    if peek_interpreter_stack() is not None:
        return "torch.func"
    if forward_ad._current_level >= 0:
        return "torch.autograd.forward_ad"
    return "torch.jit.trace" if torch._C._get_tracing_state() is not None else None


def _dispatch_modes() -> list[str]:
    if not torch._C._len_torch_dispatch_stack():
        return []
    return [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]


def _function_modes() -> list[str]:
    if not torch._C._len_torch_function_stack():
        return []
    return [type(mode).__name__ for mode in _get_current_function_mode_stack() if type(mode) is not DeviceContext]


class OperationsNoted(TorchDispatchMode):
    """The operations of a block, each with the type of its result; casts are operations, too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[object, torch.dtype | None]] = []  # in order

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = MappingProxyType({}),
    ) -> object:
        """Run an operation and note it."""
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, result.dtype if isinstance(result, Tensor) else None))
        return result


def hooks_on_all_modules() -> bool:
    """Return whether hooks are on all modules of the process, those for gradients included."""
    forward = modules._global_forward_hooks or modules._global_forward_pre_hooks
    return bool(forward or modules._global_backward_hooks or modules._global_backward_pre_hooks)


def hooks_registered() -> int:
    """Return how many hooks this process has registered so far, of modules and tensors."""
    return RemovableHandle.next_id


def cuda_is_lost() -> bool:
    """Whether this process was forked from one that had used CUDA: it can never use it."""
    return torch.cuda._is_in_bad_fork()
