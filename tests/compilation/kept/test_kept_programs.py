"""A process that takes kept programs says what one says that traces them, bit for bit, and enters Dynamo nowhere.

Each family has some thirty kernels, a minute of a core: without --whole, Qwen3 stands for them, in `test_cache.py`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from torch._inductor.codecache import CppPythonBindingsCodeCache

import compiled_llm
from compiled_llm.compat.torch.inductor import inductor_cache
from compiled_llm.compilation.kept import part
from compiled_llm.compilation.programs import Programs
from support.compilation.kept_programs import KEPT_FAMILIES, made, result_of, said_by, taking
from support.compilation.start_with_artifacts import answers
from support.parity import FEW_PAGES

pytestmark = [pytest.mark.slow, pytest.mark.whole]


@pytest.mark.parametrize("family", KEPT_FAMILIES)
def test_tokens_and_logits_are_those_of_a_process_that_traces(family: str, tmp_path: Path) -> None:
    (tmp_path / "inductor").symlink_to(inductor_cache())
    traced = said_by(family, part.recording(tmp_path))
    assert part.not_kept(tmp_path) == {}
    taken = result_of("take", family, tmp_path)
    assert taken["programs"] == dict.fromkeys(traced["programs"], "kept")
    assert (taken["answers"], taken["bits"]) == (traced["answers"], traced["bits"])
    assert taken["traces"] == 0
    assert taken["imported"] == []


def test_a_prefill_from_embeddings_is_kept_where_it_is_cut_at_each_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA: the first two layers read a view of the embeddings."""
    CppPythonBindingsCodeCache.cache_clear()  # other tests may have loaded the same kernels from caches of their own
    (tmp_path / "inductor").symlink_to(inductor_cache())
    monkeypatch.setattr(Programs, "_layers_in_region", lambda programs: 1)
    traced, taken = embedded(part.recording(tmp_path)), embedded(taking(tmp_path))
    assert part.not_kept(tmp_path) == {}
    assert set(taken["programs"].values()) == {"kept"}
    assert taken["answers"] == traced["answers"]


def embedded(how: AbstractContextManager[None]) -> dict[str, Any]:
    with how:
        model = compiled_llm.wrap(made("Qwen3", "cpu"), **FEW_PAGES)
        said = answers(model, "embeddings")
    return {"answers": said, "programs": model.compiled.stats().programs}
