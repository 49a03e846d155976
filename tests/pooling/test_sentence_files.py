"""Files of sentence-transformers say how a model pools, in the words of all versions; what is not served is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from compiled_llm.engine.engine import Engine
from compiled_llm.engine.pooling.sentence_files import SentenceFiles
from compiled_llm.engine.pooling.served import served
from support.engine.tiny_engines import tiny, wrapped
from support.pooling import LAST, classifier_of, written

DENSE = "sentence_transformers.base.modules.dense.Dense"


@pytest.mark.parametrize(
    "pooling",
    [
        LAST,
        {"embedding_dimension": 64, "pooling_mode": ["lasttoken"]},
        {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True, "pooling_mode_cls_token": False},
    ],
)
def test_the_last_token_in_all_words(pooling, tmp_path):
    assert SentenceFiles.of(str(written(tmp_path, pooling))).normalizes()


@pytest.mark.parametrize(
    ("pooling", "said"),
    [
        ({"pooling_mode": "mean"}, "'mean'"),
        ({"pooling_mode": ["cls", "lasttoken"]}, "'cls' and 'lasttoken'"),
        ({"pooling_mode_cls_token": True, "pooling_mode_lasttoken": False}, "'cls'"),
        ({"pooling_mode_mean_tokens": True}, "'mean'"),
        ({}, "'mean'"),
    ],
)
@pytest.mark.parametrize("option", [None, "last"])
def test_another_pooling_is_refused_by_its_name(pooling, said, option, tmp_path):
    with pytest.raises(ValueError, match=f" pools by {said}, and only 'lasttoken' is served"):
        SentenceFiles.of(str(written(tmp_path, pooling))).normalizes(option)


def test_a_module_that_is_not_served_is_refused_by_its_name(tmp_path):
    with pytest.raises(ValueError, match="'Dense' after its last hidden state"):
        SentenceFiles.of(str(written(tmp_path, LAST, DENSE))).normalizes()


def test_a_folder_that_does_not_normalize(tmp_path):
    files = SentenceFiles.of(str(written(tmp_path, LAST, normalizes=False)))
    assert not files.normalizes()


def test_the_default_prompt_is_the_one_that_is_named(tmp_path):
    files = SentenceFiles.of(str(written(tmp_path, prompts={"query": "Q: ", "passage": "P: "}, default="passage")))
    assert (files.prompt(), files.prompt("query")) == ("P: ", "Q: ")


def test_a_folder_that_says_nothing_needs_an_option(tmp_path):
    files = SentenceFiles.of(str(tmp_path))
    with pytest.raises(ValueError, match=r"^embed: neither modules.json beside .*--pooling last"):
        files.normalizes()
    assert files.normalizes("last")
    with pytest.raises(ValueError, match=r"^pooling='mean': give 'last'"):
        files.normalizes("mean")
    with Engine(wrapped()) as engine, pytest.raises(ValueError, match=r"^embed: neither "):
        engine.embed([[5]])


@pytest.mark.parametrize(
    ("older", "activation"),
    [
        ({}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
    ],
    ids=["none", "version 4", "version 3"],
)
def test_a_cross_encoder_of_config_json_alone_ranks_by_its_label(older, activation, tmp_path):
    """As those that were saved before sentence-transformers wrote modules for them."""
    judge = classifier_of(tiny(vocab_size=380), 1)
    judge.config.update(older)
    judge.save_pretrained(tmp_path)
    model = type(judge).from_pretrained(tmp_path)
    facts: Any = SimpleNamespace(model=model)
    found = served(facts, SentenceFiles.of(str(tmp_path)), None)
    assert found["ranking"] == {"activation": activation, "prompt": None}
    assert found["labelling"]["activation"] == activation
