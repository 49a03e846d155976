"""Layers that attend by variants: tokens are HuggingFace's, with attention of the model's own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm import Engine, WrapConfig
from compiled_llm.compilation.artifacts.made_for import made_for
from compiled_llm.kinds.refusals import UnsupportedModelError
from compiled_llm.model import checks
from compiled_llm_ops import register_variant
from compiled_llm_ops.reference.backend import Reference, ReferencePlan
from compiled_llm_ops.variants.contracts import PlannedAttentionVariant
from support.compilation.passes_on_a_cpu import let_passes_run_on_a_cpu
from support.engine.random_requests import WORDS, answers, requests
from support.engine.text_tokenizers import byte_level
from support.huggingface.families import FAMILIES, make
from support.ops.variants import registered
from support.parity import FEW_PAGES, assert_account_is_empty, greedy, mixed_prompts, wrap_and_compare
from support.tiny_models import WINDOWS, tiny_llama, tiny_qwen3
from support.variant_models import variants_for, with_attention

KINDS = ["alibi", "sigmoid", "inkling"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("kind", ["alibi", "sigmoid"])
def test_tokens_are_huggingfaces(kind: str, seed: int) -> None:
    """In batches of mixed lengths, computed in several chunks, twice."""
    wrap_and_compare(with_attention(kind, seed), seed, mode="eager", prefill_tokens=8, **variants_for(kind))


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("kind", ["inkling", *(pytest.param(kind, marks=pytest.mark.whole) for kind in KINDS[:2])])
def test_programs_are_one_graph_each_and_traced_once(kind: str, seed: int) -> None:
    model = with_attention(kind, seed, num_hidden_layers=1)
    wrap_and_compare(model, seed, mode="compile", **variants_for(kind))
    (layer,) = model.compiled.facts.layers
    assert layer.kind.function == registered(kind).key, "what compiled code is looked up by has the variant's meaning"


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
def test_rotary_embedding_of_queries_and_keys_is_the_ops(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, in decode steps."""
    let_passes_run_on_a_cpu(monkeypatch)
    model = with_attention("inkling", seed, num_hidden_layers=1)
    wrap_and_compare(model, seed, mode="compile", **variants_for("inkling"))
    assert model.compiled.stats().patterns["rotary"] == 1


# ---- by plans of a backend, as with backend="flashinfer" on CUDA


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the reference plan decode on a CPU; the variants of its launches."""
    monkeypatch.setattr(Reference, "decode_ops", lambda self, device: None)
    launch, names = Reference.kernels["functions"], list[str]()

    def noted(plan: ReferencePlan, args: PlannedAttentionVariant, *results: Tensor | None) -> None:
        names.append(args.name)
        launch(plan, args, *results)

    monkeypatch.setitem(Reference.kernels, "functions", noted)
    return names


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("kind", KINDS)
def test_planned_tokens_are_huggingfaces(kind: str, planned: list[str], seed: int) -> None:
    wrap_and_compare(with_attention(kind, seed), seed, mode="eager", prefill_tokens=8, **variants_for(kind))
    assert {*planned} == {registered(kind).key}


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
def test_planned_programs_are_one_graph_each(planned: list[str], seed: int) -> None:
    """Beside layers that attend as usual, which have plans of their own."""
    model = with_attention("alibi", seed, layers=(1,))
    wrap_and_compare(model, seed, mode="compile", **variants_for("alibi", [1]))
    assert planned
    groups = model.compiled.model_runner()._planner._groups
    assert [group.function for group in groups] == ["", registered("alibi").key]


@pytest.mark.whole
def test_planned_sinks_take_part(planned: list[str], seed: int) -> None:
    register_variant("no_change")
    model = make("GptOss", FAMILIES["GptOss"], seed)
    wrap_and_compare(model, seed, mode="eager", variants={"no_change": "all"})
    assert planned


@pytest.mark.whole
def test_planned_requests_are_answered_as_alone(planned: list[str], seed: int) -> None:
    """Sampled ones and greedy ones."""
    plain, found = with_attention("inkling", seed, **WORDS), []
    for size in (1, 8):
        model = compiled_llm.wrap(
            copy.deepcopy(plain), mode="eager", page_size=4, kv_memory="4000 tokens", prefill_tokens=32, progress=False,
            max_batch_size=size, **variants_for("inkling"),
        )  # fmt: skip
        with Engine(model, tokenizer=byte_level(), max_num_seqs=8) as engine:
            found.append([output.outputs[0].token_ids for output in answers(engine, requests(seed, 8), seed)])
        assert_account_is_empty(model)
    assert found[0] == found[1]
    assert planned


def test_variants_change_tokens(seed: int) -> None:
    model, inputs = with_attention("alibi", seed), mixed_prompts([30], 128, seed)
    expected = greedy(model, inputs, 20)
    model.set_attn_implementation("sdpa")
    compiled_llm.wrap(model, mode="eager", **FEW_PAGES)
    assert not torch.equal(greedy(model, inputs, 20), expected)


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
def test_only_some_layers_and_equal_layers_are_traced_once(seed: int) -> None:
    model = with_attention("alibi", seed, layers=(1, 2), num_hidden_layers=3)
    wrap_and_compare(model, seed, mode="compile", **variants_for("alibi", [1, 2]))
    outline = next(iter(model.compiled.model_runner().graph_manager.programs._outlines.values()))
    assert outline._layers.like == [0, 1, 1]


def test_windows_of_layers_remain(seed: int) -> None:
    """A variant that hides nothing leaves a layer's window as it is."""
    register_variant("no_change")
    model = tiny_qwen3(seed, eos_token_id=None, **WINDOWS)
    wrap_and_compare(model, seed, mode="eager", variants={"no_change": "all"})


