"""Mixtures of experts generate what HuggingFace gives each row alone, with our experts, not HuggingFace's."""

from __future__ import annotations

import copy
import functools
import logging
import pickle
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel
from transformers.integrations import moe

import compiled_llm
from compiled_llm import Engine, SamplingParams
from compiled_llm.model.layers import experts
from support.engine.random_requests import CAPTURES
from support.huggingface.families import FAMILIES, MIXTURES, make
from support.huggingface.recurrent_families import RECURRENT, WITH_EXPERTS, recurrent_model
from support.huggingface.recurrent_pairs import FEW, new_tokens_of, prompts_of
from support.parity import assert_account_is_empty

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES_WITH_EXPERTS = [*MIXTURES, *(family for family in WITH_EXPERTS if family in RECURRENT)]
SINCE_5_18 = {"DeepseekV32", "GlmMoeDsa"}
LENGTHS = [5, 1, 16, 37]
FUSED = {"fused_experts"}
WITH_GATES_OF_THEIR_OWN = {"GptOss": {"experts_linear"}}


def model_of(family: str, **settings: Any) -> PreTrainedModel:
    if family in RECURRENT:
        return recurrent_model(family, **WITH_EXPERTS[family], **settings)
    return make(family, {**FAMILIES[family], **settings}, 0)


@functools.cache
def of_rows_alone(family: str, seed: int, new: int, **settings: Any) -> list[list[int]]:
    model = model_of(family, **settings)
    return [new_tokens_of(model, [own], new, eos_token_id=None)[0] for own in prompts_of(LENGTHS, seed)]


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts calls of our ops."""
    counted: Counter[str] = Counter()

    def counting(name: str, op: Any) -> Any:
        def call(*args: Any) -> Any:
            counted[name] += 1
            return op(*args)

        return call

    for name in ("fused_experts", "experts_linear"):
        monkeypatch.setattr(experts, name, counting(name, getattr(experts, name)))
    return counted


def barred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let HuggingFace's implementations raise from here on."""

    def raises(*_: Any, **__: Any) -> Any:
        raise AssertionError("HuggingFace's experts ran")

    for name in ("batched_mm", "grouped_mm"):
        monkeypatch.setitem(moe.ExpertsInterface._global_mapping, name, raises)


@pytest.mark.drawn(most=6)
@pytest.mark.core
@pytest.mark.parametrize("family", FAMILIES_WITH_EXPERTS)
def test_each_family_gives_huggingfaces_tokens(
    family: str, seed: int, ours: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if family in SINCE_5_18 and Version(transformers.__version__) < Version("5.18"):
        pytest.skip("transformers before 5.18 caches what pages do not hold, and wrap refuses the family")
    expected = of_rows_alone(family, seed, 8)
    assert any(len(set(own)) > 3 for own in expected), "text that repeats one token shows little"
    model: Any = compiled_llm.wrap(model_of(family), mode="eager", progress=False, **FEW)
    barred(monkeypatch)
    ours.clear()  # the trial forward counts, too
    prompts = prompts_of(LENGTHS, seed)
    assert new_tokens_of(model, prompts, 8, eos_token_id=None) == expected
    stats = model.compiled.stats()
    layers = stats.experts["compiled_llm"]
    assert set(stats.experts) == {"compiled_llm"}
    assert set(stats.generate_calls) == {"fast loop"}
    assert {*ours} == WITH_GATES_OF_THEIR_OWN.get(family, FUSED)
    assert ours.total() >= layers * stats.steps * (2 if family in WITH_GATES_OF_THEIR_OWN else 1)
    assert ours.total() % layers == 0
    assert_account_is_empty(model)


FEW_FAMILIES = ["Qwen3Moe", "GptOss", "Qwen3_5Moe"]


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("mode", CAPTURES)
@pytest.mark.parametrize("family", [family for family in FEW_FAMILIES if family in FAMILIES_WITH_EXPERTS])
def test_captured_steps_give_the_same_tokens(
    family: str, mode: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs are traced whole, once for all sizes, with our ops in them."""
    expected, prompts = of_rows_alone(family, seed, 12), prompts_of(LENGTHS, seed)
    CAPTURES[mode](monkeypatch)
    model: Any = compiled_llm.wrap(model_of(family), mode=mode, progress=False, **FEW)
    barred(monkeypatch)
    assert new_tokens_of(model, prompts, 12, eos_token_id=None) == expected
    for own, wanted in zip(prompts, expected, strict=True):
        assert new_tokens_of(model, [own], 12, eos_token_id=None) == [wanted]
    stats = model.compiled.stats()
    assert (stats.graph_breaks, stats.recompiles) == (0, 0)
    assert set(stats.experts) == {"compiled_llm"}


@pytest.mark.parametrize("family", FEW_FAMILIES[:2])
def test_an_engine_gives_the_same_tokens(family: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, prompts = of_rows_alone(family, seed, 12), prompts_of(LENGTHS, seed)
    model: Any = compiled_llm.wrap(model_of(family), mode="eager", progress=False, **FEW)
    barred(monkeypatch)
    with Engine(model) as engine:
        handles = [
            engine.submit(own, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)) for own in prompts
        ]
        assert [handle.result().token_ids for handle in handles] == expected


def test_the_config_names_huggingfaces_experts_all_the_time_for_others(seed: int) -> None:
    """For copies, pickles, HuggingFace's own forward, and once it is unwrapped."""
    plain, model = model_of("Qwen3Moe"), model_of("Qwen3Moe")
    named, before = model.config._experts_implementation, model.config.to_dict()
    wrapped: Any = compiled_llm.wrap(model, mode="eager", progress=False, **FEW)
    ids = torch.tensor(prompts_of([7], seed))
    twins = copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))
    seen: list[str | None] = []
    layer: Any = wrapped.model.layers[0].mlp.experts
    read = type(layer).forward

    def noting(self: Any, *args: Any) -> Any:
        seen.append(self.config._experts_implementation)
        return read(self, *args)

    layer.forward = noting.__get__(layer)
    wrapped.generate(ids, max_new_tokens=3, do_sample=False)
    assert {*seen} == {experts.NAME}
    seen.clear()
    wrapped(ids, output_router_logits=True)
    assert {*seen} == {named}, "HuggingFace's own forward runs HuggingFace's experts"
    del layer.forward
    for twin in (*twins, compiled_llm.unwrap(wrapped)):
        assert twin.config._experts_implementation == named
        assert twin.config.to_dict() == before
        out = twin.generate(ids, max_new_tokens=5, do_sample=False)
        assert torch.equal(out, plain.generate(ids, max_new_tokens=5, do_sample=False))


