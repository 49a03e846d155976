"""Shows what an engine process does while it is not ready."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from compiled_llm.execution.reporting.progress import ProgressDisplay

if TYPE_CHECKING:  # need the extra `server`
    from compiled_llm.client import Client
    from compiled_llm.protocol.messages import Ready

_LOOK = 0.2  # seconds between two looks at what it does


def wait_until_ready(client: Client, quiet: bool) -> Ready:
    """Wait until an engine process, or its successor, is ready, and return what it says.

    Raises:
        EngineDeadError: there is no engine process.
        EngineProcessError: it does not want to talk to this client.
    """
    with suppress(TimeoutError):
        return client.wait_until_ready(_LOOK)
    with ProgressDisplay(not quiet).task(_doing(client)) as now:
        while True:
            with suppress(TimeoutError):
                return client.wait_until_ready(_LOOK)
            now(_doing(client))


def _doing(client: Client) -> str:
    return f"the engine process is not ready: {client.doing}"