def test_pages_of_fp8_hold_what_they_hold_without_a_variant(seed: int) -> None:
    register_variant("no_change")
    inputs, found = mixed_prompts([30, 5], 128, seed), []
    for options in ({}, {"variants": {"no_change": "all"}}):
        model = compiled_llm.wrap(tiny_llama(seed), mode="eager", kv_dtype="fp8_e4m3", **FEW_PAGES, **options)
        found.append(greedy(model, inputs, 8))
    torch.testing.assert_close(*found)


def test_sinks_take_part(seed: int) -> None:
    """GptOss adds a logit for each head, in its attention with a window and without."""
    register_variant("no_change")
    wrap_and_compare(make("GptOss", FAMILIES["GptOss"], seed), seed, mode="eager", variants={"no_change": "all"})


def test_another_number_in_a_tensor_counts_at_once(seed: int) -> None:
    model, inputs = with_attention("alibi", seed), mixed_prompts([30], 128, seed)
    other = copy.deepcopy(model)
    for own in (model, other):
        for layer in own.model.layers:
            layer.self_attn.slopes.mul_(3.0 if own is other else 1.0)
    expected = greedy(other, inputs, 12)
    compiled_llm.wrap(model, mode="eager", **FEW_PAGES, **variants_for("alibi"))
    greedy(model, inputs, 12)
    for layer in model.model.layers:
        layer.self_attn.slopes.mul_(3.0)
    torch.testing.assert_close(greedy(model, inputs, 12), expected)


def test_copies_have_the_same_variants(seed: int) -> None:
    model, inputs = with_attention("alibi", seed), mixed_prompts([9], 128, seed)
    expected = greedy(model, inputs, 8)
    compiled_llm.wrap(model, mode="eager", **FEW_PAGES, **variants_for("alibi"))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(greedy(other, inputs, 8), expected)
    assert compiled_llm.wrap(model, **variants_for("alibi")) is model
    with pytest.raises(ValueError, match=r"wrapped already, with variants=.*'example_alibi': 'all'.* in place of"):
        compiled_llm.wrap(model, **variants_for("alibi", [1]))


# ---- artifacts


def test_a_variants_meaning_and_layers_are_part_of_what_artifacts_are_made_for() -> None:
    model = tiny_llama()

    def key(**options: Any) -> dict[str, Any]:
        return made_for(model, type(model), WrapConfig(**options))

    first = register_variant("first_meaning", lambda logit, *others: logit * 2)
    register_variant("second_meaning", lambda logit, *others: logit * 3)
    assert "variant first_meaning" not in key()
    assert key(variants={"first_meaning": "all"})["variant first_meaning"] == [first.hash, "all"]
    others = [{"first_meaning": [0]}, {"first_meaning": [1]}, {"second_meaning": [0]}]
    assert len({str(key(variants=own)) for own in others}) == 3


# ---- what is refused

