"""The stage that torch is at while it compiles is seen from another thread."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm.compat.torch import stages
from support.compile_once import compile_once

pytestmark = pytest.mark.core


def test_stages_of_compiling_are_seen_from_another_thread():
    new = int.from_bytes(os.urandom(3), "big")  # no cache holds a kernel with this number

    def many(x: Tensor) -> Tensor:
        for number in range(40):
            x = torch.sin(x * number) + new
        return x

    seen: list[str] = []
    compiling, ended = threading.get_ident(), threading.Event()

    def watch() -> None:
        while not ended.wait(0.001):
            seen.append(stages.compiling_stage(compiling))

    watcher = threading.Thread(target=watch)
    watcher.start()
    compile_once(many, "inductor", {"fx_graph_cache": False})
    ended.set()
    watcher.join()
    found = list(dict.fromkeys(re.sub(r"\d+", "N", stage) for stage in seen if stage))
    known = ["decomposing operators", "rewriting the graph", "lowering operators", "writing kernels"]
    assert [stage for stage in found if stage in known[1:]] == known[1:]
    assert known[0] in found
    assert any(re.fullmatch(r"building kernels|kernel N of N", stage) for stage in found), found
    assert stages.compiling_stage(compiling) == stages.compiling_stage(0) == ""


@pytest.mark.parametrize(
    ("functions", "stage"),
    [
        ([("compile_fx.py", "compile_fx")], "rewriting the graph"),
        ([("compile_fx.py", "compile_fx"), ("async_compile.py", "cpp_pybinding")], "building kernels"),
        ([("codecache.py", "load_with_key"), ("async_compile.py", "cpp_pybinding")], "reading the cache"),
    ],
)
def test_kernels_out_of_a_cache_are_not_built(functions: list[tuple[str, str]], stage: str) -> None:
    """Of functions that call each other, by torch's files and names."""

    def calling(inner: Callable[[], str], file: str, name: str) -> Callable[[], str]:
        made: dict[str, Any] = {"inner": inner}
        exec(compile(f"def {name}(): return inner()", f"{stages._TORCH}_inductor/{file}", "exec"), made)
        return made[name]

    call = partial(stages.compiling_stage, threading.get_ident())
    for function in reversed(functions):
        call = calling(call, *function)
    assert call() == stage


def test_stages_are_named_by_functions_that_exist():
    """One that is renamed is no error: its stage is only not told any more."""
    for file, function in (*stages._STAGES, stages._CACHE):
        assert f"def {function}(" in (Path(stages._TORCH) / file).read_text(), file
