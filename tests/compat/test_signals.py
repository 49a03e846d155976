"""Handlers of signals are those of ``signal``, read and set beneath it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from compiled_llm.compat.signals import handler_of, set_handler


def own(signum: int, frame: FrameType | None) -> None: ...


@pytest.fixture(autouse=True)
def _handler_restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.core
@pytest.mark.parametrize("handler", [own, signal.default_int_handler, signal.SIG_IGN, signal.SIG_DFL])
def test_a_handler_is_what_signal_has_set(handler) -> None:
    signal.signal(signal.SIGINT, handler)
    assert handler_of(signal.SIGINT) == handler


@pytest.mark.core
@pytest.mark.parametrize("handler", [own, signal.default_int_handler])
def test_signal_says_what_was_set(handler) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert set_handler(signal.SIGINT, handler) == before
    assert signal.getsignal(signal.SIGINT) is handler
