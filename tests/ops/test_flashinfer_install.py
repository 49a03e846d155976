"""The packages and tools that FlashInfer needs."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest

from compiled_llm_ops.flashinfer import install
from support.ops.mocked_flashinfer import flashinfer


def test_nvcc_and_ninja_are_looked_for_where_flashinfer_looks():
    source = Path(importlib.import_module("flashinfer.jit.cpp_ext").__file__ or "").read_text()
    for name in ('"FLASHINFER_NVCC"', '"CUDA_HOME"', '"CUDA_PATH"', '["which", "nvcc"]', '"/usr/local/cuda"'):
        assert name in source
    assert re.search(r'"ninja",\n', source)
    assert hasattr(importlib.import_module("flashinfer.jit.env"), "has_flashinfer_jit_cache")


def test_installed_version_is_supported():
    assert install.flashinfer_problem() is None


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("FLASHINFER_NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name.startswith("/usr") else real(name))


@pytest.mark.usefixtures("bare_machine")
def test_missing_compilers_are_named_with_the_way_out_unless_kernels_are_there(monkeypatch):
    nvcc, ninja = install.missing_for_cuda()
    assert "CUDA_HOME" in nvcc
    assert "flashinfer-jit-cache" in nvcc
    assert "pip install ninja" in ninja
    assert install.missing_for_cuda(builds=False) == [], "they were built before"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert install.missing_for_cuda() == [], "they come along"


@pytest.mark.usefixtures("bare_machine")
def test_nvcc_is_found_in_cuda_home(monkeypatch, tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(mode=0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert install.find_nvcc() == str(nvcc)


def test_unsupported_version_is_named_with_the_way_out(monkeypatch):
    monkeypatch.setattr(flashinfer, "__version__", "0.8.0")
    assert 'pip install "flashinfer-python>=0.6.13,<0.8"' in str(install.flashinfer_problem())


def test_absent_flashinfer_is_named_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert 'pip install ".[cuda]"' in str(install.flashinfer_problem())
