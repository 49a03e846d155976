"""Where nobody has run the tests yet, one worker of ``pytest -n`` collects before all others.

Each would compile the same files to bytecode, which takes as long as all else that is done before the first test.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[2]
PATIENCE = 120.0
"""Seconds after which others go on: the first worker has died."""


class FirstWorker:
    """A pytest plugin, of the process that starts workers and of each of them."""

    def __init__(self, config: pytest.Config) -> None:
        own: dict[str, Any] = getattr(config, "workerinput", {})
        self.is_first = own.get("workerid") == "gw0"
        self.collected = Path(own["collected"]) if "collected" in own else None
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        if not own and not any(TESTS.glob("**/__pycache__/test_*.pyc")):
            self.folder = tempfile.TemporaryDirectory(prefix="first_worker_")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Name the file by which the first worker says that it has collected."""
        if self.folder:
            node.workerinput["collected"] = f"{self.folder.name}/collected"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        if self.collected and not self.is_first:
            end = time.monotonic() + PATIENCE
            while not self.collected.exists() and time.monotonic() < end:
                time.sleep(0.1)
        found = yield
        if self.collected and self.is_first:
            self.collected.touch()
        return found
