"""A model that only its engine uses is looked at once for each model runner, and not with each request."""

from __future__ import annotations

import pytest

from compiled_llm import Engine
from compiled_llm.engine.model_check import ModelCheck
from support.engine.tiny_engines import greedy

PARAMS = greedy(4)


def tokens(engine: Engine) -> list[int]:
    return engine.generate([[5, 6, 7]], PARAMS)[0].token_ids


@pytest.mark.parametrize("watched", [False, True])
def test_how_often_the_model_is_looked_at(model, watched, monkeypatch):
    looks: list[object] = []
    obstacle = ModelCheck.obstacle
    monkeypatch.setattr(ModelCheck, "obstacle", lambda self, *args: looks.append(self) or obstacle(self, *args))
    with Engine(model, watch_model=watched) as engine:
        expected = tokens(engine)
        once = len(looks)
        assert once
        assert tokens(engine) == expected
        assert (len(looks) > once) == watched


def test_another_model_runner_is_looked_at_again(model):
    with Engine(model, watch_model=False) as engine:
        expected = tokens(engine)
        engine.sleep()
        with pytest.raises(RuntimeError, match="asleep"):
            engine.submit([5, 6, 7], PARAMS)
        engine.wake()
        assert tokens(engine) == expected
        with Engine(model, max_num_seqs=400) as other:  # which makes the model runner again
            assert tokens(other) == expected
        assert tokens(engine) == expected
