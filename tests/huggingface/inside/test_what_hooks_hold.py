"""An engine answers by what a traced hook reads now, wherever its function has that from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compiled_llm
from compiled_llm import Engine, SamplingParams
from compiled_llm.model.version.model_version import ModelVersion
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.huggingface.pairs import pair
from support.parity import alone

Scale = Callable[[Tensor], Tensor]
Change = Callable[[], object]

NUMBER = 1.5
SETTINGS = ModuleType("settings_of_the_user")


def scaled_by_a_global(output: Tensor) -> Tensor:
    return output * NUMBER


def change_a_global(value: float = -2.5) -> None:
    globals()["NUMBER"] = value


def a_global() -> tuple[Scale, Change]:
    return scaled_by_a_global, change_a_global


def a_global_of_a_function_that_is_called() -> tuple[Scale, Change]:
    return lambda output: scaled_by_a_global(output), change_a_global


def a_number_of_a_module_of_python() -> tuple[Scale, Change]:
    SETTINGS.number = 1.5  # type: ignore[attr-defined]
    return lambda output: output * SETTINGS.number, lambda: setattr(SETTINGS, "number", -2.5)


def a_closure() -> tuple[Scale, Change]:
    number = 1.5

    def change() -> None:
        nonlocal number
        number = -2.5

    return lambda output: output * number, change


def a_default() -> tuple[Scale, Change]:
    def scale(output: Tensor, number: float = 1.5, *, other: float = 1.0) -> Tensor:
        return output * number * other

    return scale, lambda: setattr(scale, "__kwdefaults__", {"other": -2.5})


def a_partial() -> tuple[Scale, Change]:
    numbers = {"number": 1.5}
    scale = functools.partial(lambda output, numbers: output * numbers["number"], numbers=numbers)
    return scale, lambda: numbers.update(number=-2.5)


def an_entry_of_entries() -> tuple[Scale, Change]:
    held = [{"number": [1.5]}]
    return lambda output: output * held[0]["number"][0], lambda: held[0]["number"].__setitem__(0, -2.5)


class Scaling:
    number = 1.5

    def __init__(self) -> None:
        self.own = SimpleNamespace(vector=torch.full((64,), 1.5))

    def of_class(self, output: Tensor) -> Tensor:
        return output * self.number

    def by_object(self, output: Tensor) -> Tensor:
        return output * self.own.vector

    def __call__(self, output: Tensor) -> Tensor:
        return self.by_global(output)

    def by_global(self, output: Tensor) -> Tensor:
        return output * NUMBER


def a_number_of_a_class() -> tuple[Scale, Change]:
    return Scaling().of_class, lambda: setattr(Scaling, "number", -2.5)


def an_object_with_tensors_inside() -> tuple[Scale, Change]:
    scaling = Scaling()
    return scaling.by_object, lambda: scaling.own.vector.mul_(-2.5)


def an_object_with_another_tensor_inside() -> tuple[Scale, Change]:
    scaling = Scaling()
    return scaling.by_object, lambda: setattr(scaling.own, "vector", torch.full((64,), -2.5))


def a_global_of_a_method_that_is_called() -> tuple[Scale, Change]:
    return Scaling(), change_a_global


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 64).requires_grad_(False)


def a_module() -> tuple[Scale, Change]:
    module = nn.Sequential(linear(), nn.Tanh())
    return module.__call__, lambda: module[0].weight.mul_(-1)  # type: ignore[union-attr,operator]


def a_module_with_another_parameter() -> tuple[Scale, Change]:
    module = linear()
    return lambda output: module(output), lambda: setattr(module, "weight", nn.Parameter(-module.weight))


def a_module_that_is_moved() -> tuple[Scale, Change]:
    module = linear()
    return lambda output: module(output), lambda: setattr(module.weight, "data", -module.weight)


KINDS = [
    *(a_global, a_global_of_a_function_that_is_called, a_number_of_a_module_of_python, a_closure, a_default, a_partial),
    *(an_entry_of_entries, a_number_of_a_class, an_object_with_tensors_inside, an_object_with_another_tensor_inside),
    *(a_global_of_a_method_that_is_called, a_module, a_module_with_another_parameter, a_module_that_is_moved),
]


@pytest.fixture(autouse=True)
def _numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "NUMBER", 1.5)
    monkeypatch.setattr(Scaling, "number", 1.5)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_engine_answers_by_what_a_hook_reads_now(kind: Callable[[], tuple[Scale, Change]], seed: int) -> None:
    (plain, wrapped), (scale, change) = pair(eos_token_id=None), kind()
    prompt = torch.randint(3, 128, (24,)).tolist()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    plain.model.layers[0].register_forward_hook(lambda module, args, output: scale(output))
    with (
        Engine(wrapped) as engine,
        compiled_llm.traced_hook(wrapped.model.layers[0], lambda module, args, output, tokens: scale(output)),
    ):
        answers = [engine.generate(prompt, params)[0].token_ids]
        expected = [alone(plain, prompt, 8)]
        with torch.no_grad():
            change()
        answers.append(engine.generate(prompt, params)[0].token_ids)
        expected.append(alone(plain, prompt, 8))
        assert answers == expected
        assert expected[0] != expected[1], "else the change is none"


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("kind", [a_closure, a_module_with_another_parameter], ids=lambda kind: kind.__name__)
def test_a_captured_step_is_made_again(
    kind: Callable[[], tuple[Scale, Change]], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    let_a_cpu_capture(monkeypatch)
    plain, wrapped = pair({"mode": "compile", "progress": False}, num_hidden_layers=1, eos_token_id=None)
    scale, change = kind()
    prompt = torch.randint(3, 128, (12,)).tolist()
    plain.model.layers[0].register_forward_hook(lambda module, args, output: scale(output))
    with compiled_llm.traced_hook(wrapped.model.layers[0], lambda module, args, output, tokens: scale(output)):
        before = alone(wrapped, prompt, 6)
        change()
        assert alone(wrapped, prompt, 6) == alone(plain, prompt, 6) != before


def versions(version: ModelVersion) -> tuple[int, int]:
    version.begin_check()
    return version.tensors, version.values


def test_what_has_not_changed_is_not_forgotten_however_often_it_is_looked_at() -> None:
    """Also where a function holds the model that it looks into, with all that wrapping added to it."""
    _, wrapped = pair(num_hidden_layers=1)
    scaling, module = Scaling(), linear()

    def read(of: nn.Module, args: Any, output: Tensor, tokens: Any) -> Tensor:
        return scaling(scaling.by_object(module(output))) * wrapped.config.hidden_size

    version = wrapped.compiled.facts.version
    with compiled_llm.traced_hook(wrapped.model.layers[0], read):
        before = versions(version)
        wrapped.compiled.counters.took("fast loop", None)
        assert versions(version) == before
        with torch.no_grad():
            module.weight.mul_(2)
        written = versions(version)
        assert written[0] == before[0], "captured steps read it where it is"
        assert written[1] != before[1]
        module.weight = nn.Parameter(module.weight.clone())
        assert versions(version)[0] != before[0]


def test_tensors_of_inference_mode_may_be_held() -> None:
    _, wrapped = pair(num_hidden_layers=1)
    with torch.inference_mode():
        vector = torch.ones(64)
    with compiled_llm.traced_hook(wrapped.model.layers[0], lambda module, args, output, tokens: output + vector):
        versions(wrapped.compiled.facts.version)