REFUSED_OPTIONS = {
    "no layers": ({"variants": {"example_alibi": []}}, r"variants\['example_alibi'\]=\[\]: must be a list of layers"),
    "no list": ({"variants": {"example_alibi": 1}}, "must be a list of layers"),
    "a negative layer": ({"variants": {"example_alibi": [-1]}}, "numbers from 0 on"),
    "no dict": ({"variants": ["example_alibi"]}, "must be a dict of layers by the names of variants"),
    "no variants": ({"variants": {}}, "must be a dict of layers"),
    "two of a layer": (
        {"variants": {"example_alibi": [0, 1], "example_sigmoid": [1]}},
        "a layer has one variant, and 'example_sigmoid'",
    ),
    "all and some": ({"variants": {"example_alibi": [0], "example_sigmoid": "all"}}, "a layer has one variant"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_OPTIONS)
def test_impossible_options_are_refused(case: str) -> None:
    registered("alibi"), registered("sigmoid")
    options, message = REFUSED_OPTIONS[case]
    with pytest.raises(ValueError, match=message):
        WrapConfig(**{"variants": {"example_alibi": "all"}, **options})


def test_a_variant_that_is_not_registered_is_refused() -> None:
    with pytest.raises(ValueError, match="variants: variant 'missing' is not registered"):
        compiled_llm.wrap(tiny_llama(), variants={"missing": "all"})


def _with_buffer(name: str, tensor: torch.Tensor) -> Callable[[], PreTrainedModel]:
    def make_one() -> PreTrainedModel:
        model = tiny_llama()
        for layer in model.model.layers:
            layer.self_attn.register_buffer(name, tensor)
        return model

    return make_one


REFUSED_MODELS: dict[str, tuple[Callable[[], PreTrainedModel], str, Any, str]] = {
    "a missing tensor": (
        tiny_llama, "alibi", "all",
        "slopes of 'example_alibi': LlamaAttention neither has a tensor of this name.*register a buffer",
    ),
    "a tensor of another size": (
        _with_buffer("slopes", torch.ones(3)), "alibi", "all", r"must be \[4\] torch.float32 .*; got \(3,\)"
    ),
    "a tensor of another type": (
        _with_buffer("slopes", torch.ones(4).half()), "alibi", "all", r"got \(4,\) torch.float16"
    ),
    "a tensor by query that is a buffer": (
        _with_buffer("rel_logits", torch.ones(4, 4, 12)), "inkling", "all", "LlamaAttention does not call its attention"
    ),
    "a tensor by row": (_with_buffer("table", torch.ones(4).half()), "unseen", "all", "rows come and go between"),
    "a layer that is not there": (lambda: with_attention("alibi"), "alibi", [0, 5], "for layers 5, .* model has 2"),
    "sinks without a softmax": (
        lambda: make("GptOss", FAMILIES["GptOss"], 0), "sigmoid_alone", "all", "no softmax, in which sinks of GptOss"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_MODELS)
def test_models_that_a_variant_does_not_fit_are_refused(case: str) -> None:
    make_one, kind, layers, message = REFUSED_MODELS[case]
    register_variant("no_change")
    register_variant("sigmoid_alone", lambda logit, *others: torch.sigmoid(logit), softmax=False)
    name = kind if kind in ("no_change", "sigmoid_alone") else registered(kind).name
    with pytest.raises(UnsupportedModelError, match=f"wrap: variants: .*{message}"):
        compiled_llm.wrap(make_one(), mode="eager", variants={name: layers}, **FEW_PAGES)


def test_a_bias_that_a_model_hands_to_its_attention_is_refused_without_a_variant() -> None:
    model = with_attention("inkling")
    model.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedModelError, match="passes 'rel_logits' to its attention, which paged"):
        compiled_llm.wrap(model, mode="eager", **FEW_PAGES)


def test_on_cuda_kernels_are_our_own_or_those_that_the_backend_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled_llm.wrap(with_attention("alibi"), mode="eager", **FEW_PAGES, **variants_for("alibi"))
    layers = model.compiled.facts.layers
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    checks.check_layers(model, layers, WrapConfig(backend="reference"))
    with pytest.raises(UnsupportedModelError, match=r"'flashinfer' cannot run attention layer 0: .*float32 queries"):
        checks.check_layers(model, layers, WrapConfig(backend="flashinfer"))
    monkeypatch.delitem(Reference.kernels, "functions")
    message = "'reference' cannot run attention layer 0: it has no kernels for variants; backend='triton' can"
    with pytest.raises(UnsupportedModelError, match=message):
        checks.check_layers(model, layers, WrapConfig(backend="reference"))
    large = [layer._replace(head_dim=600) for layer in layers]
    with pytest.raises(UnsupportedModelError, match="no kernel for heads of size 600: the largest is 512"):
        checks.check_layers(model, large, WrapConfig())
