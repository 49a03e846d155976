"""A wrapped model is still the user's: HuggingFace's own calls, results, files and copies stay as they were."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

import compiled_llm
from support.huggingface.pairs import OPTIONS, pair
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.core


# ---- the object


def test_wrap_returns_the_same_object_of_the_same_class_by_name():
    model = tiny_qwen3()
    base = type(model)
    wrapped = compiled_llm.wrap(model, **OPTIONS)
    assert wrapped is model
    assert isinstance(wrapped, base)
    assert (type(wrapped).__name__, type(wrapped).__qualname__) == (base.__name__, base.__qualname__)
    assert type(wrapped).__module__ == base.__module__
    assert (model.compiled.stats().pages, model.compiled.graphs) == (None, {}), "nothing is allocated or compiled yet"


def test_wrap_leaves_nothing_in_modules_that_keep_what_forward_computes(inputs):
    class Keeping(torch.nn.Module):
        def __init__(self, mlp):
            super().__init__()
            self.mlp, self.last, self.seen = mlp, None, {}

        def forward(self, x):
            self.last = self.seen["x"] = x
            return self.mlp(x)

    model = tiny_qwen3()
    model.model.layers[0].mlp = keeping = Keeping(model.model.layers[0].mlp)
    compiled_llm.wrap(model, mode="eager")
    assert keeping.last is None
    assert keeping.seen == {}
    greedy(model, inputs, 2)
    assert type(keeping.last) is torch.Tensor


def test_unwrap_restores_class_attributes_attention_and_config(inputs):
    model = tiny_qwen3()
    before = type(model), set(model.__dict__), model.config._attn_implementation, model.config.to_dict()
    expected = greedy(model, inputs, 8)
    compiled_llm.wrap(model, **OPTIONS)
    assert model.config._attn_implementation == before[2]
    greedy(model, inputs, 8)
    assert compiled_llm.unwrap(model) is model
    assert (type(model), set(model.__dict__), model.config._attn_implementation, model.config.to_dict()) == before
    torch.testing.assert_close(greedy(model, inputs, 8), expected)
    assert isinstance(model(**inputs).past_key_values, DynamicCache)
    assert compiled_llm.unwrap(model) is model
    compiled_llm.wrap(model, **OPTIONS)
    torch.testing.assert_close(greedy(model, inputs, 8), expected)


def test_unwrap_gives_the_pages_back():
    model = compiled_llm.wrap(tiny_qwen3(), **OPTIONS)
    pages = model.compiled.model_runner().state.pages[0]
    reference = torch.utils.weak.WeakTensorKeyDictionary({pages: None})
    del pages
    compiled_llm.unwrap(model)
    gc.collect()
    assert len(reference) == 0


@pytest.mark.parametrize(
    ("end", "fuses", "lowers"),
    [
        pytest.param(compiled_llm.unwrap, False, True, id="unwrapped", marks=pytest.mark.whole),
        pytest.param(lambda model: None, True, True, id="dropped, with fused weights", marks=pytest.mark.whole),
        # What holds on to a model is what Dynamo and our passes make of it: its guards, its graphs, our programs.
        pytest.param(lambda model: None, True, False, id="dropped, with fused weights, without Inductor"),
    ],
)
def test_a_model_that_was_compiled_gives_all_back(
    end: Callable[[Any], Any], fuses: bool, lowers: bool, inputs, request: pytest.FixtureRequest
) -> None:
    if not lowers:
        request.getfixturevalue("without_inductor")
    model: Any = compiled_llm.wrap(
        tiny_qwen3(num_hidden_layers=1), **{**OPTIONS, "mode": "compile", "fuse_projections": fuses}
    )
    greedy(model, inputs, 4)
    assert model.compiled.graphs
    pages, weight = model.compiled.model_runner().state.pages[0], next(model.parameters())
    references = torch.utils.weak.WeakTensorKeyDictionary({pages: None, weight: None})
    unwrapped = end(model)
    del model, pages, weight
    gc.collect()
    assert len(references) == (0 if unwrapped is None else 1)


def test_state_dict_and_saved_files_are_those_of_the_unwrapped_model(tmp_path: Path, inputs):
    plain, wrapped = pair()
    greedy(wrapped, inputs, 3)
    ours, theirs = wrapped.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    plain.save_pretrained(tmp_path / "plain")
    wrapped.save_pretrained(tmp_path / "wrapped")
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "wrapped").iterdir())
    assert "config.json" in files
    for name in files:
        assert (tmp_path / "wrapped" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes(), name
    loaded = type(plain).from_pretrained(tmp_path / "wrapped")
    torch.testing.assert_close(greedy(loaded, inputs, 5), greedy(plain, inputs, 5))


def _pickled(model: PreTrainedModel) -> Any:
    return pickle.loads(pickle.dumps(model))


def _saved(model: PreTrainedModel) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled, _saved])
def test_a_copy_is_wrapped_has_equal_tokens_and_none_of_the_pages(copied: Callable[[Any], Any], inputs):
    model = compiled_llm.wrap(tiny_qwen3(), **OPTIONS)
    expected, of_beams = greedy(model, inputs, 12), greedy(model, inputs, 12, num_beams=3)
    kept = greedy(model, inputs, 12, return_dict_in_generate=True)
    twin = copied(model)
    assert type(twin) is type(model)
    assert twin.compiled is not model.compiled
    assert twin.compiled.config == model.compiled.config
    assert twin.compiled.stats().pages is None
    torch.testing.assert_close(greedy(twin, inputs, 12), expected)
    torch.testing.assert_close(greedy(twin, inputs, 12, num_beams=3), of_beams)
    assert_account_is_empty(twin)
    assert model.compiled.stats().pages.used > 0
    assert {parameter.data_ptr() for parameter in twin.parameters()}.isdisjoint(
        parameter.data_ptr() for parameter in model.parameters()
    )
    del kept
    compiled_llm.unwrap(twin)
    assert type(twin) is type(tiny_qwen3())


# ---- generate: the fast loop


def test_inputs_may_be_given_as_huggingface_takes_them(models, seed):
    plain, wrapped = models
    ids = mixed_prompts([6], 128, seed)["input_ids"]
    for model in models:
        model.generation_config.max_new_tokens = 6
        model.generation_config.do_sample = False
    expected = plain.generate(ids)
    for actual in (
        wrapped.generate(ids),
        wrapped.generate(inputs=ids),
        wrapped.generate(input_ids=ids),
        wrapped.generate(ids, GenerationConfig(max_new_tokens=6, do_sample=False)),
        wrapped.generate(ids, attention_mask=torch.ones_like(ids).bool()),
        wrapped.generate(ids, attention_mask=torch.ones_like(ids).float()),
    ):
        torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(wrapped.generate(ids.int()), plain.generate(ids.int()))
    torch.testing.assert_close(wrapped.generate(max_new_tokens=4), plain.generate(max_new_tokens=4))
    assert_account_is_empty(wrapped)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("end", ["close", "reset"])
def test_a_closed_cache_can_be_used_again(end, models, inputs):
    plain, wrapped = models
    one = {name: value[:1] for name, value in inputs.items()}
    cache = greedy(wrapped, one, 12, return_dict_in_generate=True).past_key_values
    getattr(cache, end)()
    assert_account_is_empty(wrapped)
    expected = greedy(plain, inputs, 12)
    torch.testing.assert_close(greedy(wrapped, inputs, 12, past_key_values=cache), expected)
    cache.close()
    assert_account_is_empty(wrapped)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads how much memory is resident")
def test_a_large_pool_on_a_cpu_takes_memory_only_where_it_is_written():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    model = compiled_llm.wrap(tiny_qwen3(), mode="eager", kv_memory="3GiB")
    before = resident()
    greedy(model, mixed_prompts([4, 30], 128, seed=0), 8)
    assert model.compiled.stats().memory["pages"] > 2.9 * 2**30
    assert resident() - before < 2**29
