"""How mixtures of experts of transformers find the function that computes them; ``tests/compat/test_experts.py``.

``use_experts_implementation`` gives a class a ``forward`` that asks an ``ExpertsInterface`` for the function which the
config names. We register one, under a name of ours that no config names (``huggingface.implementations_read``). Private
are:

| part | for | without it | ends when |
| --- | --- | --- | --- |
| variables of that ``forward``: ``experts_interface``, ``original_forward`` | whether the name is known there, as it \
is not to quantised experts; the class's own loop | all experts are HuggingFace's | a layer tells its interface |
| ``_default_apply_gate`` | whether a gate is the plain one, which is fused | gates are not fused | it is public |
| a layer's ``has_gate``, ``has_bias``, ``is_transposed``, ``has_post_expert_norm`` (from 5.23), \
``_is_expert_parallel``, ``_apply_gate``, ``act_fn``, and its weights ``gate_up_proj``, ``up_proj``, ``down_proj`` | \
what it computes | its experts are HuggingFace's | they are documented |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from transformers import activations
from transformers.integrations import moe

from compiled_llm.compat.huggingface import experts_implementation

ExpertsForward = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
"""Takes a layer's experts, rows ``[T, H]``, the experts ``[T, k]`` that they chose, and the weights of these."""

_CLASSES: dict[type, str] = {
    activations.SiLUActivation: "silu",
    nn.SiLU: "silu",
    activations.GELUActivation: "gelu",
    activations.GELUTanh: "gelu_tanh",
    activations.NewGELUActivation: "gelu_tanh",
    nn.ReLU: "relu",
    activations.ReLUSquaredActivation: "relu2",
}
_FUNCTIONS: dict[object, str] = {
    nn.functional.silu: "silu",
    nn.functional.gelu: "gelu",
    nn.functional.relu: "relu",
}


def register(name: str, forward: ExpertsForward) -> None:
    """Let experts find a function by this name; those whose config names another one see no change."""
    moe.ExpertsInterface.register(name, forward)


def interface_of(layer: type[nn.Module]) -> moe.ExpertsInterface | None:
    """Return where experts of a class look for what computes them; None if the class has none."""
    forward: Any = inspect.getattr_static(layer, "forward", None)
    if not isinstance(forward, FunctionType) or "experts_interface" not in forward.__code__.co_freevars:
        return None
    found: moe.ExpertsInterface = inspect.getclosurevars(forward).nonlocals["experts_interface"]
    return found


def are_experts(module: nn.Module) -> bool:
    """Whether a module computes experts by HuggingFace's interface, or one of its kind."""
    return interface_of(type(module)) is not None


def knows(layer: type[nn.Module], name: str) -> bool:
    """Whether experts of a class find a function of this name; others raise KeyError."""
    interface = interface_of(layer)
    return interface is not None and name in interface


def own_forward(module: Any) -> ExpertsForward:
    """Return the function that HuggingFace computes a layer's experts by: the one that its config names."""
    name: Any = experts_implementation(module.config)
    forward: ExpertsForward = moe.ALL_EXPERTS_FUNCTIONS.get_interface(name, type(module).forward.__wrapped__)
    return forward


def gated(module: Any, projected: Tensor) -> Tensor:
    """Return ``[P, I]`` of what the first product of experts with a gate gives, ``[P, 2 * I]``."""
    out: Tensor = module._apply_gate(projected)
    return out


def has_plain_gate(module: Any) -> bool:
    """Whether the gate of experts is an activation of one half, which multiplies the other half."""
    return type(module)._apply_gate is moe._default_apply_gate


def activation_of(module: nn.Module) -> str | None:
    """Return the name that the activation of experts has in ``compiled_llm_ops.fused_experts``; None if it has none."""
    return _CLASSES.get(type(module.act_fn)) or _FUNCTIONS.get(module.act_fn)


def norms_answers(module: object) -> bool:
    """Whether what an expert answers is normed before it is weighed."""
    return bool(getattr(module, "has_post_expert_norm", False))


def is_parallel(module: object) -> bool:
    """Whether processes share the experts of a layer."""
    return bool(getattr(module, "_is_expert_parallel", False))
