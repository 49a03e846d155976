"""A model that nobody but its engine has is looked at once for each device side, and not with each request."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm import Engine, SamplingParams
from compiled_llm.engine.model_check import ModelCheck
from support.tiny_models import tiny_qwen3

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def model() -> PreTrainedModel:
    return compiled_llm.wrap(tiny_qwen3(), mode="eager", kv_memory="2000 tokens", progress=False)


def tokens(engine: Engine) -> list[int]:
    return engine.generate([[5, 6, 7]], PARAMS)[0].token_ids


@pytest.mark.parametrize("watched", [False, True])
def test_how_often_the_model_is_looked_at(
    model: PreTrainedModel, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []
    obstacle = ModelCheck.obstacle
    monkeypatch.setattr(ModelCheck, "obstacle", lambda self: looks.append(self) or obstacle(self))
    with Engine(model, watch_model=watched) as engine:
        expected = tokens(engine)
        once = len(looks)
        assert once
        assert tokens(engine) == expected
        assert (len(looks) > once) == watched


def test_another_device_side_is_looked_at_again(model: PreTrainedModel) -> None:
    with Engine(model, watch_model=False) as engine:
        expected = tokens(engine)
        engine.sleep()
        with pytest.raises(RuntimeError, match="asleep"):
            engine.submit([5, 6, 7], PARAMS)
        engine.wake()
        assert tokens(engine) == expected
        with Engine(model, max_rows=400) as other:  # which makes the device side anew
            assert tokens(other) == expected
        assert tokens(engine) == expected
