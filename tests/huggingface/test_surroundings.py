"""Around a wrapped model: pipelines, chat templates, and models that change after wrap."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import pipeline

from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_tokenizer import tokenizer as letters

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}a {% endif %}"
)


# ---- pipelines and chats


@pytest.mark.drawn(most=1)
@pytest.mark.core
@pytest.mark.parametrize(
    "options",
    [{}, {"batch_size": 2}, {"num_beams": 2}, {"return_full_text": False}],
    ids=["one by one", "batched", "beams", "new text only"],
)
def test_a_text_generation_pipeline_writes_the_same(options, models):
    texts = []
    for model in models:
        writer = pipeline("text-generation", model=model, tokenizer=letters(), device="cpu")
        texts.append(writer(["hello", "good morning", "so"], max_new_tokens=9, do_sample=False, **options))
    assert texts[1] == texts[0]
    paths = models[1].compiled.stats().generate_calls
    assert set(paths) == ({"compiled forward"} if "num_beams" in options else {"fast loop"})
    gc.collect()
    assert_account_is_empty(models[1])


def test_a_pipeline_of_chat_messages_writes_the_same(models):
    words = letters()
    words.chat_template = TEMPLATE
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "who are you"}]
    answers = []
    for model in models:
        writer = pipeline("text-generation", model=model, tokenizer=words, device="cpu")
        once = writer(messages, max_new_tokens=7, do_sample=False)[0]["generated_text"]
        again = writer([*once, {"role": "user", "content": "and why"}], max_new_tokens=7, do_sample=False)
        answers.append(again[0]["generated_text"])
    assert answers[1] == answers[0]
    assert [message["role"] for message in answers[1]] == ["system", "user", "assistant", "user", "assistant"]


@pytest.mark.core
def test_generate_batch_is_huggingfaces(models):
    assert models[1].generate_batch.__func__ is models[0].generate_batch.__func__


# ---- a model that changes after it was wrapped


def test_a_cache_from_before_a_conversion_is_refused(models, seed):
    inputs = mixed_prompts([4, 9], 128, seed)
    cache = greedy(models[1], inputs, 4, return_dict_in_generate=True).past_key_values
    models[1].double()
    with pytest.raises(
        ValueError, match="before it was moved, converted, hooked, put to sleep or given more positions"
    ):
        greedy(models[1], inputs, 4, past_key_values=cache)
    models[0].double()
    torch.testing.assert_close(greedy(models[1], inputs, 4), greedy(models[0], inputs, 4))
