"""`compiled-llm serve` loads classifiers as such, and embeds by the last token where its option says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm.commands.loading.source import locate
from compiled_llm.commands.serve.command import ServeOptions, _prepared
from compiled_llm.protocol.messages import Embedding, Labelling
from support.commands.command_line import invoke
from support.engine.text_tokenizers import byte_level
from support.engine.tiny_engines import greedy, tiny
from support.pooling import assert_alike, classifier_of, last_states, written


def served(folder: Path, model: Any, **options: Any) -> Any:
    model.save_pretrained(folder)
    byte_level().save_pretrained(folder)
    given = {"model": str(folder), "mode": "eager", "backend": "auto", "dtype": "auto", "device": "cpu", "warmup": []}
    given |= {"max_num_seqs": 4, "max_step_ms": "auto", "eager_first": False, "batch_invariant": False, "quiet": True}
    given |= {"kv_memory": "400 tokens", "mm_encoder_cache_gb": 0.0, "log_level": "info"}
    named = {**dict.fromkeys(ServeOptions._fields), **given, **options}
    return _prepared(ServeOptions(**named), locate(str(folder), progress=False), None)


def plain() -> Any:
    return tiny(vocab_size=380, max_position_embeddings=256)


def test_a_classifier_s_folder_is_loaded_with_its_head(tmp_path: Path) -> None:
    expected = classifier_of(plain(), 3)
    engine, ready = served(tmp_path, expected)
    with engine, torch.no_grad():
        assert ready.pooled.silent
        assert ready.pooled.labelling == Labelling(["label 0", "label 1", "label 2"], "softmax")
        found = engine.classify([[5, 6, 7], [8]])
        torch.testing.assert_close(found[1:], expected(torch.tensor([[8]])).logits, rtol=1e-4, atol=1e-5)


def test_a_model_embeds_as_the_option_says_and_answers_too(tmp_path: Path) -> None:
    engine, ready = served(tmp_path, plain(), pooling="last")
    with engine:
        assert ready.pooled.embedding == Embedding(64)
        assert ready.pooled.silent is None
        assert_alike(engine.embed([[5, 6, 7], [8]], pooling="last"), last_states(plain(), [[5, 6, 7], [8]]))
        assert engine.generate([[5]], greedy(2))[0].token_ids


def test_an_option_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    done = invoke("serve", str(written(tmp_path)), "--pooling", "mean")
    assert done.exit_code != 0
    assert "--pooling mean: give last, or leave it out for what the model's folder says" in done.stderr
    with pytest.raises(ValueError, match=r"^pooling='last': Qwen3ForSequenceClassification has a head; leave it out"):
        served(tmp_path, classifier_of(plain(), 3), pooling="last")
