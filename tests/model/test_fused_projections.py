"""Fused projections: one product in place of several, and the same tokens whatever happens to the weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.compilation.backend import Inductor
from compiled_llm.compilation.passes.products import FusedProducts
from compiled_llm.model.weights.fused_weights import FusedGroup, FusedWeights
from support.fused_heads import QKV, Heads, fuse
from support.huggingface.families import FAMILIES as OTHER_FAMILIES, make
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import TINY, tiny_llama, tiny_qwen3

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]

OPTIONS: dict[str, Any] = {
    "mode": "compile", "fuse_projections": True, "page_size": 4, "kv_memory": "2000 tokens", "max_batch_size": 8,
    "progress": False,
}  # fmt: skip
SMALL: dict[str, Any] = {"num_hidden_layers": 1, "eos_token_id": None}


# ---- one product


def run_fused(module: nn.Module, x: Tensor, weights: FusedWeights) -> Any:
    torch._dynamo.reset()
    backend = Inductor({}, [FusedProducts(weights)], layers_in_region=0)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    with torch.no_grad():
        return compiled(x)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize(("rows", "bias"), [((1,), False), ((1, 5), True)])
def test_products_of_one_input_become_one(rows, bias, products, seed):
    module, x = Heads(bias), torch.randn(*rows, 24)
    expected = module(x)
    torch.testing.assert_close(run_fused(module, x, fuse(module)), expected, rtol=1e-5, atol=1e-5)
    assert products.counts == [(4, 2)]


@pytest.mark.whole
def test_products_of_other_inputs_and_of_weights_apart_are_left_alone(products, seed):
    class Apart(Heads):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.q(x), self.k(x + 1), self.v(x)

    x = torch.randn(3, 24)
    for module, weights in ((Apart(), fuse), (Heads(), lambda module: FusedWeights(module, []))):
        held = FusedWeights(module, [FusedGroup(QKV, ())]) if isinstance(module, Apart) else weights(module)
        torch.testing.assert_close(run_fused(module, x, held), module(x), rtol=1e-5, atol=1e-5)
    assert products.counts == [(3, 3), (4, 4)]


def test_a_weight_that_was_cut_is_not_read_beyond_its_end(products, seed):
    module, x = Heads(), torch.randn(3, 24)
    weights = fuse(module)
    module.k.weight.data = module.k.weight.data[:4]
    assert not weights.laid_out
    torch.testing.assert_close(run_fused(module, x, weights), module(x), rtol=1e-5, atol=1e-5)
    assert products.counts == [(4, 4)]


def test_fused_and_other_code_are_not_taken_for_each_other_by_the_cache(products, seed):
    x, lone = torch.randn(3, 24), Heads()
    module, twin, again = Heads(), Heads(), Heads()
    counters.clear()
    for which, weights in (
        (module, fuse(module)),
        (lone, FusedWeights(lone, [])),
        (twin, FusedWeights(twin, [FusedGroup(QKV[:2], ())])),
        (again, fuse(again)),
    ):
        torch.testing.assert_close(run_fused(which, x, weights), which(x), rtol=1e-5, atol=1e-5)
    assert products.counts == [(4, 2), (4, 4), (4, 3), (4, 2)]
    hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    assert hits >= 1, "the last is the first again"


# ---- a whole model


def biased(seed: int = 0) -> PreTrainedModel:
    config = transformers.Qwen2Config(**{**TINY, **SMALL})
    torch.manual_seed(seed)
    model = transformers.Qwen2ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return model


BIASED = "Qwen2, biases"
FAMILIES: dict[str, tuple[Callable[[], PreTrainedModel], tuple[int, int]]] = {
    "Qwen3": (lambda: tiny_qwen3(**SMALL), (8, 5)),
    "Llama, two layers, all heads": (
        lambda: tiny_llama(num_hidden_layers=2, num_key_value_heads=4, eos_token_id=None), (15, 9),
    ),
    BIASED: (biased, (8, 5)),
}  # fmt: skip


WHOLE = pytest.mark.whole
FURTHER = ("Cohere", "Mixtral", "OPT", "Phi")
OTHERS = ["Llama, two layers, all heads", *(pytest.param(name, marks=WHOLE) for name in ("GptOss", *FURTHER))]


@pytest.mark.whole
@pytest.mark.parametrize("family", [*(pytest.param(name, marks=WHOLE) for name in ("Qwen3", BIASED)), *OTHERS])
def test_tokens_equal_huggingface(family, products, request, seed):
    """Biases with Inductor; what it makes of the others is in the tests of decode's passes and of regions."""
    if family != BIASED:
        request.getfixturevalue("without_inductor")
    made, counts = FAMILIES.get(family, (lambda: make(family, OTHER_FAMILIES[family], seed), None))
    model, lengths = made(), (20, 20, 9) if counts else (12, 12, 12)
    many, one = mixed_prompts([5, 19, 11], 128, seed), mixed_prompts([9], 128, seed)
    expected = [greedy(model, inputs, tokens) for inputs, tokens in zip((many, one, many), lengths, strict=True)]
    compiled_llm.wrap(model, **OPTIONS)
    for wanted, inputs, length in zip(expected, (many, one, many), lengths, strict=True):
        torch.testing.assert_close(greedy(model, inputs, length), wanted)
    assert len(products.counts) == 3
    assert products.counts == [counts] * 3 if counts else all(before - after >= 4 for before, after in products.counts)
    stats = model.compiled.stats()
    assert stats.generate_calls == {"fast loop": 3}
    assert (stats.graphs, stats.recompiles, stats.graph_breaks) == (3, 0, 0)
    own = {parameter.data_ptr(): parameter.nbytes for parameter in (*model.parameters(), *model.buffers())}
    assert stats.memory["weights"] == sum(own.values())
    assert_account_is_empty(model)


