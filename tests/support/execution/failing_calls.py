"""Calls that fail, once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest


def fail_once(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException, after: int, once_done: bool = False
) -> None:
    """Raise in ``owner.name``: at its n-th call, before it has done anything or after all."""
    original, calls = getattr(owner, name), itertools.count(1)

    def fails(*args: Any, **kwargs: Any) -> Any:
        now = next(calls) == after
        if now and not once_done:
            raise error
        result = original(*args, **kwargs)
        if now:
            raise error
        return result

    monkeypatch.setattr(owner, name, fails)
