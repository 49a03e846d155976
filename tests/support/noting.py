"""Calls of a method, noted while a test runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from compiled_llm.execution.steps.launch import Launch


def note_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any]) -> list[Any]:
    """Note each call of a method, before it runs: what ``note`` makes of its arguments."""
    noted: list[Any] = []
    own = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        noted.append(note(*args, **kwargs))
        return own(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return noted


def note_decode_steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Note the bucket of each decode step, before it runs: of those that are made, and of those that are repeated."""
    ran: list[Any] = []
    note_calls(monkeypatch, Launch, "__call__", lambda own: own.key.phase == "decode" and ran.append(own.key.rows))
    return ran
