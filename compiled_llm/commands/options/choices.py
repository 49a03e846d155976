"""Values of options that several commands have: `--device`, `--dtype` and others, and lists of integers."""

from __future__ import annotations

from enum import Enum


class Dtype(str, Enum):
    """Values of `--dtype`."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    half = "half"
    float = "float"


class Device(str, Enum):
    """Values of `--device`."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def integers(option: str, text: str) -> list[int]:
    """Return the integers of a comma-separated list; ValueError if one is not an integer from 1."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{option} {text!r}: give comma-separated integers") from None
    if any(number < 1 for number in numbers):
        raise ValueError(f"{option} {text!r}: each must be at least 1")
    return numbers
