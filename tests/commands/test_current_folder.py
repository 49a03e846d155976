"""Nothing in the current folder is run: not by the commands, not by processes that they or their libraries start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from support.commands.foreign_folder import ForeignFolder
from support.server.engine_processes import COMMAND, PATIENCE, until
from support.server.running_servers import serving

EAGER = ("--mode", "eager")
SERVED = (*EAGER, "--warmup", "1", "--kv-memory", "20000 tokens", "--api-server-count", "2")
LIBRARIES = """
import multiprocessing, sys
from compiled_llm import __main__
from compiled_llm.commands import app

def start_processes():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(abs, [-1]) == 1
    from torch._inductor.compile_worker.subproc_pool import SubprocKind, SubprocPool
    for kind in SubprocKind:
        pool = SubprocPool(1, kind=kind)
        assert pool.submit(abs, -1).result() == 1
        pool.shutdown()

if __name__ == "__main__":
    app.app = start_processes
    __main__.main()
"""


def run(*command: str, cwd: Path, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, input=text, capture_output=True, text=True, timeout=PATIENCE * 5)


@pytest.mark.whole
def test_a_server_its_api_servers_and_its_clients(model_folder: Path, foreign: ForeignFolder, path: Path) -> None:
    command = ("env", "-C", str(foreign.path), COMMAND)
    with serving(model_folder, "--uds", str(path), *SERVED, command=command) as (_, url):
        until(lambda: httpx.get(f"{url}/ready", verify=False).status_code == 200)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "Hi", "max_tokens": 2}).status_code == 200
        for asked in (("client", "Hi", "--server", str(path), "--max-tokens", "2"), ("chat", "--server", str(path))):
            done = run(COMMAND, *asked, cwd=foreign.path, text="Hi\n")
            assert done.returncode == 0, done.stderr
    assert foreign.executed() == ""


@pytest.mark.whole
@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "MODEL", "--timings", "1"),
        ("compile", "MODEL", "-o", "FOLDER", "--mode", "compile"),
        ("bench", "latency", "--model", "MODEL", "--contenders", "compiled-llm:eager", "--new", "4", "--runs", "1"),
    ],
)
def test_other_commands(model_folder: Path, foreign: ForeignFolder, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    places = {"MODEL": str(model_folder), "FOLDER": str(tmp_path / "artifacts")}
    done = run(COMMAND, *(places.get(argument, argument) for argument in arguments), cwd=foreign.path)
    assert done.returncode == 0, done.stderr
    assert foreign.executed() == ""


@pytest.mark.whole
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no safe path")
def test_processes_of_libraries(foreign: ForeignFolder, tmp_path: Path) -> None:
    """Of multiprocessing, and Inductor's, which build kernels."""
    script = tmp_path / "command.py"
    script.write_text(LIBRARIES)
    done = run(sys.executable, str(script), cwd=foreign.path)
    assert done.returncode == 0, done.stderr
    assert foreign.executed() == ""


def test_a_process_of_our_own_takes_the_package_that_has_started_it(foreign: ForeignFolder, tmp_path: Path) -> None:
    """Not one that Python would find, which may be another version."""
    package = Path(sys.modules["compiled_llm"].__path__[0])
    copy = tmp_path / "checkout" / "compiled_llm"
    copy.parent.mkdir()
    copy.mkdir()
    for entry in package.iterdir():
        (copy / entry.name).symlink_to(entry)
    (copy / "__init__.py").unlink()
    (copy / "__init__.py").write_text((package / "__init__.py").read_text() + "print('it is the copy')\n")
    (copy / "__main__.py").unlink()
    (copy / "__main__.py").write_text((package / "__main__.py").read_text())
    done = run(sys.executable, str(copy / "__main__.py"), "--version", cwd=foreign.path)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "it is the copy"), done.stderr
    assert foreign.executed() == ""
