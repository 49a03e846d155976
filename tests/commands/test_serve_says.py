"""What ``serve`` writes to stderr: warnings when it starts, and a log that a terminal does not obey."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from compiled_llm.commands.loading.source import Source
from compiled_llm.commands.serve import http as serve_http
from compiled_llm.commands.serve.http import HttpFlags, run_with_api_server, show_log
from compiled_llm.server import serving


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """The server's, as it was before."""
    logger = serve_http.logger
    before = list(logger.handlers), logger.level, logger.propagate
    yield logger
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.mark.parametrize(
    ("mode", "whom"),
    [(0o600, None), (0o400, None), (0o640, "its group"), (0o644, "all users"), (0o444, "all users")],
)
def test_a_file_of_keys_that_others_may_read_is_told_of_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, whom: str | None, log: logging.Logger
) -> None:
    async def serve(*_: object) -> None:
        """Serve no client."""

    monkeypatch.setattr(serving, "serve", serve)
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-the-tests")
    keys.chmod(mode)
    lines: list[str] = []
    flags = HttpFlags(port=0, api_key_file=keys)
    run_with_api_server(flags, Source("tiny", "tiny"), None, ["serve", "tiny"], 1.0, lines.append)
    assert lines[0].startswith("serving tiny at http://127.0.0.1:")
    told = [line for line in lines if "may read the keys" in line]
    assert len(told) == (whom is not None)
    assert all(line.startswith(f"--api-key-file {keys}: {whom} of this machine may read the keys") for line in told)


def test_a_log_moves_no_cursor_and_turns_no_text(log: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    show_log()
    log.info("compiled_llm: %s GET / 200", "id\x1b[2J\x9b\u202e\u2066")
    assert capsys.readouterr().err == r"compiled_llm: id\x1b[2J\x9b\u202e\u2066 GET / 200" + "\n"
