"""What a client raises of its generator."""

from __future__ import annotations

from compiled_llm.protocol.messages import Kind


class GeneratorError(RuntimeError):
    """What a generator cannot do, or has failed of."""


class GeneratorBusyError(GeneratorError):
    """As many requests wait as may; try again later."""


class GeneratorLostError(GeneratorError):
    """There is no generator, or no more: requests that it had not ended are lost."""


def refusal(kind: Kind, message: str) -> Exception:
    """Return the error that a request ends with which is refused, or has failed."""
    if kind == "invalid":
        return ValueError(message)
    return (GeneratorBusyError if kind == "full" else GeneratorError)(message)
