"""Layers that are not traced read their own tensors, whatever a class of tensors makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.compilation import backend, programs
from support.execution.model_changes import Affine
from support.parity import FEW_PAGES, greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]

LAYERS, LAST = 3, 2


@pytest.fixture
def regions() -> bool:
    """Whether graphs are cut into regions, as on CUDA."""
    return False


@pytest.fixture(autouse=True)
def _as_aotautograd_leaves_them(regions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.backends.debugging import aot_eager

    class Backend(backend.Inductor):
        def __init__(self, *args: Any, layers_in_region: int, **options: Any) -> None:
            super().__init__(*args, layers_in_region=int(regions), **options)

    monkeypatch.setattr(programs, "Inductor", Backend)
    monkeypatch.setattr(backend, "compile_with_inductor", lambda module, inputs, options: aot_eager(module, inputs))


def pair(*changes: Callable[[PreTrainedModel], None]) -> tuple[PreTrainedModel, PreTrainedModel]:
    """HuggingFace's model and ours, with a norm of these in each layer."""
    plain, model = (tiny_qwen3(num_hidden_layers=LAYERS, eos_token_id=None) for _ in range(2))
    for made in (plain, model):
        for layer in made.model.layers:
            layer.input_layernorm = Affine(layer.input_layernorm)
        for change in changes:
            change(made)
    return plain, compiled_llm.wrap(model, **FEW_PAGES, fuse_projections=False)


def assert_alike(model: PreTrainedModel, plain: PreTrainedModel, new_tokens: int = 4) -> list[Tensor]:
    """With one new token, those of prefill alone."""
    inputs = mixed_prompts([9, 12], 128, 0)
    options: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True}
    ours, theirs = (greedy(one, inputs, new_tokens, **options).logits for one in (model, plain))
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)
    return list(theirs)


# ---- classes of tensors


class Scaled(Tensor):
    """Stands for quantised weights: what they mean depends on a number that is no tensor."""

    @staticmethod
    def __new__(cls, inner: Tensor, factor: float) -> Scaled:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)  # type: ignore

    def __init__(self, inner: Tensor, factor: float) -> None:
        self.inner, self.factor = inner, factor

    def __repr__(self) -> str:
        return "Scaled(...)"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], self.factor

    @staticmethod
    def __tensor_unflatten__(inner: Any, factor: Any, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["inner"], factor)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].inner.detach(), args[0].factor)
        plain = tree_map_only(Scaled, lambda tensor: tensor.inner * tensor.factor, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def scale(layer: Any, factor: float) -> None:
    layer.input_layernorm.gain = nn.Parameter(Scaled(torch.linspace(1, 2, 64), factor), requires_grad=False)


def scale_all(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        scale(layer, 1.0)


def scale_the_middle_more(model: PreTrainedModel) -> None:
    scale(model.model.layers[1], 3.0)


@pytest.mark.whole
@pytest.mark.parametrize("regions", [pytest.param(False, marks=pytest.mark.whole), True], ids=["whole", "in regions"])
@pytest.mark.parametrize("when", ["from the start", pytest.param("later", marks=pytest.mark.whole)])
def test_what_a_class_of_tensors_makes_of_them_is_looked_at(when: str, whole: bool) -> None:
    plain, model = pair(scale_all, *([scale_the_middle_more] if when == "from the start" else []))
    new_tokens = 4 if whole else 1
    assert_alike(model, plain, new_tokens)
    for changed in (plain, model):
        scale_the_middle_more(changed)
    assert_alike(model, plain, new_tokens)
