"""At the edges of sizes a wrapped model equals HuggingFace, or refuses with one clear error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]


def pair(max_batch_size: int = 2, page_size: int = 4, **overrides: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A tiny model, and another one that is wrapped."""
    reference, model = (tiny_qwen3(**{"num_hidden_layers": 1, "eos_token_id": None, **overrides}) for _ in range(2))
    options = {
        "max_batch_size": max_batch_size,
        "page_size": page_size,
        "kv_memory": f"{max(600, 8 * page_size)} tokens",
    }
    return reference, compiled_llm.wrap(model, mode="eager", progress=False, **options)


@pytest.mark.parametrize("raised", [64, pytest.param(300, marks=pytest.mark.whole)])
def test_positions_may_be_raised_between_calls(raised: int, seed: int) -> None:
    reference, model = pair(max_position_embeddings=16)
    greedy(model, mixed_prompts([5, 9], 128, seed), 3)
    for changed in (reference, model):
        changed.config.max_position_embeddings = raised
    inputs = mixed_prompts([5, 15], 128, seed)
    torch.testing.assert_close(greedy(model, inputs, raised - 15), greedy(reference, inputs, raised - 15))
    assert_account_is_empty(model)
    with pytest.raises(ValueError, match=f"the model has {raised} positions"):
        greedy(model, inputs, raised - 14)
    with torch.no_grad():
        long = mixed_prompts([raised], 128, seed)
        torch.testing.assert_close(model(**long).logits, reference(**long).logits, rtol=1e-4, atol=1e-4)


def test_positions_may_be_lowered_between_calls(seed: int) -> None:
    reference, model = pair(max_position_embeddings=64)
    inputs = mixed_prompts([5, 9], 128, seed)
    cache = greedy(model, inputs, 3, return_dict_in_generate=True).past_key_values
    for changed in (reference, model):
        changed.config.max_position_embeddings = 8
    torch.testing.assert_close(greedy(model, inputs, 9), greedy(reference, inputs, 9))
    assert cache.get_seq_length() == 11


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True}], ids=str)
def test_ids_of_no_columns_may_stand_beside_embeddings(options: dict[str, Any], seed: int) -> None:
    models, texts = pair(max_batch_size=4), []
    embeddings = torch.randn(2, 7, 64)
    for name in ("input_ids", "inputs"):
        given = {name: torch.zeros(2, 0, dtype=torch.long), "inputs_embeds": embeddings, "max_new_tokens": 5}
        for model in models:
            torch.manual_seed(seed)
            texts.append(model.generate(**given, **{"do_sample": False, **options}))
        if not options.get("do_sample"):
            torch.testing.assert_close(texts[-1], texts[-2])
    with pytest.raises(ValueError, match=r"input_ids: shape \(1, 0\) holds no token"):
        models[1].generate(torch.zeros(1, 0, dtype=torch.long), inputs_embeds=embeddings, max_new_tokens=5)
    assert_account_is_empty(models[1])


KEPT: list[Any] = [0, 1, 5, 9, -1, -2, [0, 4], [-1], [4, 0, 0], [], [True, False, True, False, False]]


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("use_cache", [False, True])
def test_logits_are_kept_as_huggingface_keeps_them(kept: Any, use_cache: bool, seed: int) -> None:
    models, inputs = pair(max_position_embeddings=16), mixed_prompts([5, 3], 128, seed)
    dtype = torch.bool if kept and isinstance(kept, list) and isinstance(kept[0], bool) else torch.long
    given = torch.tensor(kept, dtype=dtype) if isinstance(kept, list) else kept
    columns = given if isinstance(kept, list) else slice(-kept, None)
    shown = inputs["attention_mask"][:, columns].bool()
    with torch.no_grad():
        out = [model(**inputs, logits_to_keep=given, use_cache=use_cache) for model in models]
        assert out[0].logits.shape == out[1].logits.shape
        torch.testing.assert_close(out[1].logits[shown], out[0].logits[shown], rtol=1e-4, atol=1e-4)
        if use_cache and not isinstance(kept, list):
            one = {"input_ids": inputs["input_ids"][:, :1], "logits_to_keep": kept}
            one["attention_mask"] = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)], dim=1)
            out = [model(**one, past_key_values=o.past_key_values) for model, o in zip(models, out, strict=True)]
            torch.testing.assert_close(out[1].logits, out[0].logits, rtol=1e-4, atol=1e-4)


def test_rows_of_a_runner_end_at_the_last_position() -> None:
    model = pair(max_position_embeddings=8, max_batch_size=1)[1]
    generate_loop = model.compiled.generate_loop()
    for prompt, new in ((27, 3), (9, 0), (8, 2)):
        with pytest.raises(ValueError, match=rf"prompt: {prompt} tokens and max_new_tokens={new} take .* model has 8"):
            generate_loop.admit([3] * prompt, new)
    generate_loop.admit([3, 4, 5], 6)
    for _ in range(6):
        generate_loop.step()
    assert generate_loop.rows[0].exact_length == 8
    for _ in range(2):
        with pytest.raises(ValueError, match="a row cannot grow to 9 tokens: the model has 8 positions"):
            generate_loop.step()
    generate_loop.close()
    assert_account_is_empty(model)
    with pytest.raises(ValueError, match=r"timings: .* the model has 8 positions"):
        model.compiled.explain(timings=True)
    assert_account_is_empty(model)


@pytest.mark.parametrize("vocabulary", [1, 2])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("page_size", [1, 1000])
def test_the_smallest_models_give_huggingfaces_tokens(vocabulary: int, heads: int, page_size: int, seed: int) -> None:
    sizes = {"vocab_size": vocabulary, "num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 2}
    models = pair(4, page_size, **sizes, max_position_embeddings=6, pad_token_id=0, bos_token_id=None)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
    inputs = {"input_ids": torch.randint(vocabulary, mask.shape) * mask, "attention_mask": mask}
    several: list[dict[str, Any]] = [{"num_beams": 2}] if vocabulary > 1 else []  # HuggingFace looks at twice as many
    for options in ({}, {"do_sample": True, "top_k": 1}, *several):
        texts = [model.generate(**inputs, max_new_tokens=1, **{"do_sample": False, **options}) for model in models]
        torch.testing.assert_close(*texts)
    assert_account_is_empty(models[1])
