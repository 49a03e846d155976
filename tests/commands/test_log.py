"""What `compiled-llm serve` writes to stderr."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from compiled_llm.commands.loading.source import Source
from compiled_llm.commands.serve.http import HttpFlags, run_with_api_server
from compiled_llm.commands.serve.log import show_log
from compiled_llm.server import serving
from support.server.engine_processes import COMMAND, PATIENCE, until
from support.server.under_load import OPTIONS


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """The server's, as it was before; uvicorn's and the root, too."""
    loggers = [logging.getLogger(name) for name in ("compiled_llm.server", "uvicorn", None)]
    before = [(list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    yield loggers[0]
    for logger, state in zip(loggers, before, strict=True):
        logger.handlers[:], logger.level, logger.propagate = state


@pytest.mark.parametrize(
    ("mode", "whom"), [(0o600, None), (0o400, None), (0o640, "its group"), (0o644, "all users"), (0o444, "all users")]
)
def test_a_file_of_keys_that_others_may_read_is_told_of_at_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: int,
    whom: str | None,
    log: logging.Logger,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def serve(*_: object) -> None:
        """Serve no client."""

    monkeypatch.setattr(serving, "serve", serve)
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-the-tests")
    keys.chmod(mode)
    flags = HttpFlags(port=0, api_key_file=keys)
    run_with_api_server(flags, Source("tiny", "tiny"), None, ["serve", "tiny"], 1.0, ("info", "text"))
    lines = [line.partition(" compiled_llm: ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines[0].startswith("serving tiny at http://127.0.0.1:")
    told = [line for line in lines if "may read the keys" in line]
    assert len(told) == (whom is not None)
    assert all(line.startswith(f"--api-key-file {keys}: {whom} of this machine may read the keys") for line in told)


def test_a_log_moves_no_cursor_and_turns_no_text(log: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "id\x1b[2J\x9b\u202e\u2066"
    for form in ("text", "json"):
        show_log("info", form)
        log.info("compiled_llm: %s GET / 200", evil, extra={"request": {"id": evil}})
        log.handlers.clear()
    text, as_json = capsys.readouterr().err.splitlines()
    time, said = text.split(" INFO ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", time)
    assert said == r"compiled_llm: id\x1b[2J\x9b\u202e\u2066 GET / 200"
    assert as_json.isprintable()
    assert as_json.isascii()
    record = json.loads(as_json)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", record.pop("time"))
    assert record == {"level": "info", "message": f"{evil} GET / 200", "id": evil}


def test_json_is_all_that_anything_in_the_process_says(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # and put it back
    show_log("info", "json")
    log.info("compiled_llm: ready")
    other = logging.getLogger("a.package")
    other.warning("a header\nof a client")
    other.info("details")
    own = logging.getLogger("a.package.with.a.handler")
    own.propagate = False
    own.addHandler(logging.StreamHandler())
    own.warning("two\nlines")
    print("half", end=" ", file=sys.stderr)
    print("a line", file=sys.stderr, flush=True)
    records = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(record["level"], record["message"]) for record in records] == [
        ("info", "ready"),
        ("warning", "a header\nof a client"),
        ("warning", "two"),
        ("warning", "lines"),
        ("warning", "half a line"),
    ]


def test_what_is_less_than_the_level_is_left_out(log: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    show_log("warning", "text")
    for level in (logging.INFO, logging.WARNING):
        log.log(level, "compiled_llm: said")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" WARNING compiled_llm: said")


@pytest.mark.whole
@pytest.mark.parametrize("mode", ["eager", pytest.param("compile", marks=[pytest.mark.slow, pytest.mark.whole])])
def test_a_server_that_starts_says_over_http_what_it_says_on_stderr(
    mode: str, model_folder: Path, tmp_path: Path
) -> None:
    options = ["--mode", mode, "--no-eager-first", "--warmup", "1", "--kv-memory", "400 tokens"]
    file, heard = tmp_path / "log", set()
    with (
        file.open("w") as stderr,
        subprocess.Popen([COMMAND, "serve", str(model_folder), "--port", "0", *options], stderr=stderr) as server,
    ):
        try:
            until(lambda: "/v1" in file.read_text())
            url = re.findall(r"at (http://\S+)/v1", file.read_text())[0]
            with httpx.Client(timeout=PATIENCE) as client:
                while not (found := client.get(f"{url}/ready").json())["ready"]:
                    heard.add(found["doing"])
                    time.sleep(0.05)  # or asking and answering would take a core from it
        finally:
            server.kill()
    shown = set(re.findall(r"^compiled_llm: (.+)$", file.read_text(), re.MULTILINE))
    brief = {doing for doing in heard if doing.startswith("preparing kernels")} if mode == "eager" else set()
    assert heard - {"starting"} - brief <= shown, (heard, shown)
    assert "importing torch and transformers" in heard
    if mode == "compile":  # it takes longer than it takes to ask
        assert "tracing prefill (1 of 2)" in heard
        assert any("(2 of 2)" in doing for doing in heard)


@pytest.mark.whole
def test_json_is_all_that_a_server_and_its_engine_process_write(model_folder: Path, tmp_path: Path) -> None:
    options = ["--port", "0", "--log-format", "json", *OPTIONS]
    file = tmp_path / "log"
    with (
        file.open("w") as stderr,
        subprocess.Popen([COMMAND, "serve", str(model_folder), *options], stderr=stderr) as server,
    ):
        try:
            until(lambda: "/v1" in file.read_text())
            url = re.findall(r"at (http://\S+)/v1", file.read_text())[0]
            assert httpx.get(f"{url}/ready", timeout=PATIENCE).status_code == 503
            until(lambda: '"ready"' in file.read_text())
            for path in ("/health", "/ready", "/v1/models"):
                answer = httpx.get(f"{url}{path}", timeout=PATIENCE)
            server.terminate()
            assert server.wait(PATIENCE) == 0
        finally:
            server.kill()
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(record["time"] and record["level"] == "info" for record in records)
    (asked,) = [record for record in records if "path" in record]
    assert (asked["method"], asked["path"], asked["status"]) == ("GET", "/v1/models", 200)
    assert asked["id"] == answer.headers["x-request-id"]
    assert len(asked["id"]) == len("req-") + 12
    assert asked["seconds"] > 0
