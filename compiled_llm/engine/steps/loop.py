"""Launches one plan after the other, and reads the tokens of each while the next one runs."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from torch import Tensor

from compiled_llm.compilation.sampling.sampling import NOT_A_TOKEN, Sampling
from compiled_llm.engine.admission.policies import AdmissionName, policy_of
from compiled_llm.engine.chunks.policies import MaxStep, policy_of as chunks_of
from compiled_llm.engine.engine_options import LogprobsMode
from compiled_llm.engine.steps.deferred_sampling import Constrained, LateSampling
from compiled_llm.engine.steps.plan import Chunk, RunsApart, StepPlan
from compiled_llm.engine.steps.request import Request, RequestError
from compiled_llm.engine.steps.scheduler import Scheduler
from compiled_llm.engine.steps.taps import PlanTap, UnreadOutput, engine_taps
from compiled_llm.engine.steps.timing.late_launch import LateLaunch
from compiled_llm.engine.steps.token_budget import TokenBudget
from compiled_llm.execution.accepted import AcceptedTokens
from compiled_llm.execution.batch import Batch, Extension
from compiled_llm.execution.decode.persistent_batch import PersistentBatch
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.state.device_timer import DeviceTimer
from compiled_llm.execution.state.staging import Readback
from compiled_llm.features import needed
from compiled_llm.kvcache.prefix_tree import PrefixTree
from compiled_llm.kvcache.row import Row

logger = logging.getLogger("compiled_llm.engine")

Mixed = Literal["auto"] | bool


class _Launched(NamedTuple):
    """A step whose tokens have not been read, and the requests that they are for."""

    plan: StepPlan
    sampled: list[Request]
    readbacks: list[Readback]
    timer: DeviceTimer | None
    arriving: list[UnreadOutput]
    late: LateSampling | None
    mixed: bool
    accepted: AcceptedTokens | None = None  # those of ``plan.decode``, if some of what they fed in was guessed

    @property
    def arrived(self) -> bool:
        """Whether all tokens that were sampled with it are on the host."""
        here = self.accepted is None or self.accepted.arrived
        return here and all(readback.arrived for readback in self.readbacks)

    @property
    def first_tokens_arrived(self) -> bool:
        """Whether it ran prompts, and all its tokens are sampled and on the host."""
        return bool(self.plan.extend) and self.late is None and self.arrived


class _Prepared(NamedTuple):
    """A plan's batch, and what belongs to it: chunks that run apart, who watches, who is sampled late."""

    plan: StepPlan
    sampled: list[Request]
    batch: Batch
    apart: list[Chunk]
    taps: list[PlanTap]
    constrained: Constrained | None
    new_tokens: int = 1  # that each row of ``batch.decode`` feeds in


class _FailedChunk(NamedTuple):
    """A chunk that ran apart, and has failed alone."""

    request: Request
    error: RequestError

    def hand_out(self) -> dict[Request, RequestError]:
        return {self.request: self.error}


class LoopSettings(NamedTuple):
    """The user's settings of an engine's loop, as of ``Engine``."""

    max_num_seqs: int
    max_step_ms: MaxStep = None
    prefix_cache: bool = True
    logprobs_mode: LogprobsMode = "raw_logprobs"
    watch_model: bool = True
    mixed: Mixed = "auto"
    admission: AdmissionName = "auto"
    speculation: Any = None  # its ``SpeculativeConfig``
    max_model_len: int | None = None


