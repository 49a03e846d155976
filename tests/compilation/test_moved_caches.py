"""Inductor takes code from a folder that is named around a graph, wherever that folder was written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from compiled_llm.compat.torch import dynamo, inductor
from compiled_llm.compilation.artifacts import artifacts
from compiled_llm.compilation.backend import Inductor
from compiled_llm.compilation.bounded import Bounded
from compiled_llm.compilation.torch_compile.notice import CompilingNotice

pytestmark = pytest.mark.core

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


class RefusedError(Exception):
    """A graph was about to be compiled."""


def refuse() -> None:
    raise RefusedError


def product(x: Tensor) -> Tensor:
    return (x @ x).relu() + 1


def compiled_at(folder: Path, notice: CompilingNotice) -> Tensor:
    """What a compiled function returns that takes its code from a folder."""

    def compile_graph(*graph):
        with inductor.inductor_cache_at(folder):
            return inductor.compile_with_inductor(*graph)

    function = dynamo.own_copy(product)
    backend = Inductor({"post_grad_custom_post_pass": notice}, layers_in_region=0, compile_graph=compile_graph)
    try:
        with torch.no_grad():
            result = Bounded(function, backend, torch.device("cpu"))(torch.ones(3, 3))
        assert dynamo.tracing_seconds([function]) > 0
    finally:
        dynamo.forget([function])
    return result


@pytest.mark.parametrize("value", [None, "/somewhere/else"])
def test_code_moves_with_its_folder_and_the_environment_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)

    def assert_unchanged() -> None:
        own = {None, default_cache_dir()} if value is None else {value}  # torch itself spells its default out
        assert {os.environ.get(name) for name in VARIABLES} <= own

    written, moved = tmp_path / "written", tmp_path / "elsewhere" / "moved"
    expected = product(torch.ones(3, 3))
    torch.testing.assert_close(compiled_at(written, CompilingNotice()), expected)
    shutil.move(written, moved)
    files = {path for path in moved.rglob("*") if path.is_file()}
    torch.testing.assert_close(compiled_at(moved, CompilingNotice(refuse)), expected)
    assert {path for path in moved.rglob("*") if path.is_file()} == files
    assert_unchanged()
    with pytest.raises(dynamo.BackendError) as raised:
        compiled_at(tmp_path / "empty", CompilingNotice(refuse))
    assert isinstance(dynamo.reason_of(raised.value, RefusedError), RefusedError)
    assert dynamo.reason_of(raised.value, KeyError) is None
    assert_unchanged()


def test_what_inductor_cannot_keep_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = inductor.uncached_graphs()
    compiled_at(tmp_path, CompilingNotice())
    assert inductor.uncached_graphs() == before
    notice = CompilingNotice()
    monkeypatch.setattr(notice, "uuid", lambda: None)
    compiled_at(tmp_path, notice)
    assert inductor.uncached_graphs() > before


def test_a_forked_process_leaves_the_folder_to_the_one_that_reads_it(tmp_path: Path) -> None:
    artifacts._remove(tmp_path, os.getpid() + 1)
    assert tmp_path.exists()
    artifacts._remove(tmp_path, os.getpid())
    assert not tmp_path.exists()
