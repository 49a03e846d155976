"""Each feature takes the path that docs/paths.md says, twice, with HuggingFace's results and no page left in use."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from compiled_llm.execution.reporting import slow_paths
from compiled_llm.execution.reporting.slow_paths import WORDINGS, Reason, SlowPath
from compiled_llm.huggingface import wrap
from support.gpu import needs_cuda
from support.huggingface.cache_name import CACHE
from support.huggingface.generate_features import BETWEEN, FEATURES, PAGE, Feature, line, pair, paths_of, reasons
from support.parity import assert_account_is_empty

CASES = {f"{title}: {feature.name}": feature for title, features in FEATURES.items() for feature in features}
CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-4}


def comparable(result: Any) -> Any:
    """A result without what is of another kind for a wrapped model, and without what masked tokens have."""
    if isinstance(result, (Tensor, tuple)):
        return result
    left_out = [CACHE, *(["logits"] if isinstance(result.get("logits"), Tensor) else [])]  # of a forward
    return {name: value for name, value in result.items() if name not in left_out}


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    torch.testing.assert_close(comparable(ours), comparable(theirs), **CLOSE)
    if not isinstance(theirs, (Tensor, tuple)) and isinstance(theirs.get("logits"), Tensor):
        seen = ours.logits.any(dim=-1)  # zeros where a token is masked
        torch.testing.assert_close(ours.logits[seen], theirs.logits[seen], **CLOSE)
        assert seen.float().mean() > 0.6


def unwrapped(call: Any, plain: Any) -> Any:
    try:
        return call(plain)
    except TypeError as error:  # assistant_early_exit before transformers 5.23
        pytest.skip(f"transformers itself cannot do it: {error}")


@pytest.mark.core
@pytest.mark.parametrize("name", CASES)
def test_a_feature_takes_the_path_on_the_page_with_huggingfaces_result(name: str, caplog: Any) -> None:
    assert_the_page_is_right(CASES[name], caplog)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("mode", ["eager", "cuda-graphs"])
@pytest.mark.parametrize("name", CASES)
def test_a_feature_takes_the_path_on_the_page_on_a_gpu(name: str, mode: str, caplog: Any) -> None:
    """In float32, so that tokens are comparable: uncompiled, and in the default mode, whose steps are captured."""
    assert_the_page_is_right(CASES[name], caplog, device="cuda", mode=mode, backend="triton")


def assert_the_page_is_right(feature: Feature, caplog: Any, **where: str) -> None:
    caplog.set_level(logging.DEBUG, "compiled_llm.generate")
    plain, wrapped = pair(feature, **where)
    taken: list[set[str]] = []
    for call in feature.calls:
        theirs = None if feature.draws or feature.refused else unwrapped(call, plain)
        for _ in range(2):
            paths, ours = paths_of(feature, call, wrapped)
            taken.append(paths)
            if theirs is not None:
                assert_same(ours, theirs)
            del ours
        if (pages := wrapped.compiled.stats().pages) is not None:
            if pages.used:
                gc.collect()
            assert_account_is_empty(wrapped)
    assert all(paths == taken[0] for paths in taken)
    assert line(feature, taken[0]) in written(), "run `python tests/support/huggingface/generate_features.py`"
    assert_reasons_are_counted_and_said_once(wrapped, caplog)
    if taken[0] == {"fast loop"} and not wrapped.compiled.stats().slow_paths:
        assert "compiled_llm.generate" not in {record.name for record in caplog.records}


def assert_reasons_are_counted_and_said_once(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    counters = model.compiled.counters
    for counted, calls in (
        (counters.slow_generates, counters.generate_calls),
        (counters.slow_forwards, counters.forward_calls),
    ):
        slow = sum(calls[path] for path in ("processed loop", "compiled forward", "original"))
        assert slow <= counted.total() <= calls.total()
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    said = [line for line in lines if line.startswith("compiled_llm: ") and "takes a slower path" in line]
    expected = {*counters.slow_generates, *counters.slow_forwards}
    assert len(said) == len(expected)
    assert all(any(f"because {reason}. {reason.advice}" in line for line in said) for reason in expected)


def written() -> list[str]:
    between = BETWEEN.search(PAGE.read_text())
    assert between is not None
    return between[0].splitlines()


def test_the_page_lists_no_other_features() -> None:
    features = [line for line in written() if line.startswith("| ") and not line.startswith("| feature |")]
    features = features[: len(features) - len(WORDINGS) - 1]
    assert [row.split(" | ")[0][2:] for row in features] == [feature.name for feature in CASES.values()]


def test_features_have_names_of_their_own() -> None:
    assert len(CASES) == sum(map(len, FEATURES.values()))
    assert all(isinstance(feature, Feature) and feature.calls for feature in CASES.values())


def test_the_page_lists_each_reason_once() -> None:
    between = BETWEEN.search(PAGE.read_text())
    assert between is not None
    assert between[0].endswith(reasons()), "run `python tests/support/huggingface/generate_features.py`"


def test_each_reason_has_a_sentence_and_advice_and_is_given_by_some_code() -> None:
    assert set(get_args(SlowPath)) == WORDINGS.keys()
    files = {*Path(str(wrap.__file__)).parents[1].rglob("*.py")} - {Path(slow_paths.__file__)}
    sources = "".join(file.read_text() for file in files)
    assert [reason for reason in WORDINGS if f'"{reason}"' not in sources] == []
    for said in WORDINGS.values():
        assert said.advice[0].isupper()
        assert said.advice.endswith(".")
        assert not said.sentence.endswith(".")


def test_a_reason_says_what_differs_from_call_to_call() -> None:
    assert str(Reason("processors", "Halve")) == "a logits processor has to see each step (Halve)"
    assert str(Reason("asleep")) == "the model is asleep, and has no pages"
