"""A source of answers that a test writes by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.outputs import Figures


class NoSource:
    """What a handle asks, if nobody runs its requests: as in an engine, or as in a client."""

    tokenizer_call = "a test"
    failure = RuntimeError

    def __init__(self, is_engine: bool = True) -> None:
        self.is_engine = is_engine

    def end(self, requests: Sequence[Any], index: int | None, reason: str, error: BaseException | None) -> None:
        """Let them go on."""

    def figures(self, requests: Sequence[Any]) -> Figures:
        raise AssertionError("nothing was measured")

    def read(self, handle: RequestHandle) -> None:
        handle.read_text()

    def check_may_wait(self) -> None:
        """Let any thread wait."""

    def check_process(self) -> None:
        """Let any process wait."""
