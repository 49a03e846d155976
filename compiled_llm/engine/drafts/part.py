"""The functions by which the rest of the package uses speculation."""

# The command line imports this module without torch, so what needs torch is imported once a loop is made.

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from compiled_llm.engine.drafts.config import SpeculativeConfig, check_model as check_model

if TYPE_CHECKING:
    from compiled_llm.engine.drafts import part as this
    from compiled_llm.engine.drafts.engine_drafts import EngineDrafts
    from compiled_llm.engine.loop_settings import LoopSettings
    from compiled_llm.engine.parts import DraftsPart
    from compiled_llm.engine.steps.loop import LoopDraftsPart
    from compiled_llm.execution.lifecycle.runtime import Runtime
    from compiled_llm.execution.lifecycle.warmup import Report
    from compiled_llm.execution.model_runner import ModelRunner

    checked: DraftsPart = this
    checked_for_loops: LoopDraftsPart = this

config_of = SpeculativeConfig.of


def check_memory(runtime: Runtime, rows: int) -> None:
    """Raise ValueError if memory lacks for the texts of so many rows, as far as that is known now."""
    from compiled_llm.engine.drafts.engine_drafts import check_memory

    check_memory(runtime, rows)


def drafts_of(model_runner: ModelRunner, settings: LoopSettings) -> EngineDrafts:
    """Return the guesses of a loop with these settings; ValueError if memory lacks for the texts to look in."""
    from compiled_llm.engine.drafts.engine_drafts import EngineDrafts

    return EngineDrafts(model_runner, settings)


def prepare(model_runner: ModelRunner, config: SpeculativeConfig, rows: Iterable[int], report: Report) -> None:
    """Compile, and on CUDA capture, the steps that guess for so many rows, as ``engine_drafts.prepare``."""
    from compiled_llm.engine.drafts import engine_drafts

    engine_drafts.prepare(model_runner, config, rows, report)
