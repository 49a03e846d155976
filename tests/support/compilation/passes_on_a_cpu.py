"""Passes that run on CUDA alone, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_llm.compilation import programs as programs
from compiled_llm.compilation.backend import Pass
from compiled_llm.config import WrapConfig


def let_passes_run_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_on_cuda(config: WrapConfig, device: torch.device, *others: Any) -> list[Pass]:
        return passes(config, torch.device("cuda"), *others)

    passes = programs.passes_for
    monkeypatch.setattr(programs, "passes_for", as_on_cuda)
