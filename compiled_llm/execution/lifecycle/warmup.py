"""Prepares a model before the first request, for named sizes or for the steps that earlier requests have used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from compiled_llm.compilation.artifacts.artifacts import Artifacts
from compiled_llm.compilation.artifacts.made_for import sizes_made_for
from compiled_llm.compilation.artifacts.manifest import MadeFor
from compiled_llm.compilation.artifacts.profile import Profile
from compiled_llm.compilation.graphs.captured_shapes import buckets_up_to
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.program import PREFILL_EMBEDDED
from compiled_llm.config import WrapConfig
from compiled_llm.execution.lifecycle.runner_lifecycle import ModelRunnerLifecycle, prepare
from compiled_llm.execution.lifecycle.used_steps import prepare_profile, used_steps
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.reporting.events import Events
from compiled_llm.model.facts import ModelFacts

Sizes = int | Iterable[int] | Literal["auto"] | None
"""Rows of steps: one number or several, the likely ones, or all."""

ProfilePath = str | os.PathLike[str]

Report = Callable[[str], None]
"""Takes each preparation, in words."""

_MAX_ON_CPU = 8
"""Rows of the largest step that ``"auto"`` prepares on a CPU: nothing is captured there, and each size takes long."""


class StepList(NamedTuple):
    """Steps of so many rows with their prefills, or exactly the steps of a profile."""

    sizes: Sequence[int] = ()
    profile: Profile | None = None

    @property
    def rows(self) -> Sequence[int]:
        """Of decode steps."""
        if self.profile is None:
            return self.sizes
        return sorted({step.rows for step in self.profile.uses if step.phase == "decode"})

    @property
    def masked(self) -> bool:
        """Whether it samples tokens under masks."""
        return self.profile is not None and self.profile.masked


def quiet(doing: str) -> None:
    """Report nothing."""


class Warmup:
    """The preparation of a model before its first request; it saves what its requests have used."""

    def __init__(
        self,
        facts: ModelFacts,
        config: WrapConfig,
        runner_lifecycle: ModelRunnerLifecycle,
        events: Events,
        artifacts: Artifacts | None,
    ) -> None:
        self._facts = facts
        self._config = config
        self._runner_lifecycle = runner_lifecycle
        self._events = events
        self._artifacts = artifacts
        self._earlier: Profile | None = None

    def wanted(self, name: str, sizes: Sizes, profile: ProfilePath | None, max_rows: int) -> StepList:
        """Return the steps to prepare, for ``sizes`` of argument ``name`` or a profile's, or raise ValueError."""
        # Whether there can be so many rows is not checked yet.
        if profile is not None:
            if sizes is not None:
                raise ValueError(f"{name}={sizes!r}, profile={os.fspath(profile)!r}: give one of them")
            return StepList(profile=self.read(profile))
        if sizes == "auto":
            kept = None if self._artifacts is None else self._artifacts.profile
            return StepList(self._auto(max_rows)) if kept is None else StepList(profile=kept)
        if isinstance(sizes, str):
            raise ValueError(f"{name}={sizes!r}: give numbers of rows, 'auto', or profile=PATH in its place")
        if sizes is None:
            return StepList(buckets_up_to(max_rows))
        return StepList([*sizes] if isinstance(sizes, Iterable) else [sizes])

    def _auto(self, max_rows: int) -> list[int]:
        all_sizes = buckets_up_to(max_rows)
        on_cpu = self._facts.model.device.type == "cpu"
        return [size for size in all_sizes if size <= _MAX_ON_CPU] if on_cpu else all_sizes

    def prepare(self, wanted: StepList, report: Report) -> None:
        """Compile, and on CUDA capture, the wanted steps; ValueError if a profile names one that is not here."""
        model_runner = self._runner_lifecycle.current()
        model_runner.thread.call(model_runner.graph_manager.make_room)
        shared = list[StepKey]()
        if model_runner.graph_manager.eager and (compiling := self._runner_lifecycle.compiling) is not None:
            compiling.begin(self._decodes(model_runner, wanted), self._runner_lifecycle.rows)
            self._earlier = wanted.profile
        elif wanted.profile is not None:
            prepare_profile(model_runner, wanted.profile, report)
            self._earlier = wanted.profile
        else:
            decodes = self._decodes(model_runner, wanted)
            shared = [step for step in decodes if step.shares]
            plain = [step for step in decodes if not step.shares]
            prefills = {tuple(model_runner.prefill.shapes.of_rows(size)) for size in wanted.sizes}
            prepare(model_runner, plain, prefills, report=report)
        if model_runner.state.sharing is not None:  # requests which begin to share pages do not wait for it then
            report("preparing steps of requests that share pages")
            step = StepKey.decode(model_runner.config.max_batch_size, shares=True)
            model_runner.thread.call(model_runner.steps.compile, step)
            model_runner.thread.call(model_runner.steps.make_ready_with_room, shared)
        self._events.warmed_up()

    @staticmethod
    def _decodes(model_runner: ModelRunner, wanted: StepList) -> list[StepKey]:
        if wanted.profile is not None:
            return sorted(step for step in wanted.profile.uses if step.phase == "decode")
        steps = {model_runner.steps.decode_of(size) for size in wanted.sizes}
        if (sharing := model_runner.state.sharing) is not None:
            steps |= {StepKey.decode(step.rows, shares=True) for step in steps if sharing.may_pay(step.rows)}
        return sorted(steps)

    # ---- profiles

    @property
    def uses(self) -> int:
        """How many steps calls have used so far."""
        return self._events.used.total()

    def read(self, path: ProfilePath) -> Profile:
        """Read a profile; ValueError if it is none, or was not saved for this model."""
        self._check_mode()
        profile = Profile.read(path)
        profile.check(self._made_for())
        return profile

    def save(self, path: ProfilePath) -> None:
        """Save the steps that requests have used so far, as ``Runtime.save_profile``."""
        self._check_mode()
        self._runner_lifecycle.check_weights()
        used = self._events.used.copy()
        if not used:
            raise RuntimeError("save_profile: no step has run yet; save a profile after the first requests")
        profile = Profile(self._made_for(), used_steps(used), used[PREFILL_EMBEDDED])
        profile.after(self._earlier).save(path)

    def _check_mode(self) -> None:
        if self._config.mode == "eager":
            raise ValueError("profile: mode='eager' compiles and captures nothing; use another mode")

    def _made_for(self) -> MadeFor:
        return sizes_made_for(self._facts.model, self._facts.model_class, self._config, self._runner_lifecycle.rows)
