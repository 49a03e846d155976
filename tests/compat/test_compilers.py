"""Ctrl-C ends no compiler that another thread than the main one has started, and a compile that a signal ended is
tried again.
"""

from __future__ import annotations

import inspect
import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch._inductor import async_compile, codecache, cpp_builder
from torch._inductor.exc import CppCompileError

from compiled_llm.compat.torch import inductor
from compiled_llm.compat.torch.compilers import compile_to_the_end

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor's own function before and after."""
    run = inspect.unwrap(cpp_builder.run_compile_cmd)
    monkeypatch.setattr(cpp_builder, "run_compile_cmd", run)
    compile_to_the_end.cache_clear()
    compile_to_the_end()
    yield
    compile_to_the_end.cache_clear()


def in_pool(function: Callable[[], object]) -> None:
    """Run it in a thread of a pool that the main thread has begun, as Inductor's may have been."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


def interrupts_are_blocked() -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def run_shell(script: str, folder: Path) -> None:
    cpp_builder.run_compile_cmd(f"sh -c {shlex.quote(script)}", cwd=str(folder))


@pytest.mark.parametrize("by", [in_pool, lambda function: function()], ids=["pool", "main thread"])
def test_a_compiler_that_another_thread_starts_blocks_ctrl_c(by, tmp_path) -> None:
    by(lambda: cpp_builder.run_compile_cmd("cp /proc/self/status .", cwd=str(tmp_path)))
    (blocked,) = [line for line in (tmp_path / "status").read_text().splitlines() if line.startswith("SigBlk:")]
    assert bool(int(blocked.split()[1], 16) >> (signal.SIGINT - 1) & 1) is (by is in_pool)
    assert not interrupts_are_blocked()


@pytest.mark.parametrize(
    "end", ["kill -INT $$", "kill -KILL $$", "echo g++: fatal error: Killed signal terminated program cc1plus; exit 1"]
)
def test_a_compile_that_a_signal_ended_runs_again(end, tmp_path) -> None:
    run_shell(f"test -e begun || {{ touch begun; {end}; }}; touch ended", tmp_path)
    assert (tmp_path / "ended").exists()


@pytest.mark.parametrize(("end", "times"), [("kill -KILL $$", 3), ("exit 1", 1)])
def test_a_compile_that_fails_of_itself_or_again_and_again_fails(end, times, tmp_path) -> None:
    with pytest.raises(CppCompileError):
        run_shell(f"echo >> times; {end}", tmp_path)
    assert len((tmp_path / "times").read_text()) == times


def test_all_that_a_compile_on_a_thread_starts_blocks_ctrl_c(monkeypatch) -> None:
    """Its probes of vector instructions do not go through the function that runs compilers."""
    blocked = []
    monkeypatch.setattr("torch._inductor.compile", lambda *_: blocked.append(interrupts_are_blocked()))
    for by in (in_pool, lambda function: function()):
        by(lambda: inductor.compile_with_inductor(None, [], {}))  # type: ignore[arg-type]
    assert blocked == [True, False]


def test_processes_that_are_started_early_and_trials_of_vector_instructions_block_ctrl_c(monkeypatch, tmp_path) -> None:
    blocked: dict[str, bool] = {}

    def note(name: str) -> None:
        blocked[name] = interrupts_are_blocked()

    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: note("pool"))
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.pick_vec_isa", lambda: note("picked"))
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.x86_isa_checker", lambda: note("built") or [])
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    inductor.start_processes_early()
    inductor.try_vector_instructions_early(tmp_path)
    inductor.build_probes_early.__wrapped__()
    for thread in threading.enumerate():
        if thread.name == "compiled_llm vector instructions":
            thread.join()
    assert blocked == {"pool": True, "picked": True, "built": True}


def test_inductor_runs_its_compilers_by_the_function_that_is_replaced() -> None:
    assert "run_compile_cmd(" in inspect.getsource(cpp_builder.CppBuilder.build)
    assert ".build()" in inspect.getsource(codecache._worker_compile_cpp)
