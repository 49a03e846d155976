"""Steps that requests use, by the names in profiles: which exist here, and how they are prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from compiled_llm.compilation.artifacts.profile import Profile, UsedStep
from compiled_llm.compilation.graphs.rolling import Key, SamplingKey, described
from compiled_llm.compilation.inputs import Shape
from compiled_llm.execution.lifecycle.runner_lifecycle import prepare
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.state.decode_buffers import buckets_up_to


def used_steps(used: Mapping[Key | str, int]) -> dict[UsedStep, int]:
    """Return how often steps were used, by their names in profiles."""
    return {UsedStep(*described(key)): uses for key, uses in used.items() if not isinstance(key, str)}


def prepare_profile(model_runner: ModelRunner, profile: Profile, report: Callable[[str], None]) -> None:
    """Compile, and on CUDA capture, the steps of a profile, the most used if there is no room for all.

    Room that is left then is for a few CUDA graphs in which all others can run.

    Raises:
        ValueError: it names a step that does not exist here; nothing has been prepared.
    """
    here = _steps_here(model_runner)
    for step in profile.uses:
        _check_known(step, here)
    keys = [here[step] for step, _ in profile.by_use]
    steps = [key for key in keys if not isinstance(key, SamplingKey) and _fits(model_runner, key)]
    _prepare_steps(model_runner, steps, profile.embeddings > 0, report)
    for phase in (model_runner.prefill, model_runner.decode):  # all other steps run in these
        model_runner.thread.call(phase.capture_anchors)
    if samplings := sorted({key.rows for key in keys if isinstance(key, SamplingKey)}):
        report("preparing sampling of tokens under grammars")
        model_runner.thread.call(model_runner.prepare_deferred, samplings)


def _prepare_steps(
    model_runner: ModelRunner, steps: Sequence[int | Shape], embedded: bool, report: Callable[[str], None]
) -> None:
    """Prepare steps; the most used ones are given first."""
    nbytes, most = model_runner.state.cuda_graphs.budget
    steps = steps[:most]
    if nbytes is None:
        buckets = sorted(step for step in steps if isinstance(step, int))
        shapes = sorted(step for step in steps if isinstance(step, Shape))
        prepare(model_runner, buckets, [shapes], embedded, report, anchors=False)
        return
    # The most used ones last: the first captured is the first to make room.
    prepare(model_runner, [], [], embedded, report, anchors=False)
    for number, step in enumerate(reversed(steps), start=1):
        report(f"preparing what requests use ({number} of {len(steps)})")
        if isinstance(step, int):
            prepare(model_runner, [step], [], anchors=False)
        else:
            model_runner.thread.call(model_runner.prefill.capture_shapes, [step])


def _steps_here(model_runner: ModelRunner) -> dict[UsedStep, Key]:
    buckets = buckets_up_to(model_runner.config.max_batch_size)
    samplings = [SamplingKey(bucket, masked) for bucket in buckets for masked in (False, True)]
    keys: list[Key] = [*buckets, *samplings, *model_runner.prefill.all_shapes()]
    return {UsedStep(*described(key)): key for key in keys}


def _fits(model_runner: ModelRunner, key: int | Shape) -> bool:
    return isinstance(key, int) or model_runner.prefill.fits(key)


def _check_known(step: UsedStep, here: Mapping[UsedStep, Key]) -> None:
    if step in here:
        return
    known = [other for other in here if other.phase == step.phase]
    numbers = (
        f"{name} {', '.join(map(str, sorted({getattr(other, name) for other in known})))}"
        for name in ("tokens", "rows", "variant")
    )
    there_is = "there are " + "; ".join(numbers) if known else "there is no such phase"
    raise ValueError(f"profile: it names a {step}; here {there_is}")
