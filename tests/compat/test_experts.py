"""What is known of how experts of transformers find what computes them; each test names a part that changed."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from transformers import activations
from transformers.integrations import finegrained_fp8, moe

from compiled_llm.compat import experts as compat
from compiled_llm.compat.huggingface import implementations_read
from support.huggingface.families import FAMILIES, make

NAMES = {
    "mixtral": "MixtralExperts",
    "qwen3_moe": "Qwen3MoeExperts",
    "qwen3_5_moe": "Qwen3_5MoeExperts",
    "granitemoehybrid": "GraniteMoeHybridExperts",
    "jamba": "JambaExperts",
    "gpt_oss": "GptOssExperts",
    "olmoe": "OlmoeExperts",
    "nemotron_h": "NemotronHExperts",
}


def class_of(family: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), NAMES[family])


def experts(family: str = "Qwen3Moe") -> Any:
    model: Any = make(family, FAMILIES[family], 0)
    return model.model.layers[0].mlp.experts


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Modules that a function computes which is registered under a name of its own."""
    seen: list[Any] = []

    def compute(module: nn.Module, states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        seen.append(module)
        return states

    monkeypatch.setattr(moe.ExpertsInterface, "_global_mapping", dict(moe.ExpertsInterface._global_mapping))
    compat.register("contract", compute)
    return seen


@pytest.mark.core
@pytest.mark.parametrize("family", NAMES)
def test_classes_of_experts_tell_their_interface(family: str) -> None:
    assert compat.interface_of(class_of(family)) is moe.ALL_EXPERTS_FUNCTIONS
    assert class_of(family).forward.__wrapped__.__name__ == "forward"


def test_other_modules_have_none() -> None:
    assert compat.interface_of(nn.Linear) is None
    assert not compat.are_experts(nn.Linear(1, 1))
    assert not compat.knows(nn.Linear, "grouped_mm")


@pytest.mark.core
def test_experts_go_where_a_thread_reads_that_their_config_points(called: list[Any]) -> None:
    module, states = experts(), torch.zeros(3, 64)
    ids, weights = torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2)
    named = module.config._experts_implementation
    with implementations_read([module.config], None, "contract"):
        assert module.config._experts_implementation == "contract"
        assert module(states, ids, weights) is states
        with implementations_read([], None):
            assert module.config._experts_implementation == named
    assert called == [module]
    assert module(states, ids, weights) is not states
    assert module.config._experts_implementation == named


def test_experts_of_fp8_have_an_interface_that_does_not_know_the_name(called: list[Any]) -> None:
    assert compat.knows(class_of("mixtral"), "contract")
    decorated = moe.use_experts_implementation(
        type("Own", (nn.Module,), {"forward": lambda self: None}),
        experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS,
    )
    assert not compat.knows(decorated, "contract")


@pytest.mark.parametrize("name", ["grouped_mm", "batched_mm", "eager"])
def test_the_function_that_a_config_names_is_found_while_the_thread_reads_another(name: str) -> None:
    module, states = experts(), torch.randn(5, 64)
    module.config._experts_implementation = name
    ids, weights = torch.randint(4, (5, 2)), torch.rand(5, 2)
    expected = module(states, ids, weights)
    with implementations_read([module.config], None, "contract"):
        assert torch.equal(compat.own_forward(module)(module, states, ids, weights), expected)


def test_gates_are_told_apart() -> None:
    assert compat.has_plain_gate(experts())
    other = experts("GptOss")
    assert not compat.has_plain_gate(other)
    assert compat.gated(other, torch.randn(3, 2 * other.down_proj.shape[1])).shape == (3, other.down_proj.shape[1])


@pytest.mark.parametrize(
    ("name", "expected"),
    [("silu", "silu"), ("swish", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("relu", "relu"),
     ("gelu_new", "gelu_tanh"), ("relu2", "relu2"), ("quick_gelu", None)],
)  # fmt: skip
def test_activations_are_recognised_by_what_they_compute(name: str, expected: str | None) -> None:
    from support.ops.expert_rows import ACTIVATIONS

    module, states = nn.Module(), torch.randn(100)
    module.act_fn = activations.ACT2FN[name]  # type: ignore[assignment]
    assert compat.activation_of(module) == expected
    if expected is not None:
        torch.testing.assert_close(module.act_fn(states), ACTIVATIONS[expected](states), rtol=1e-5, atol=1e-5)  # type: ignore[operator]


@pytest.mark.parametrize("function", [nn.functional.silu, nn.functional.gelu, nn.functional.relu])
def test_activations_that_are_functions_are_recognised(function: Any) -> None:
    module: Any = nn.Module()
    module.act_fn = function
    assert compat.activation_of(module) == function.__name__


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_experts_have_the_attributes_that_say_what_they_compute(family: str) -> None:
    module = experts(family)
    of_gpt_oss = family == "GptOss"
    assert (module.has_gate, module.has_bias, module.is_transposed) == (True, of_gpt_oss, of_gpt_oss)
    assert (compat.norms_answers(module), compat.is_parallel(module)) == (False, False)
    assert module.gate_up_proj.dim() == module.down_proj.dim() == 3
    assert hasattr(module, "gate_up_proj_bias") == hasattr(module, "down_proj_bias") == of_gpt_oss
