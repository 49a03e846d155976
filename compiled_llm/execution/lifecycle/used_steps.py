"""Steps that requests use: which exist here, and how they are prepared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set

from compiled_llm.compilation.artifacts.profile import Profile
from compiled_llm.compilation.graphs.captured_shapes import buckets_up_to
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.execution.batch import ExtraInputs
from compiled_llm.execution.lifecycle.runner_lifecycle import prepare
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.prefill.embedded import EmbeddedTokens


def used_steps(used: Mapping[StepKey | str, int]) -> dict[StepKey, int]:
    """Return how often steps were used that can be prepared ahead: of decode, those of one new token a row."""
    # Those that give more outputs, or the logits of all tokens, are prepared when they are asked for. One that feeds in
    # guesses stands for a plain one of as many rows: what guesses prepares its own steps for the same rows.
    uses: Counter[StepKey] = Counter()
    for key, count in used.items():
        if not isinstance(key, StepKey) or key.phase == "scoring":
            continue
        if key.drafter:
            uses[StepKey.decode(key.rows)] += count
        elif key.is_plain and (key.phase != "decode" or key.new_tokens_per_row == 1):
            uses[key] += count
    return dict(uses)


def prepare_profile(model_runner: ModelRunner, profile: Profile, report: Callable[[str], None]) -> None:
    """Compile, and on CUDA capture, the steps of a profile, the most used if there is no room for all."""
    # Room that is left then is for a few CUDA graphs in which all others can run. ValueError, with nothing prepared, if
    # it names a step that does not exist here.
    here = _steps_here(model_runner)
    for step in profile.uses:
        _check_known(step, here)
    keys = [step for step, _ in profile.by_use]
    fits = model_runner.prefill.shapes.fits
    steps = [key for key in keys if key.phase == "decode" or (key.phase == "prefill" and fits(key))]
    embedded = [EmbeddedTokens.none(model_runner.state.facts.model)] if profile.embeddings else []
    _prepare_steps(model_runner, steps, embedded, report)
    model_runner.thread.call(model_runner.prefill.launches.capture_anchors)  # all other steps run in these
    model_runner.thread.call(model_runner.steps.capture_anchors)
    if samplings := sorted({key.rows for key in keys if key.phase == "sampling"}):
        report("preparing sampling of tokens under grammars")
        model_runner.thread.call(model_runner.prepare_deferred, samplings)


def _prepare_steps(
    model_runner: ModelRunner, steps: Sequence[StepKey], extras: Sequence[ExtraInputs], report: Callable[[str], None]
) -> None:
    """Prepare steps; the most used ones are given first."""
    nbytes, most = model_runner.state.step_table.budget
    steps = steps[:most]
    if nbytes is None:
        decodes = sorted(step for step in steps if step.phase == "decode")
        shapes = sorted(step for step in steps if step.phase == "prefill")
        prepare(model_runner, decodes, [shapes], extras, report, anchors=False)
        return
    # The most used ones last: the first captured is the first to make room.
    prepare(model_runner, [], [], extras, report, anchors=False)
    for number, step in enumerate(reversed(steps), start=1):
        report(f"preparing what requests use ({number} of {len(steps)})")
        if step.phase == "decode":
            prepare(model_runner, [step], [], anchors=False)
        else:
            model_runner.thread.call(model_runner.prefill.launches.capture_shapes, [step])


def _steps_here(model_runner: ModelRunner) -> set[StepKey]:
    buckets = buckets_up_to(model_runner.config.max_batch_size)
    samplings = (StepKey.sampling(bucket, masked) for bucket in buckets for masked in (False, True))
    decodes = {StepKey.decode(bucket) for bucket in buckets}
    if model_runner.state.sharing is not None:
        decodes |= {StepKey.decode(bucket, shares=True) for bucket in buckets if bucket > 1}
    return {*decodes, *samplings, *model_runner.prefill.shapes.all()}


def _check_known(step: StepKey, here: Set[StepKey]) -> None:
    if step in here:
        return
    known = [other for other in here if other.phase == step.phase]
    numbers = (
        f"{name} {', '.join(map(str, sorted({getattr(other, field) for other in known})))}"
        for name, field in (("tokens", "tokens"), ("rows", "rows"), ("schedule", "variant"))
    )
    there_is = "there are " + "; ".join(numbers) if known else "there is no such phase"
    raise ValueError(f"profile: it names a {step}; here {there_is}")
