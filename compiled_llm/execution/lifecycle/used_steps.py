"""Steps that requests use, as profiles name them: which there are here, and how they are prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from compiled_llm.compilation.artifacts.profile import Profile, UsedStep
from compiled_llm.compilation.graphs.rolling import Key, SamplingKey, described
from compiled_llm.compilation.inputs import Shape
from compiled_llm.execution.device_model import ModelRunner
from compiled_llm.execution.lifecycle.device_side import prepare
from compiled_llm.execution.state.decode_buffers import buckets_up_to


def used_steps(used: Mapping[Key | str, int]) -> dict[UsedStep, int]:
    """Return how often steps were used, as a profile says it."""
    return {UsedStep(*described(key)): uses for key, uses in used.items() if not isinstance(key, str)}


def prepare_profile(device_model: ModelRunner, profile: Profile, report: Callable[[str], None]) -> None:
    """Compile, and on CUDA capture, what a profile names, the most used if there is no room for all.

    What room there is then is for a few CUDA graphs in which all others can run.

    Raises:
        ValueError: it names a step that there is not; nothing has been prepared.
    """
    here = _steps_here(device_model)
    for step in profile.uses:
        _check_known(step, here)
    keys = [here[step] for step, _ in profile.by_use]
    steps = [key for key in keys if not isinstance(key, SamplingKey) and _fits(device_model, key)]
    _prepare_steps(device_model, steps, profile.embeddings > 0, report)
    for phase in (device_model.prefill, device_model.decode):  # what else is needed runs in these
        device_model.thread.call(phase.capture_anchors)
    if samplings := sorted({key.rows for key in keys if isinstance(key, SamplingKey)}):
        report("preparing sampling of tokens under grammars")
        device_model.thread.call(device_model.prepare_deferred, samplings)


def _prepare_steps(
    device_model: ModelRunner, steps: Sequence[int | Shape], embedded: bool, report: Callable[[str], None]
) -> None:
    """Prepare steps, the most used ones being first."""
    nbytes, most = device_model.state.cuda_graphs.budget
    steps = steps[:most]
    if nbytes is None:
        buckets = sorted(step for step in steps if isinstance(step, int))
        shapes = sorted(step for step in steps if isinstance(step, Shape))
        prepare(device_model, buckets, [shapes], embedded, report, anchors=False)
        return
    # The most used ones last: what has to make room is what was captured first.
    prepare(device_model, [], [], embedded, report, anchors=False)
    for number, step in enumerate(reversed(steps), start=1):
        report(f"preparing what requests use ({number} of {len(steps)})")
        if isinstance(step, int):
            prepare(device_model, [step], [], anchors=False)
        else:
            device_model.thread.call(device_model.prefill.capture_shapes, [step])


def _steps_here(device_model: ModelRunner) -> dict[UsedStep, Key]:
    """Return all steps that there may be."""
    buckets = buckets_up_to(device_model.config.max_batch_size)
    samplings = [SamplingKey(bucket, masked) for bucket in buckets for masked in (False, True)]
    keys: list[Key] = [*buckets, *samplings, *device_model.prefill.all_shapes()]
    return {UsedStep(*described(key)): key for key in keys}


def _fits(device_model: ModelRunner, key: int | Shape) -> bool:
    return isinstance(key, int) or device_model.prefill.fits(key)


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
