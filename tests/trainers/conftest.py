"""Without TRL these tests are skipped; `tox -e trainers` installs it."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Skip files that import TRL."""
    try:
        import trl  # noqa: F401
    except ImportError:
        return True if collection_path.name.startswith("test_") else None
    return None


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
