"""Classifiers of families that are served: their scores are HuggingFace's, in calls of the model and in an engine."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaForSequenceClassification, Qwen3ForSequenceClassification

import compiled_llm
from compiled_llm.compilation import backend as inductor
from compiled_llm.engine.engine import Engine
from support.engine.tiny_engines import greedy, tiny, wrapped
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.parity import assert_account_is_empty
from support.tiny_models import tiny_llama


def classifier(kind: Any = Qwen3ForSequenceClassification, labels: int = 3, **more: Any) -> Any:
    plain = tiny() if kind is Qwen3ForSequenceClassification else tiny_llama(num_hidden_layers=1)
    config = deepcopy(plain.config)
    config.num_labels, config.pad_token_id = labels, 0
    for name, value in more.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return kind(config).eval()


def batch(seed: int, lengths: tuple[int, ...] = (3, 9, 4, 8, 1)) -> dict[str, torch.Tensor]:
    """Rows that are padded on the right, as tokenizers pad for classifiers."""
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(1, 128, (length,), generator=generator)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@pytest.mark.parametrize("kind", [Qwen3ForSequenceClassification, LlamaForSequenceClassification])
def test_calls_and_engines_score_as_huggingface(kind, seed):
    plain, inputs = classifier(kind), batch(seed)
    ours = wrapped(plain=classifier(kind), prefill_tokens=16)
    with torch.no_grad():
        expected = plain(**inputs)
        for _ in range(2):
            found = ours(**inputs)
            assert type(found) is type(expected)
            torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
    assert ours.compiled.stats().forward_calls["compiled"] == 2
    texts = [row[row != 0].tolist() for row in inputs["input_ids"]]
    with Engine(ours) as engine:
        torch.testing.assert_close(engine.classify(texts), expected.logits, rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match=r"^embed: .*ForSequenceClassification has a head"):
            engine.embed(texts)
        with pytest.raises(ValueError, match=r"ForSequenceClassification writes no answers"):
            engine.generate(texts, greedy(3))
    assert_account_is_empty(ours)


@pytest.mark.whole
def test_programs_of_classifiers_are_whole(seed, monkeypatch):
    monkeypatch.setattr(inductor, "compile_with_inductor", lambda module, inputs, options: module.forward)
    plain, inputs = classifier(), batch(seed)
    ours = wrapped(plain=classifier(), mode="compile")
    with torch.no_grad(), Engine(ours) as engine:
        expected = plain(**inputs).logits
        torch.testing.assert_close(ours(**inputs).logits, expected, rtol=1e-4, atol=1e-5)
        texts = [row[row != 0].tolist() for row in inputs["input_ids"]]
        torch.testing.assert_close(engine.classify(texts), expected, rtol=1e-4, atol=1e-5)
    stats = ours.compiled.stats()
    assert (stats.graph_breaks, stats.recompiles) == (0, 0)


def test_losses_and_gradients_are_huggingface_s(seed):
    plain, ours, inputs = classifier(), wrapped(plain=classifier()), batch(seed)
    inputs["labels"] = torch.tensor([0, 1, 2, 1, 0])
    losses = [model(**inputs).loss for model in (plain, ours)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(ours.score.weight.grad, plain.score.weight.grad)
    with torch.no_grad():
        torch.testing.assert_close(ours(**inputs).loss, losses[0])


def test_a_copy_and_an_unwrapped_one_go_on(seed):
    ours, inputs = wrapped(plain=classifier()), batch(seed)
    with torch.no_grad():
        expected = classifier()(**inputs).logits
        torch.testing.assert_close(deepcopy(ours)(**inputs).logits, expected, rtol=1e-4, atol=1e-5)
        assert type(compiled_llm.unwrap(ours)) is Qwen3ForSequenceClassification
        torch.testing.assert_close(ours(**inputs).logits, expected)


def test_what_is_refused():
    contradicting = classifier()
    contradicting.config.num_labels = 5
    with pytest.raises(ValueError, match="num_labels=5 in its config, and a head of 3 labels"):
        compiled_llm.wrap(contradicting)
    encoder = BertModel(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32))
    with pytest.raises(compiled_llm.UnsupportedModelError, match="BertModel cannot generate"):
        compiled_llm.wrap(encoder.eval())
    ours = wrapped(plain=classifier())
    with pytest.raises(compiled_llm.UnsupportedModelError, match="scores texts, and writes none"):
        ours.generate(torch.tensor([[5]]))
    with Engine(wrapped()) as engine, pytest.raises(ValueError, match=r"^classify: Qwen3ForCausalLM has no head"):
        engine.classify([[5]])


def test_scores_come_from_captured_steps(seed, monkeypatch):
    let_a_cpu_capture(monkeypatch)
    plain, inputs = classifier(), batch(seed)
    texts = [row[row != 0].tolist() for row in inputs["input_ids"]]
    ours = wrapped(plain=classifier(), prefill_tokens=16)
    with Engine(ours) as engine, torch.no_grad():
        for _ in range(3):
            engine.reset_prefix_cache()
            torch.testing.assert_close(engine.classify(texts), plain(**inputs).logits, rtol=1e-4, atol=1e-5)
    assert any(row.states and row.replays for row in ours.compiled.cuda_graphs)