def test_a_model_is_watched_in_inference_mode_too(seed):
    with torch.inference_mode():
        model = compiled_llm.wrap(tiny_qwen3(**SMALL), **OPTIONS)
    assert [len(group.weights) for group in model.compiled.facts.fused_groups] == [3, 2]


@pytest.fixture(scope="module")
def twins() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A plain model and a wrapped one that is compiled: tests change both alike, one after the other."""
    return tiny_qwen3(**SMALL), compiled_llm.wrap(tiny_qwen3(**SMALL), **OPTIONS)


def attention(model: PreTrainedModel) -> Any:
    return model.model.layers[0].self_attn


def test_saved_files_are_the_same(twins, tmp_path):
    plain, wrapped = twins
    plain.load_state_dict(wrapped.state_dict())
    paths = tmp_path / "plain", tmp_path / "wrapped"
    for model, path in zip(twins, paths, strict=True):
        model.save_pretrained(path)
    assert contents(paths[0]) == contents(paths[1])
    torch.testing.assert_close(dict(wrapped.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
def test_a_swapped_weight_that_is_held_is_read_where_it_is(twins, products, seed):
    inputs = mixed_prompts([4, 9], 128, seed)
    greedy(twins[1], inputs, 3)
    products.counts.clear()
    value = 0.2 * torch.randn(32, 64)
    held = [value, value.clone()]
    for model, weight in zip(twins, held, strict=True):
        attention(model).k_proj.weight.data = weight
    torch.testing.assert_close(greedy(twins[1], inputs, 12), greedy(twins[0], inputs, 12))
    assert products.counts == [(8, 7)] * 2, "gate and up stay one"
    for weight in held:
        weight.mul_(-1)
    torch.testing.assert_close(greedy(twins[1], inputs, 12), greedy(twins[0], inputs, 12))
    assert len(products.counts) == 2
    stats = twins[1].compiled.stats()
    assert stats.recompiles == 0
    assert_account_is_empty(twins[1])


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
def test_copies_and_pickles_fuse_weights_of_their_own(twins, seed):
    inputs = mixed_prompts([4, 9], 128, seed)
    for twin in (copy.deepcopy(twins[1]), pickle.loads(pickle.dumps(twins[1]))):
        assert twin.compiled.facts.fused_groups == twins[1].compiled.facts.fused_groups
        torch.testing.assert_close(greedy(twin, inputs, 1), greedy(twins[0], inputs, 1))  # traces prefill alone
        assert len(twin.compiled.model_runner().graph_manager.weights.groups) == 2
        addresses = [{weight.data_ptr() for weight in model.parameters()} for model in (twin, twins[1])]
        assert addresses[0].isdisjoint(addresses[1])


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
def test_unwrapping_gives_weights_memory_of_their_own(seed):
    plain, wrapped = tiny_qwen3(**SMALL), compiled_llm.wrap(tiny_qwen3(**SMALL), **OPTIONS)
    inputs = mixed_prompts([4, 9], 128, seed)
    out = greedy(wrapped, inputs, 3, return_dict_in_generate=True)
    model_runner = wrapped.compiled.model_runner()
    programs = model_runner.graph_manager.programs
    compiled_llm.unwrap(wrapped)
    assert model_runner.graph_manager.programs is not programs, "they read what lies behind a weight"
    assert all(entry.untyped_storage().nbytes() == entry.nbytes for entry in wrapped.parameters())
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 3, dtype=torch.long)], dim=1)
    with torch.no_grad():
        expected = plain(out.sequences, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(0)).logits[:, -1]
        torch.testing.assert_close(wrapped(**inputs).logits, plain(**inputs).logits, rtol=0, atol=0)
    actual = out.past_key_values.generate_loop.decode(out.sequences[:, -1], [6, 11])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)  # what is held of it still runs


@pytest.mark.parametrize("options", [{"fuse_projections": False}, {"fuse_projections": None}, {"mode": "eager"}])
def test_weights_stay_apart_unless_wanted(options, products, seed):
    model = compiled_llm.wrap(tiny_qwen3(**SMALL), **{**OPTIONS, **options})
    model.compiled.model_runner()
    assert all(entry.untyped_storage().nbytes() == entry.nbytes for entry in model.parameters())
    assert model.compiled.model_runner().graph_manager.weights.groups == []


# ---- on a GPU


@pytest.mark.gpu
def test_recorded_graphs_read_fused_weights_and_follow_a_change(seed):
    """The memory of the weights stays what it was, nothing is copied into graphs, and a new weight is read at once."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, **SMALL}
    model = tiny_qwen3(**sizes).to("cuda", torch.bfloat16)
    apart = compiled_llm.wrap(copy.deepcopy(model), max_batch_size=8, fuse_projections=False, progress=False)
    inputs = {name: value.cuda() for name, value in mixed_prompts([4, 9, 17], 128, seed).items()}
    before = torch.cuda.memory_allocated()
    groups = compiled_llm.wrap(model, max_batch_size=8, progress=False).compiled.facts.fused_groups
    weights = FusedWeights(model, groups)
    assert len(weights.groups) == 2
    assert abs(torch.cuda.memory_allocated() - before) < 2**16
    del weights
    for change in (lambda model: None, model_negated, model_negated):
        for which in (model, apart):
            change(which)
        greedy(model, inputs, 4)  # what was moved is captured once more
        scores = [
            which.generate(
                **inputs, max_new_tokens=2, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
            for which in (model, apart)
        ]
        fused_logits, logits = (torch.stack(score.logits).float() for score in scores)
        assert (fused_logits - logits)[0].pow(2).mean().sqrt() < 0.02 * logits[0].std()
        del scores  # and the caches with them
    stats = model.compiled.stats()
    assert (stats.cudagraph_skips, stats.recompiles) == (0, 0)
    assert len(model.compiled.model_runner().graph_manager.weights.groups) == 2
    assert_account_is_empty(model)


def model_negated(model: PreTrainedModel) -> None:
    attention(model).v_proj.weight.data = -attention(model).v_proj.weight.data
