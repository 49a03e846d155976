"""The figures of one answer, in words."""

from __future__ import annotations


def answer_figures(tokens: int, seconds: float, first: float | None) -> str:
    """Return how long an answer took, in seconds: to its first token, if there was one, and from there on."""
    said = f"{tokens} token{'s' * (tokens != 1)} in {seconds:.2f} s"
    if first is None:
        return said
    said += f", the first after {first:.2f} s"
    return said if (speed := decode_speed(tokens, seconds, first)) is None else f"{said}, then {speed:.1f} tokens/s"


def decode_speed(tokens: int, seconds: float, first: float | None) -> float | None:
    """Return the tokens per second after the first one; None if there were none. Arguments as ``answer_figures``."""
    return (tokens - 1) / (seconds - first) if first is not None and tokens > 1 and seconds > first else None
