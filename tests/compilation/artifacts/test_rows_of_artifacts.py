"""How many rows there may be with artifacts, if nobody says so: no more than they have room for."""

from __future__ import annotations

from pathlib import Path

import pytest

import compiled_llm
from compiled_llm.compilation.artifacts.made_for import made_for
from compiled_llm.compilation.artifacts.writing import seal, unfinished
from compiled_llm.config import WrapConfig
from support.tiny_models import tiny_qwen3

ROWS = 4


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the tiny model, with nothing in them yet: programs are taken when a step is prepared."""
    target, model = tmp_path_factory.mktemp("written") / "artifacts", tiny_qwen3()
    with unfinished(target) as folder:
        seal(folder, made_for(model, type(model), WrapConfig()), ROWS)
    return target


@pytest.mark.core
def test_a_model_and_its_engines_have_as_many_rows_as_their_artifacts(artifacts: Path) -> None:
    model = compiled_llm.wrap(tiny_qwen3(), artifacts=artifacts, progress=False)
    assert model.compiled.config.max_batch_size == ROWS
    with compiled_llm.Engine(model) as engine:
        assert engine._settings.max_num_seqs == ROWS
    with compiled_llm.Engine(model, max_num_seqs=2) as engine:
        assert engine._settings.max_num_seqs == 2


def test_more_than_they_have_room_for_is_refused_where_it_is_asked_for(artifacts: Path) -> None:
    with pytest.raises(ValueError, match=f"have room for {ROWS} rows, and 5 are asked for"):
        compiled_llm.wrap(tiny_qwen3(), artifacts=artifacts, max_batch_size=5)
    model = compiled_llm.wrap(tiny_qwen3(), artifacts=artifacts, progress=False)
    with pytest.raises(ValueError, match=f"have room for {ROWS} rows, and 5 are asked for"):
        compiled_llm.Engine(model, max_num_seqs=5)


def test_artifacts_with_more_room_than_the_default_leave_the_default(tmp_path: Path) -> None:
    reference = tiny_qwen3()
    with unfinished(tmp_path / "artifacts") as folder:
        seal(folder, made_for(reference, type(reference), WrapConfig()), 1000)
    model = compiled_llm.wrap(tiny_qwen3(), artifacts=tmp_path / "artifacts", progress=False)
    assert model.compiled.config.max_batch_size == WrapConfig.max_batch_size
    with compiled_llm.Engine(model) as engine:
        assert engine._settings.max_num_seqs == 256
