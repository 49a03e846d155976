"""A tiny model, an engine of it, and either way of reading tokens; modules that need others have their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import PreTrainedModel

from compiled_llm.engine.engine import Engine
from compiled_llm.engine.steps.loop import Loop
from support.drawing import BY_READING
from support.engine.tiny_engines import tiny, wrapped
from support.parity import assert_account_is_empty


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return tiny()


@pytest.fixture
def model() -> PreTrainedModel:
    return wrapped()


@pytest.fixture
def engine(model: PreTrainedModel, one_thread: None) -> Iterator[Engine]:
    with Engine(model) as engine:
        yield engine
    assert_account_is_empty(model)


@pytest.fixture(params=BY_READING)
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either way of reading tokens: the CPU's, or the one that keeps a GPU busy; both with ``--whole``."""
    late = request.param == "read a step late"
    monkeypatch.setattr(Loop, "asynchronous", property(lambda _: late))
