"""Prepares what an engine needs before its first request besides the steps themselves."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_llm.compat.huggingface import sees_images
from compiled_llm.engine.parts import DRAFTS, IMAGES
from compiled_llm.engine.steps.taps import engine_taps
from compiled_llm.engine.thread.engine_thread import EngineThread
from compiled_llm.execution.lifecycle.runtime import Runtime
from compiled_llm.execution.lifecycle.warmup import Report, StepList
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.features import feature, needed


def prepare_images(model_runner: ModelRunner, report: Report) -> None:
    """Prepare prompts with images, if the model reads some, in steps."""
    images = feature(IMAGES) if sees_images(model_runner.state.facts.model) else None
    if images is not None:
        images.prepare(model_runner, report)


def warm_up(
    runtime: Runtime,
    engine_thread: EngineThread,
    wanted: StepList,
    deferred: Sequence[int],
    report: Report,
    shows: bool = False,
) -> None:
    """Prepare steps and other launches of requests, while none runs."""
    # ``deferred`` are the rows for which deferred sampling is prepared, too; a profile says itself which.
    # ``shows`` prepares prompts with images, if steps read them.
    with engine_thread.paused():
        runtime.warming.prepare(wanted, report)
        model_runner = engine_thread.check.checked_runner()
        for tap in engine_taps():
            tap.prepare(model_runner)
        if (speculation := engine_thread.placed.settings.speculation) is not None:
            needed(DRAFTS).prepare(model_runner, speculation, wanted.rows, report)
        if shows:
            prepare_images(model_runner, report)
        model_runner.thread.call(model_runner.prepare_deferred, deferred)
