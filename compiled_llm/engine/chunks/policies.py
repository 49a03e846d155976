"""The policy of chunks that an engine has, by its option ``max_step_ms``."""

from __future__ import annotations

from typing import Literal

from compiled_llm.engine.chunks.state import ChunkPolicy
from compiled_llm.engine.chunks.stretched import Stretched
from compiled_llm.engine.chunks.whole import Whole
from compiled_llm.engine.chunks.within import Within

MaxStep = float | Literal["auto"] | None


def policy_of(max_step_ms: MaxStep, device: str) -> ChunkPolicy:
    """Return the policy that an option stands for, on a type of device."""
    if max_step_ms is None or max_step_ms == "auto":
        return Stretched() if max_step_ms == "auto" and device == "cuda" else Whole()
    return Within(max_step_ms)
