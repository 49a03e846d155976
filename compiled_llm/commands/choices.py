"""What `--device` and `--dtype` take, in every command."""

from __future__ import annotations

from enum import Enum


class Dtype(str, Enum):
    """What `--dtype` takes."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Device(str, Enum):
    """What `--device` takes."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