def with_shared_experts() -> Any:
    """Marked as experts that processes share, in one layer of two; alone they compute what they did."""
    model: Any = model_of("Qwen3Moe")
    model.model.layers[1].mlp.experts._is_expert_parallel = True
    return model


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("mode", ["eager", pytest.param("compile", marks=pytest.mark.whole)])
def test_what_our_ops_cannot_do_is_left_to_huggingface_and_said(
    mode: Any, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = prompts_of(LENGTHS, seed)
    expected = [new_tokens_of(with_shared_experts(), [own], 6, eos_token_id=None)[0] for own in prompts]
    with caplog.at_level(logging.WARNING, "compiled_llm.experts"):
        model: Any = compiled_llm.wrap(with_shared_experts(), mode=mode, progress=False, **FEW)
        assert new_tokens_of(model, prompts, 6, eos_token_id=None) == expected
        assert new_tokens_of(model, prompts, 6, eos_token_id=None) == expected
    reason = "processes share them"
    assert model.compiled.stats().experts == {"compiled_llm": 1, reason: 1}
    assert f"experts          1 compiled_llm, 1 {reason}" in str(model.compiled.stats())
    logged = [record.getMessage() for record in caplog.records if record.name == "compiled_llm.experts"]
    assert [message for message in logged if reason in message] == logged
    assert len(logged) == 1


def test_experts_of_an_interface_that_does_not_know_our_name_are_huggingfaces(seed: int) -> None:
    """As those of fp8 are: they would raise."""

    class OwnInterface(moe.ExpertsInterface):
        _global_mapping: ClassVar[dict[str, Any]] = {
            "grouped_mm": moe.grouped_mm_experts_forward,
            "batched_mm": moe.batched_mm_experts_forward,
        }

    model: Any = model_of("Qwen3Moe")
    plain: Any = type(model.model.layers[0].mlp.experts)

    class OwnExperts(plain):  # type: ignore[misc]
        forward = plain.forward.__wrapped__

    decorated = moe.use_experts_implementation(OwnExperts, experts_interface=OwnInterface())
    ids = torch.tensor(prompts_of([7], seed))
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    for layer in model.model.layers:
        layer.mlp.experts.__class__ = decorated
    wrapped: Any = compiled_llm.wrap(model, mode="eager", progress=False, **FEW)
    assert torch.equal(wrapped.generate(ids, max_new_tokens=5, do_sample=False), expected)
    assert wrapped.compiled.stats().experts == {"their weights are quantised": 2}


def test_no_other_model_sees_our_experts(seed: int, ours: Counter[str]) -> None:
    plain = model_of("Qwen3Moe")
    compiled_llm.wrap(model_of("Qwen3Moe"), mode="eager", progress=False, **FEW)
    ours.clear()
    plain.generate(torch.tensor(prompts_of([7], seed)), max_new_tokens=5, do_sample=False)
    assert not ours


def test_reasons_to_leave_experts_to_huggingface() -> None:
    two = pytest.importorskip("torch.testing._internal.two_tensor")
    module: Any = model_of("Qwen3Moe").model.layers[0].mlp.experts  # type: ignore[union-attr]
    assert experts.obstacle(module) is None
    up, down = module.gate_up_proj, module.down_proj
    module.gate_up_proj = torch.nn.Parameter(two.TwoTensor(up.data, up.data))
    assert experts.obstacle(module) == "their weights are quantised"
    module.gate_up_proj = torch.nn.Parameter(up.data.to(torch.int8), requires_grad=False)
    assert experts.obstacle(module) == "their weights are of torch.int8 and torch.float32"
    module.gate_up_proj, module.down_proj = up, torch.nn.Parameter(down.data.flatten(0, 1))
    assert experts.obstacle(module) == "their weights have 3 and 2 dimensions"
    del module.gate_up_proj
    assert experts.obstacle(module) == "their weights are not where those of HuggingFace's experts are"
