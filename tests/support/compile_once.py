"""Functions that are compiled once and forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_llm.compat.torch import dynamo


def double(x: Tensor) -> Tensor:
    return x * 2


def compile_once(function: Callable[[Tensor], Tensor], backend: str, options: dict[str, Any] | None = None) -> None:
    torch.compile(function, backend=backend, options=options)(torch.zeros(3))
    dynamo.forget([function])
