"""How far a feature reaches is written down: the files that name it outside of its own do not become more unnoticed."""

from __future__ import annotations

import pytest

from support.named_features import LIST, WORDS, kept, named_in, written


@pytest.mark.parametrize("feature", WORDS)
def test_no_further_file_names_a_feature(feature):
    more = set(named_in()[feature]) - kept()[feature].keys()
    assert not more, f"name {feature} in its own files alone, or say why not in {LIST.name}: FILE  # WHY"


@pytest.mark.parametrize("feature", WORDS)
def test_a_file_that_names_a_feature_no_more_leaves_the_list(feature):
    fewer = kept()[feature].keys() - set(named_in()[feature])
    assert not fewer, f"PYTHONPATH=. python support/{LIST.stem}.py, in tests/, takes them off {LIST.name}"


@pytest.mark.parametrize("feature", ["logprobs", "hidden_states", "structured_outputs", "pooling", "drafts"])
def test_each_file_that_names_a_feature_says_why(feature):
    without = [file for file, reason in kept()[feature].items() if not reason]
    assert not without, f"say why in {LIST.name}: FILE  # WHY"


def test_the_list_is_as_it_is_written():
    assert LIST.read_text() == written(kept())
