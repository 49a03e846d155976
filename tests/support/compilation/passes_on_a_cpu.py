"""Passes that run on CUDA alone, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_llm.compilation import programs as programs
from compiled_llm.compilation.backend import Pass
from compiled_llm.config import WrapConfig
from compiled_llm_ops.linear import linear


def let_passes_run_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_on_cuda(config: WrapConfig, device: torch.device, *others: Any) -> list[Pass]:
        return passes(config, torch.device("cuda"), *others)

    passes = programs.passes_for
    monkeypatch.setattr(programs, "passes_for", as_on_cuda)
    monkeypatch.setattr(linear, "mkl_is_slow", lambda: True)  # or products are torch's own, and there are none of ours
