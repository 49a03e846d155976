"""Triton finds kernels in folders of artifacts before it looks into its own cache."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from compiled_llm.compat import triton as caches

knobs = pytest.importorskip("triton.knobs")
FileCacheManager = pytest.importorskip("triton.runtime.cache").FileCacheManager


@pytest.fixture
def layered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(caches, "_folders", [tmp_path / "gone", tmp_path / "artifacts"])
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
    return caches.layered(FileCacheManager)


def test_a_folders_kernel_is_found_and_nothing_is_made_in_the_own_cache(layered, tmp_path: Path) -> None:
    folder = tmp_path / "artifacts" / "KEY"
    folder.mkdir(parents=True)
    (folder / "kernel.cubin").write_bytes(b"cubin")
    (folder / "__grp__kernel.json").write_text(json.dumps({"child_paths": {"kernel.cubin": f"{folder}/kernel.cubin"}}))
    before = caches.kernels_built()
    assert layered("KEY").get_group("kernel.json") == {"kernel.cubin": str(folder / "kernel.cubin")}
    assert layered("KEY").get_file("kernel.cubin") == str(folder / "kernel.cubin")
    assert caches.kernels_built() == before
    assert not (tmp_path / "own").exists()


def test_other_kernels_are_counted_and_kept_in_the_own_cache(layered, tmp_path: Path) -> None:
    before = caches.kernels_built()
    assert not layered("OTHER").get_group("kernel.json")
    assert caches.kernels_built() == before + 1
    manager = layered("OTHER")
    file = manager.put(b"cubin", "kernel.cubin")
    manager.put_group("kernel.json", {"kernel.cubin": file})
    assert Path(file).is_relative_to(tmp_path / "own")
    assert layered("OTHER").get_group("kernel.json") == {"kernel.cubin": file}
    assert caches.kernels_built() == before + 1


def test_triton_asks_ours_and_its_environment_is_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    monkeypatch.setattr(caches, "_folders", [])
    monkeypatch.setitem(vars(knobs.cache), "manager_class", FileCacheManager)
    caches._look_in_folders.cache_clear()
    caches.find_kernels_in(tmp_path)
    from triton.runtime.cache import get_cache_manager

    (tmp_path / "KEY").mkdir()
    assert type(get_cache_manager("00")).__name__ == "Layered"
    assert dict(os.environ) == before
    caches.forget_kernels_in(tmp_path)
    caches._look_in_folders.cache_clear()
