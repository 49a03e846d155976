"""Calls of a method, noted while a test runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def note_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any]) -> list[Any]:
    """Note each call of a method, before it runs: what ``note`` makes of its arguments."""
    noted: list[Any] = []
    own = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        noted.append(note(*args, **kwargs))
        return own(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return noted
