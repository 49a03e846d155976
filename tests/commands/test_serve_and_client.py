"""`compiled-llm serve` and `client` say what is wrong before anything is loaded or sent."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from compiled_llm.commands import early_checks
from compiled_llm.commands.app import app
from compiled_llm.commands.serve import http as serve_http
from compiled_llm.commands.serve.command import ServeOptions
from compiled_llm.engine.engine import Engine
from compiled_llm.server.engine_process.socket_file import listen
from compiled_llm.server.restarts import Restarts

WIDE = {"COLUMNS": "200", "NO_COLOR": "1"}


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="uds-") as folder:
        yield Path(folder) / "socket"


def failed(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments, env=WIDE)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return result.exit_code, line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-rows", "0"], "error: --max-rows 0: must be at least 1"),
        (["--warmup", "8,300"], "error: --warmup 300: there are 256 requests at once; raise --max-rows"),
        (["--warmup", "x"], "error: --warmup 'x': give comma-separated integers"),
        (["--drain-seconds", "-1"], "error: --drain-seconds -1: must be 0 or more"),
        (["--kv-memory", "much"], "error: --kv-memory much: give a fraction of the free memory"),
        (["--mode", "fast"], "error: --mode fast"),
    ],
)
def test_options_that_are_impossible_are_refused_at_once(path: Path, arguments: list[str], said: str) -> None:
    code, line = failed("serve", "demo", "--uds", str(path), *arguments)
    assert (code, line[: len(said)]) == (2, said)
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "error: --host 0.0.0.0: other machines could use the model; give --api-key-file, or"),
        (["--api-server-count", "0"], "error: --api-server-count 0: must be from 1 to 64"),
        (["--api-server-count", "65"], "error: --api-server-count 65: must be from 1 to 64"),
        (["--stream-interval", "0"], "error: --stream-interval 0: must be from 1 to 1024 tokens"),
        (["--port", "70000"], "error: --port 70000: must be from 0 to 65535"),
        (["--ssl-certfile", "cert.pem"], "error: --ssl-certfile and --ssl-keyfile: give both, or neither"),
        (["--api-key-file", "/dev/null"], "error: --api-key-file /dev/null: the file has no key; write one a line"),
    ],
)
def test_a_server_that_would_not_be_safe_does_not_start(path: Path, arguments: list[str], said: str) -> None:
    code, line = failed("serve", "demo", *arguments)
    assert (code, line[: len(said)]) == (2, said)


def test_a_process_on_a_leash_ends_with_whoever_holds_it() -> None:
    code = (
        "import time; from compiled_llm.commands.serve.leash import end_with_parent; end_with_parent(); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == -signal.SIGTERM


def test_a_process_is_started_again_three_times_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    restarts = Restarts(3)
    assert [restarts.may() for _ in range(4)] == [True, True, True, False]
    now[0] = 3601.0
    assert restarts.may()


@pytest.mark.parametrize(
    ("device", "cores", "driver", "count"),
    [
        *(("auto", 3, True, 1), ("auto", 4, True, 2), ("cuda", 12, True, 3), ("auto", 128, True, 4)),
        *(("cpu", 128, True, 1), ("auto", 128, False, 1)),
    ],
)
def test_how_many_api_servers_there_are_follows_from_the_machine(
    device: str, cores: int, driver: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_http.os, "sched_getaffinity", lambda pid: range(cores))
    monkeypatch.setattr(serve_http, "has_driver", lambda: driver)
    assert serve_http.usual_count(device) == count


def test_a_model_that_is_nowhere_makes_no_socket(path: Path) -> None:
    assert failed("serve", "./nothing", "--uds", str(path))[0] == 2
    assert not path.exists()


def test_a_path_that_is_taken_is_refused_before_the_model_is_loaded(path: Path) -> None:
    with listen(path):
        code, line = failed("serve", "demo", "--uds", str(path))
    said = f"error: --uds {path}: an engine process listens there already; stop it, or give another path"
    assert (code, line) == (1, said)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["Hi"], 1, "there is no such socket; start an engine process with"),
        (["Hi", "there"], 2, "PROMPT is one argument: quote it, as in 'Hi there'"),
        ([""], 2, "the prompt is empty"),
        (["Hi", "--system", "Be brief"], 2, "--system is a part of the chat template: give --chat as well"),
        (["1,2", "--ids", "--chat"], 2, "--ids: token ids are no chat"),
        (["Hi", "--temperature", "-1"], 2, "--temperature -1.0: must be above 0; --greedy takes the most likely"),
        (["Hi", "--greedy", "--top-p", "0.9"], 2, "--greedy draws nothing, so it does not go with --top-p"),
        (["Hi", "--max-tokens", "0"], 2, "--max-new-tokens 0: must be at least 1"),
    ],
)
def test_what_cannot_be_asked_is_said(path: Path, arguments: list[str], code: int, said: str) -> None:
    found, line = failed("client", str(path), *arguments)
    assert (found, said in line) == (code, True), line


@pytest.mark.parametrize("arguments", [["serve", "demo", "--uds", "x"], ["client", "x", "Hi"]])
def test_the_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr(early_checks.importlib.util, "find_spec", lambda _: None)
    code, line = failed(*arguments)
    assert (code, line) == (1, "error: this command needs msgspec: pip install '.[server]' in the checkout")
    assert "msgspec" in sys.modules


@pytest.mark.parametrize(
    ("options", "structured", "calls"),
    [
        ({}, False, [("auto",)]),
        ({}, True, [(1, "structured"), ("auto",)]),
        ({"warmup": [16, 4]}, True, [([16], "structured"), ([16, 4],)]),
        ({"profile": "nowhere"}, False, [("auto",)]),
        ({"profile": "there", "warmup": [16]}, True, [("profile", "there", "structured")]),
    ],
)
def test_what_is_compiled_before_the_first_request(
    tmp_path: Path, options: dict[str, Any], structured: bool, calls: list[Any]
) -> None:
    (tmp_path / "there").touch()

    class Warmed:
        def warmup(self, *sizes: Any, profile: Path | None = None, structured: bool = False, report: Any) -> None:
            named = [] if profile is None else ["profile", profile.name]
            made.append((*sizes, *named, *["structured"] * structured))

    made: list[Any] = []
    given = {"model": "demo", "max_rows": 16, "warmup": [], **options}
    if "profile" in given:
        given["profile"] = tmp_path / given["profile"]
    served = ServeOptions(**{name: given.get(name) for name in ServeOptions._fields})
    served.prepare(cast(Engine, Warmed()), structured, lambda doing: None)
    assert made == calls


def test_a_profile_that_cannot_be_kept_is_refused_at_once(path: Path, tmp_path: Path) -> None:
    (tmp_path / "damaged").write_text("{")
    for profile, options, said in (
        (tmp_path / "damaged", (), "is damaged, or is no profile; remove it, and have it saved anew"),
        (tmp_path, (), "cannot be read: Is a directory"),
        (tmp_path / "no" / "where", (), f"{tmp_path / 'no'} is no folder that you can write to; make it first"),
        (tmp_path / "new", ("--mode", "eager"), "--mode eager compiles and captures nothing"),
    ):
        code, line = failed("serve", "demo", "--uds", str(path), "--profile", str(profile), *options)
        assert (code, line.startswith(f"error: --profile {profile}"), said in line) == (2, True, True), line
    assert not path.exists()
