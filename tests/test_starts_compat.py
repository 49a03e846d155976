"""What starts with artifacts change in Inductor, or have it do early, is still where it was."""

from __future__ import annotations

import inspect
import os
import re
import threading
from functools import partial

import pytest
import torch
from torch._dynamo.backends import inductor
from torch._inductor import async_compile, codecache, cpu_vec_isa
from torch._inductor.exc import CppCompileError
from torch._inductor.runtime import compile_tasks

from compiled_llm import compat
from compiled_llm.compilation.programs import begin_beside_tracing

pytestmark = pytest.mark.core


@pytest.fixture
def ptxas(tmp_path, monkeypatch):
    """A file where Inductor looks for the ptxas of torch."""
    place = re.search(r"parents\[(\d)\]", inspect.getsource(compile_tasks._set_triton_ptxas_path))
    assert place is not None
    folders = [tmp_path / "a" / "b" / "c" / "tasks.py", *(tmp_path / "a" / "b" / "c" / "tasks.py").parents]
    ptxas = folders[int(place[1]) + 1] / "bin" / "ptxas"
    ptxas.parent.mkdir(parents=True)
    ptxas.touch(mode=0o755)
    monkeypatch.setattr(compile_tasks, "__file__", str(folders[0]))
    compile_tasks._set_triton_ptxas_path.cache_clear()
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    yield str(ptxas)
    os.environ.pop("TRITON_PTXAS_PATH", None)
    compile_tasks._set_triton_ptxas_path.cache_clear()


def test_the_ptxas_of_torch_is_chosen_where_inductor_looks_for_it(ptxas):
    compat.choose_ptxas()
    assert os.environ["TRITON_PTXAS_PATH"] == ptxas


def test_the_ptxas_is_chosen_before_any_kernel_is_built(ptxas, monkeypatch):
    """Else Triton builds kernels of ours under one key in a first process, and under another in a second one."""
    at_start: list[str | None] = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: at_start.append(os.environ.get("TRITON_PTXAS_PATH")))
    begin_beside_tracing(torch.device("cpu"), None)
    assert at_start == []
    assert "TRITON_PTXAS_PATH" not in os.environ
    begin_beside_tracing(torch.device("cuda"), None)
    assert at_start == [ptxas]


def test_the_processes_that_build_kernels_are_those_of_torch_compile():
    assert "maybe_warm_pool()" in inspect.getsource(inductor)


def test_no_header_is_compiled_where_kernels_are_built():
    real = codecache._precompile_header
    assert "_precompile_header(" in inspect.getsource(codecache.CppCodeCache.load_async)
    with compat.without_precompiled_headers():
        assert codecache._precompile_header("header", "command") == ""
    assert codecache._precompile_header is real
    assert compat.cannot_compile(CppCompileError(["g++"], "no"))
    assert not compat.cannot_compile(RuntimeError())


def test_sources_are_hashed_and_vector_instructions_tried_on_threads(tmp_path, monkeypatch):
    names: list[str] = []
    for owner, name in [(codecache, "torch_key"), (cpu_vec_isa, "pick_vec_isa")]:
        monkeypatch.setattr(owner, name, lambda: names.append(threading.current_thread().name))
    for early, thread in [
        (compat.hash_sources_early.__wrapped__, "compiled_llm sources"),
        (partial(compat.try_vector_instructions_early, tmp_path), "compiled_llm vector instructions"),
    ]:
        names.clear()
        early()
        for running in threading.enumerate():
            if running.name == thread:
                running.join()
        assert names == [thread]
