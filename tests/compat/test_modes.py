"""Modes, transforms, tracing and hooks of the caller are noticed and have names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from compiled_llm.compat.torch import modes, tensors

pytestmark = pytest.mark.core


def test_a_process_that_was_not_forked_has_not_lost_cuda():
    assert modes.cuda_is_lost() is False


def test_modes_that_a_graph_would_bake_in_are_noticed():
    assert not modes.inside_torch_modes()
    with torch.device("cpu"):
        assert modes.inside_torch_modes()
    with tensors.fake_tensors():
        assert modes.inside_torch_modes()
    assert not modes.inside_torch_modes()


class Mode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("context", "name"),
    [
        (Mode, "Mode"),
        (lambda: FlopCounterMode(display=False), "FlopCounterMode"),
        (tensors.fake_tensors, "FakeTensorMode"),
        (torch.autograd.forward_ad.dual_level, "torch.autograd.forward_ad"),
        (lambda: torch.device("meta"), None),
        (torch.no_grad, None),
    ],
)
def test_what_sees_each_operation_has_a_name(context, name):
    assert modes.observer_of_operations() is None
    with torch.device("cpu"), context():
        assert modes.observer_of_operations() == name
    assert modes.observer_of_operations() is None


def test_transforms_and_tracing_have_a_name():
    seen = []

    def note(x: Tensor) -> Tensor:
        seen.append(modes.observer_of_operations())
        return x * 2

    torch.func.vmap(note)(torch.zeros(2))
    torch.func.grad(lambda x: note(x).sum())(torch.zeros(2))
    torch.jit.trace(note, torch.zeros(2), check_trace=False)
    assert seen == ["torch.func", "torch.func", "torch.jit.trace"]


def test_hooks_on_all_modules_are_noticed():
    assert not modes.hooks_on_all_modules()
    for register in (register_module_forward_hook, register_module_forward_pre_hook):
        handle = register(lambda *_: None)
        assert modes.hooks_on_all_modules()
        handle.remove()
        assert not modes.hooks_on_all_modules()
