"""What a client raises of its engine process."""

from __future__ import annotations

from compiled_llm.protocol.messages import Kind


class EngineProcessError(RuntimeError):
    """What an engine process cannot do, or has failed of."""


class EngineBusyError(EngineProcessError):
    """As many requests wait as may; try again later."""


class EngineDeadError(EngineProcessError):
    """There is no engine process, or no more: requests that it had not ended are lost."""


def refusal(kind: Kind, message: str) -> Exception:
    """Return the error that a request ends with which is refused, or has failed."""
    if kind == "invalid":
        return ValueError(message)
    return (EngineBusyError if kind == "full" else EngineProcessError)(message)
