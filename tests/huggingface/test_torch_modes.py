"""What sees or changes every operation of a call is shown HuggingFace's, and a default device hurts no call."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

import compiled_llm
import compiled_llm_flashinfer
import compiled_llm_ops
from support.huggingface.pairs import OPTIONS, pair
from support.parity import greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.core


# ---- modes


class SeenFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))


class SeenOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


CALLS: list[Callable[..., Any]] = [
    lambda model, inputs: model(**inputs, use_cache=False).logits,
    lambda model, inputs: greedy(model, inputs, 4),
    lambda model, inputs: greedy(model, inputs, 4, num_beams=2),
]


@pytest.mark.drawn(most=1)
@torch.no_grad()
@pytest.mark.parametrize("call", CALLS, ids=["forward", "generate", "beams"])
def test_flops_are_counted_as_huggingfaces(call, models, inputs):
    flops = []
    for model in models:
        with FlopCounterMode(display=False) as counter:
            call(model, inputs)
        flops.append(counter.get_total_flops())
    assert flops[1] == flops[0] > 0
    (name,) = models[1].compiled.stats().slow_paths
    assert name.endswith("observed")
    with (
        pytest.raises(ValueError, match="each operation is seen or changed by FlopCounterMode"),
        FlopCounterMode(display=False),
    ):
        models[1](inputs["input_ids"], past_key_values=models[1].compiled.new_cache())


@torch.no_grad()
@pytest.mark.parametrize("mode", [SeenFunctions, SeenOperators])
def test_modes_of_ones_own_see_what_huggingface_computes(mode, models, inputs):
    seen = []
    for model in models:
        with mode() as watching:
            model(**inputs, use_cache=False)
        seen.append([name for name in watching.names if "linear" in name or "mm" in name or "attention" in name])
    assert seen[1] == seen[0] != []


# ---- transforms


def scores(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits


def mapped(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: scores(model, row[None]))(ids)


def traced(model: PreTrainedModel, ids: Tensor) -> Tensor:
    model.requires_grad_(False)
    return torch.jit.trace(lambda rows: scores(model, rows), ids, check_trace=False)(ids.flip(1))


def forward_derivative(model: PreTrainedModel, ids: Tensor) -> Tensor:
    embeddings = model.get_input_embeddings()(ids)
    function = functools.partial(score_embeddings, model)
    return torch.func.jvp(function, (embeddings,), (torch.ones_like(embeddings),))[1]


def dual_numbers(model: PreTrainedModel, ids: Tensor) -> Tensor:
    embeddings = model.get_input_embeddings()(ids)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(embeddings, torch.ones_like(embeddings))
        return torch.autograd.forward_ad.unpack_dual(score_embeddings(model, dual)).tangent


def score_embeddings(model: PreTrainedModel, embeddings: Tensor) -> Tensor:
    return model(inputs_embeds=embeddings, use_cache=False).logits


@pytest.mark.drawn(most=2)
@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", [mapped, traced, forward_derivative, dual_numbers], ids=lambda f: f.__name__)
def test_transforms_of_a_wrapped_model_are_those_of_the_model(transform, seed):
    ids = mixed_prompts([6, 6], 128, seed)["input_ids"]
    plain, wrapped = pair(attn_implementation="eager")
    torch.testing.assert_close(transform(wrapped, ids), transform(plain, ids))
    assert set(wrapped.compiled.stats().forward_calls) == {"original"}


# ---- gradients into tensors that are no parameters


def in_a_closure(module: Any, tensor: Tensor) -> None:
    original = module.forward
    module.forward = lambda hidden: original(hidden) + tensor


PLACES: dict[str, Callable[[Any, Tensor], object]] = {
    "an attribute": lambda module, tensor: setattr(module, "added", tensor),
    "a list": lambda module, tensor: setattr(module, "added", {"all": [tensor]}),
    "a buffer": lambda module, tensor: module.register_buffer("added", tensor),
    "a closure": in_a_closure,
    "a hook": lambda module, tensor: module.register_forward_hook(lambda *given: given[-1] + tensor),
}


class Adding(nn.Module):
    """Adds whatever tensor it holds to what a module gives."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, hidden: Tensor) -> Tensor:
        added = getattr(self, "added", 0)
        return self.module(hidden) + (added["all"][0] if isinstance(added, dict) else added)


@pytest.mark.parametrize("place", PLACES)
def test_gradients_reach_tensors_that_are_no_parameters(place, models, inputs):
    gradients = []
    for model in models:
        model.requires_grad_(False)
        model.model.layers[0].mlp = Adding(model.model.layers[0].mlp)
        tensor = torch.zeros(64, requires_grad=True)
        PLACES[place](model.model.layers[0].mlp, tensor)
        model(**inputs, use_cache=False).logits.pow(2).sum().backward()
        gradients.append(tensor.grad)
    torch.testing.assert_close(gradients[1], gradients[0])
    with torch.no_grad():
        models[1](**inputs, use_cache=False)
    assert models[1].compiled.stats().forward_calls.get("compiled", 0) == (place != "a hook")


# ---- a default device


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """A default device that nothing can be computed on, as another GPU would be for a model's tensors."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@torch.no_grad()
def test_wrap_sampling_chats_and_forward_work_under_another_default_device(seed, inputs, elsewhere):
    with torch.device("cpu"):
        plain, model = (tiny_qwen3(eos_token_id=None) for _ in range(2))
        more = torch.cat([inputs["input_ids"], torch.full((3, 1), 7)], dim=1)
    compiled_llm.wrap(model, **OPTIONS)
    model.compiled.warmup([3])
    assert model.generate(**inputs, do_sample=True, max_new_tokens=4).shape == (3, 13)
    mask = inputs["attention_mask"][:, :, None] != 0
    ours, theirs = (m(**inputs) for m in (model, plain))
    torch.testing.assert_close(ours.logits * mask, theirs.logits * mask, rtol=1e-4, atol=1e-4)
    following = [m(more[:, -1:], past_key_values=out.past_key_values) for m, out in ((model, ours), (plain, theirs))]
    assert following[0].logits.shape == following[1].logits.shape


FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones"),
    *("rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}


def _unplaced(source: str) -> list[int]:
    """Return the lines that make a tensor on the caller's default device."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    made = [call for call in calls if ast.unparse(call.func).removeprefix("torch.") in FACTORIES]
    named = [call for call in made if ast.unparse(call.func).startswith("torch.")]
    return [call.lineno for call in named if not any(keyword.arg == "device" for keyword in call.keywords)]


def test_every_tensor_that_the_packages_make_says_where_it_is():
    assert _unplaced("x = torch.ones(3)") == [1]
    folders = [Path(package.__path__[0]) for package in (compiled_llm, compiled_llm_flashinfer, compiled_llm_ops)]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    assert len(files) > 100
    assert [(file.name, line) for file in files for line in _unplaced(file.read_text())] == []
