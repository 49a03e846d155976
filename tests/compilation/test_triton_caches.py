"""Triton finds kernels in folders of artifacts before it looks into its own cache."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from compiled_llm.compat.torch import triton as caches

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
    assert caches.kernels_built() == [*before, "kernel.json"]
    manager = layered("OTHER")
    file = manager.put(b"cubin", "kernel.cubin")
    manager.put_group("kernel.json", {"kernel.cubin": file})
    assert Path(file).is_relative_to(tmp_path / "own")
    assert layered("OTHER").get_group("kernel.json") == {"kernel.cubin": file}
    assert caches.kernels_built() == [*before, "kernel.json"]


def test_what_a_c_compiler_makes_for_triton_is_found_in_a_folder_or_counted(
    layered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = pytest.importorskip("triton.runtime.build")
    built: list[str] = []

    def put_empty_file(name: str, source: str, folder: str, *others: object) -> str:
        built.append(name)
        path = Path(folder) / f"{name}.so"
        path.touch()
        return str(path)

    monkeypatch.setitem(vars(knobs.cache), "manager_class", layered)
    monkeypatch.setattr(build, "_build", put_empty_file)
    monkeypatch.setattr(build, "_load_module_from_path", lambda name, path: path)
    before = caches.kernels_built()
    first = Path(build.compile_module_from_src("int launch;", "__triton_launcher"))
    assert first.is_relative_to(tmp_path / "own")
    counted = caches.kernels_built()[len(before) :]
    assert counted == [first.name]
    (tmp_path / "artifacts").mkdir()
    first.parent.rename(tmp_path / "artifacts" / first.parent.name)
    second = Path(build.compile_module_from_src("int launch;", "__triton_launcher"))
    assert second == tmp_path / "artifacts" / first.parent.name / first.name
    assert built == ["__triton_launcher"]
    assert caches.kernels_built() == [*before, *counted]


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
