"""Steps of kept programs are made ready without what only a program that is compiled needs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from torch._inductor.codecache import CppPythonBindingsCodeCache

import compiled_llm
from compiled_llm.compat.torch.inductor import inductor_cache
from compiled_llm.execution.steps.steps import Steps
from support.compilation.kept_programs import taking
from support.compilation.planted_runs import graphs_run, keep
from support.compilation.reading import reading_model
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.noting import note_calls
from support.parity import FEW_PAGES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    CppPythonBindingsCodeCache.cache_clear()  # other tests may have loaded the same kernels from caches of their own
    folder = tmp_path_factory.mktemp("kept")
    (folder / "inductor").symlink_to(inductor_cache())
    keep(folder)
    return folder


@pytest.mark.parametrize("kept", [True, False])
def test_kept_programs_run_no_larger_step_before_the_first_one(
    kept: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor chooses blocks of kernels for the rows that it sees first; those of a kept program were chosen."""
    let_a_cpu_capture(monkeypatch)
    ran = note_calls(monkeypatch, Steps, "_launch_padding", lambda steps, step: step.rows)
    with taking(folder) if kept else nullcontext(), graphs_run():
        model = compiled_llm.wrap(reading_model(), **{**FEW_PAGES, "max_batch_size": 8})
        model.compiled.warmup([2, 4])
    assert ran == ([2, 8, 4] if kept else [8, 2, 8, 4])
    ways = model.compiled.stats().programs
    assert ways["decode, larger batches"] == ("kept" if kept else "traced")
