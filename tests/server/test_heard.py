"""Programs can tell an engine process that hangs from one that is busy: clients of both kinds count its heartbeat."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from compiled_llm.client import AsyncClient, Client
from support.server.engine_processes import until
from support.server.scripted import scripted, tool_tokenizer


def test_a_heartbeat_is_heard_without_a_request(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with scripted(path, tool_tokenizer()), Client(path) as client:
        before = client.heard
        until(lambda: client.heard > before)

        async def listening() -> None:
            async with AsyncClient(path) as other:
                begun = other.heard
                while other.heard == begun:
                    await asyncio.sleep(0.01)

        asyncio.run(asyncio.wait_for(listening(), 30))


def test_who_waits_with_a_timeout_does_not_wait_for_a_silent_engine_process(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with scripted(path, tool_tokenizer()) as script, Client(path) as client:
        handle = client.submit([1, 2, 3])  # the script answers no question about figures
        assert len(handle.result(timeout=30).outputs) == 1
        assert script.asked
        with pytest.raises(TimeoutError, match=r"the engine process has not answered for 0\.01 s"):
            client.stats(timeout=0.01)