class Loop:
    """An engine's loop: runs a scheduler's plans with a model runner; one thread at a time.

    Attributes:
        ran_prompts: whether the last step ran prompts, whose first tokens ``read_first_tokens`` may read.
        timing: whether steps are timed now, and may be launched late.
        stuck: nothing could run in the last step: missing pages belong to others.
    """

    def __init__(
        self,
        model_runner: ModelRunner,
        scheduler: Scheduler,
        token_budget: TokenBudget,
        prefixes: PrefixTree | None = None,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        mixed: Mixed = "auto",
        drafts: Any = None,
    ) -> None:
        """``drafts`` are ``EngineDrafts``, if tokens are guessed."""
        self.drafts = drafts
        self._token_budget = token_budget
        self.model_runner = model_runner
        self.scheduler = scheduler
        self.prefixes = prefixes
        self._persistent = PersistentBatch(model_runner.state, model_runner.steps, model_runner.readbacks)
        self._taps = [tap(model_runner, scheduler, logprobs_mode) for tap in engine_taps()]
        self._prepared: _Prepared | None = None  # for the last plan
        self._launched: deque[_Launched] = deque()
        self._failed: list[_FailedChunk] = []  # of the step that is being launched
        self._late_launch = LateLaunch()
        self._mixed: Mixed = mixed
        self.steps = self.mixed_steps = 0
        self.ran_prompts = self.timing = False
        self.stuck = False

    @classmethod
    def of(cls, model_runner: ModelRunner, settings: LoopSettings) -> Loop:
        prefixes = model_runner.prefixes if settings.prefix_cache else None
        chunks, most = chunks_of(settings.max_step_ms, model_runner.device.type), model_runner.config.prefill_tokens
        packs_rows = settings.mixed == "auto" and model_runner.mixing_may_pay
        token_budget = TokenBudget(chunks, most, settings.mixed is True, packs_rows)
        slots, admission = model_runner.state.slots.room_for, policy_of(settings.admission)
        drafts = new_tokens = positions = None
        if settings.speculation is not None:
            drafts = needed("drafts", "engine").drafts_of(model_runner, settings)
            new_tokens, positions = drafts.new_tokens, drafts.max_positions
        scheduler = Scheduler(
            *(model_runner.pool, settings.max_num_seqs, token_budget.tokens, prefixes, slots, admission),
            *(new_tokens, positions),
        )
        return cls(model_runner, scheduler, token_budget, prefixes, settings.logprobs_mode, settings.mixed, drafts)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to run and nothing to read."""
        return self.scheduler.idle and not self._launched

    @property
    def underway(self) -> list[Request]:
        """The requests that run, and those whose last tokens have not been read."""
        unread = (request for step in self._launched for request in step.plan.sampled if not request.done)
        return list(dict.fromkeys([*self.scheduler.running, *unread]))

    @property
    def asynchronous(self) -> bool:
        """Whether a step may still run after its launch; else reading late gains nothing."""
        return self.model_runner.device.type != "cpu"

    def step(self, look: bool = False) -> list[Request]:
        """Launch the next plan, if any, read the previous one's tokens, and return requests that got one or ended."""
        # ``look`` looks at the model, which may have changed. The first requests after a rest need not wait for all of
        # that: it goes on while the device runs their step, which is thrown away if the model has changed.
        behind = look and self.asynchronous and not (self._launched or self.scheduler.running)
        if look:
            self.model_runner.thread.call(self.model_runner.graph_manager.check_model)
            if not behind:
                self._forget_changed()
            self._join_generation()
        plan = self.scheduler.plan()
        launched, self.ran_prompts = bool(plan.decode or plan.extend), bool(plan.extend)
        if launched:
            if not self._repeat(plan):
                self.model_runner.thread.call(self._launch, plan)
            self.scheduler.launched(plan)
            self.steps += 1
        if behind and self._forget_changed():
            self.restart()
            self._join_generation()
        self.stuck = not (launched or self.scheduler.idle or self._launched)
        return self._read_all_but(int(self.asynchronous and launched))

    def _forget_changed(self) -> bool:
        return self.model_runner.thread.call(self.model_runner.forget_changed)

    def _join_generation(self) -> None:
        """Let what is computed from now on be kept with the texts that are there."""
        if self.prefixes is not None:
            self.scheduler.generation = self.prefixes.generation

    def _repeat(self, plan: StepPlan) -> bool:
        """Run the last step once more, unless something has changed, or the plan is another."""
        prepared, step = self._prepared, self._persistent.step
        if step is None or prepared is None or prepared.plan is not plan or plan.extend:
            return False
        timer = self._timer_of(plan)
        run = step.run if timer is None else timer.of(step.run)
        arriving = self.model_runner.thread.call_briefly(run, prepared.batch, self._persistent.discard_after_failure)
        if arriving is None:
            return False
        self._note_launched(prepared, [readback for _, readback in arriving], timer)
        return True

    @property
    def due(self) -> float:
        """When the next step has to be launched, on the clock of ``time.perf_counter``; 0.0 for at once."""
        # A request that comes until then runs in it, and not a step later; prompts that are left take longer to launch.
        if not (len(self._launched) == 1 and self.scheduler.has_room_for_more):
            return 0.0
        (step,) = self._launched
        if step.late is not None or step.accepted is not None or not all(chunk.is_last for chunk in step.plan.extend):
            return 0.0
        return self._late_launch.due(self._token_budget.expected(step.plan))

    def read_first_tokens(self) -> list[Request]:
        """Read a step with prompts if it is done: their first tokens need not wait for the next launch."""
        if not (self._launched and self._launched[0].first_tokens_arrived):
            return []
        changed = self._read(self._launched[0])
        self._launched.popleft()
        return changed

    def drain(self) -> list[Request]:
        """Read all that was launched, and let nothing go on; otherwise as ``step``."""
        self.model_runner.end_captures()
        return self._read_all_but(0)

    def restart(self) -> None:
        """Let all requests compute again what they need, after a step that failed: its tokens may be lost."""
        lost = [request for step in self._launched for request in step.plan.sampled]
        self._launched.clear()
        self.scheduler.restart(lost)
        self._prepared = None
        self._persistent.restart()

    def rest(self, wanted: Callable[[], object]) -> None:
        """While nothing runs, capture what steps have missed until something is ``wanted``, and free leaks."""
        if self.idle:
            self.free_leaks()
        if self.scheduler.idle:
            self.model_runner.catch_up(wanted)

    def free_leaks(self) -> None:
        """Free and report rows of requests that have ended."""
        rows, self.scheduler.rows = self.scheduler.rows, set()
        if rows:
            logger.error(
                "compiled_llm: requests that have ended still had %d pages and %d slots, which are given back now; "
                "this is a fault of the engine's, please report it",
                *(sum(len(row.pages) for row in rows), sum(row.slot is not None for row in rows)),
            )
        for row in rows:
            row.free()

    def close(self) -> None:
        self._launched.clear()
        self._persistent.restart()
        if self.prefixes is not None:
            self.prefixes.clear()

    # ---- in the executor

    def _launch(self, plan: StepPlan) -> None:
        began = time.perf_counter()
        if plan.extend:
            self._admit(plan.extend)
        timer, before = self._timer_of(plan), 0.0
        if timer is not None:
            before = self.model_runner.events.preparing.seconds
            timer.start()
        prepared = self._prepared_for(plan)
        # If all tokens are sampled late, there is nothing to read yet.
        all_late = prepared.constrained is not None and len(prepared.constrained.members) == len(prepared.sampled)
        readbacks: list[Any] = []
        for tokens, accepted in self._run(prepared):
            if accepted is not None:  # has the first ones
                readbacks.append(accepted)
                tokens = tokens[len(accepted.rows) * accepted.new_tokens :]
            if len(tokens) and not all_late:
                readbacks.append(self.model_runner.readbacks.start(tokens))
        if timer is not None:
            timer.stop()
            if self.model_runner.events.preparing.seconds > before:  # that takes longer than the device does
                timer = None
        self._note_launched(prepared, readbacks, timer)
        # To capture a step takes half as long again as to launch its kernels: if this one was missing its CUDA graph,
        # the next one has it. After prompts the next step has more rows.
        took = time.perf_counter() - began
        until = began + 3 * took
        self.model_runner.run_capture_slices(lambda: self._is_due(until), settled=not plan.extend)

    def _is_due(self, since: float) -> bool:
        """Whether captures, which may take some time of each step, are to leave the rest to it."""
        waits = len(self._launched) > 1 and not self._launched[0].arrived
        return not waits and time.perf_counter() >= since

    def _timer_of(self, plan: StepPlan) -> DeviceTimer | None:
        if plan.new_tokens > 1:  # it says nothing of other steps
            return None
        due = self._token_budget.wants_time_of(plan) and all(chunk.timed for chunk in plan.extend)
        self.timing = self._token_budget.timing
        return DeviceTimer(self.model_runner.device) if due else None

    def _note_launched(self, prepared: _Prepared, readbacks: list[Any], timer: DeviceTimer | None) -> None:
        plan, sampled, batch, _, taps, constrained, new_tokens = prepared
        late = None if constrained is None else LateSampling(constrained, taps)
        failed, self._failed = self._failed, []
        arriving = [*(each for tap in taps for each in tap.taken()), *failed]
        accepted = readbacks.pop(0) if new_tokens > 1 else None
        self._launched.append(_Launched(plan, sampled, readbacks, timer, arriving, late, batch.mixed, accepted))

    def _run(self, prepared: _Prepared) -> Iterator[tuple[Tensor, AcceptedTokens | None]]:
        """Yield the tokens of each launch, in the order of ``StepPlan.sampled``, and what says which of them count."""
        batch = prepared.batch
        if batch.decode or batch.extend:
            self.mixed_steps += batch.mixed
            output = self.model_runner.run(batch, self._persistent)
            yield output.tokens, output.accepted
        for _, alike in itertools.groupby(prepared.apart, key=_launch_of):
            chunks = [*alike]
            apart = cast(RunsApart, chunks[0].apart)
            extensions = [chunk.extension(self.model_runner) for chunk in chunks]
            try:
                yield apart.run(self.model_runner, self._persistent, extensions, prepared.taps), None
            except RequestError as error:  # they fail alone, once the tokens of others are read
                self._failed += [_FailedChunk(chunk.request, error) for chunk in chunks]

    def _prepared_for(self, plan: StepPlan) -> _Prepared:
        """Return the batch of a plan; the scheduler repeats a plan while no request comes or goes."""
        if self._prepared is None or self._prepared.plan is not plan:
            rows = [request.running_row for request in plan.decode]
            extend = [chunk.extension(self.model_runner) for chunk in plan.extend if chunk.apart is None]
            apart = [chunk for chunk in plan.extend if chunk.apart is not None]
            mixed = self._mixes(rows, extend)
            taps = [own for tap in self._taps if (own := tap.of_plan(plan)) is not None]
            new_tokens = 1 if mixed else plan.new_tokens
            drafting = self.drafts.drafting(plan) if new_tokens > 1 else None
            batch = Batch(rows, extend, mixed=mixed, taps=taps, drafting=drafting)
            constrained = Constrained.among(plan.sampled)
            self._prepared = _Prepared(plan, plan.sampled, batch, apart, taps, constrained, new_tokens)
        return self._prepared

    def _mixes(self, decode: Sequence[Row], extend: Sequence[Extension]) -> bool:
        if self._mixed is False or not (decode and extend):
            return False
        wanted = self._mixed is True or self.model_runner.mixing_pays(decode, extend)  # small models ask no more
        return wanted and self.model_runner.can_mix(decode, extend)

    def _admit(self, chunks: Sequence[Chunk]) -> None:
        """Give new rows slots, with their settings."""
        now = time.monotonic()
        for chunk in chunks:
            chunk.request.admitted = chunk.request.admitted or now
        new = [
            (chunk.request.running_row, _as_of_now(chunk.request, chunk.request.sampling))
            for chunk in chunks
            if chunk.request.running_row.slot is None
        ]
        if new:
            rows, settings = [row for row, _ in new], [sampling for _, sampling in new]
            self.model_runner.admit(rows, settings, self.scheduler.goes_on)

    def _read_all_but(self, steps: int) -> list[Request]:
        changed: list[Request] = []
        if self.timing:
            self._late_launch.forget()
        while len(self._launched) > steps:
            self._sample_late(self._launched[0])
            timed = self.timing and len(self._launched) > 1
            waits = timed and not self._launched[0].arrived
            read = self._read(self._launched[0])
            changed = [*changed, *read] if changed else read
            self._launched.popleft()
            if timed:
                self._late_launch.read(waits, bool(self._launched[-1].plan.extend))
        if self._launched:  # all before it has been read, and the device is busy with it
            self._sample_late(self._launched[0])
        return changed

    def _sample_late(self, step: _Launched) -> None:
        if step.late is not None:
            step.late.sample(self.model_runner, self._persistent)

    def _read(self, step: _Launched) -> list[Request]:
        tokens = list(itertools.chain.from_iterable(readback.result() for readback in step.readbacks))
        runs = None if step.accepted is None else self.drafts.read(step.accepted)
        if runs is not None:
            tokens = [*(run[0] for run in runs), *tokens]
        tokens = tokens or [NOT_A_TOKEN] * len(step.sampled)
        late = [] if step.late is None else step.late.read(tokens)
        failed: dict[Request, RequestError] = {} if step.late is None else dict(step.late.failed)
        arrived = [*step.arriving, *late]
        for arriving in arrived:
            failed.update(arriving.hand_out())  # before the tokens: a reader of one finds what belongs to it
        if step.timer is not None:
            prompts = sum(len(chunk.ids) for chunk in step.plan.extend)
            self._token_budget.ran(len(step.plan.decode), prompts, step.timer.seconds, step.mixed)
        for request, error in failed.items():
            self.scheduler.end(request, "error", error)
        if runs is None:
            changed = self.scheduler.read(step.sampled, tokens, time.monotonic())
        else:
            more = itertools.chain((run[1:] for run in runs), itertools.repeat([]))
            whole = [[token, *later] for token, later in zip(tokens, more, strict=False)]
            changed = self.scheduler.read_runs(step.sampled, whole, time.monotonic())
        if failed:
            changed = [*changed, *failed]
        if arrived:
            done = [request for request in changed if request.done]
            for tap in self._taps:
                tap.read(arrived, done)
        return changed


def _launch_of(chunk: Chunk) -> int:
    """Return what chunks that run apart, and in one launch, have in common."""
    return id(chunk.apart if chunk.apart is not None and chunk.apart.together else chunk)


def _as_of_now(request: Request, sampling: Sampling | None) -> Sampling | None:
    """Return a request's settings; tokens that it got before it lost its pages count."""
    if sampling is None:
        return None
    sampling = sampling.starting_at(request.position_after(len(request.prompt)))
    if sampling.forgets or not request.tokens:
        return sampling
    return dataclasses.replace(sampling, output_ids=np.array(request.tokens, dtype=np.int64))
