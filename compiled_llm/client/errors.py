"""Errors of an engine process, as its clients raise them."""

from __future__ import annotations

from compiled_llm.protocol.messages import Kind


class EngineProcessError(RuntimeError):
    """An engine process has failed, or cannot do what it was asked."""


class EngineBusyError(EngineProcessError):
    """A refusal: as many requests wait as may; try again later."""


class EngineDeadError(EngineProcessError):
    """The loss of an engine process, or its absence; requests that it had not ended are lost."""


def refusal(kind: Kind, message: str) -> Exception:
    """Return the error that ends a request which was refused or has failed."""
    if kind == "invalid":
        return ValueError(message)
    return (EngineBusyError if kind == "full" else EngineProcessError)(message)
