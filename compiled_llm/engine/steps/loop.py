"""Launches one plan after the other, and reads the tokens of each while the next one runs."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import numpy as np

from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm.engine.admission.policies import policy_of
from compiled_llm.engine.chunks.policies import policy_of as chunks_of
from compiled_llm.engine.draft_stats import DraftStats
from compiled_llm.engine.loop_settings import LoopSettings
from compiled_llm.engine.steps.deferred_sampling import Constrained, LateSampling
from compiled_llm.engine.steps.plan import Chunk, RunsApart, StepPlan
from compiled_llm.engine.steps.request import Request, RequestError
from compiled_llm.engine.steps.scheduler import Scheduler
from compiled_llm.engine.steps.taps import PlanTap, UnreadOutput, engine_taps
from compiled_llm.engine.steps.timing.late_launch import LateLaunch
from compiled_llm.engine.steps.token_budget import TokenBudget
from compiled_llm.execution.batch import Batch, Drafting, Extension, StepOutput
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.pipeline import Pipeline, SampledTokens, Ticket
from compiled_llm.execution.state.device_timer import DeviceTimer
from compiled_llm.features import Seam, needed
from compiled_llm.kvcache.prefix_tree import PrefixTree
from compiled_llm.kvcache.row import Row

logger = logging.getLogger("compiled_llm.engine")


@dataclass(slots=True)
class _Launched:
    """A plan that was launched, and what its step gives besides tokens."""

    plan: StepPlan
    sampled: list[Request]  # whom its tokens are for
    mixed: bool
    late: LateSampling | None
    timer: DeviceTimer | None = None
    arriving: Sequence[UnreadOutput] = ()


class _Prepared(NamedTuple):
    """A plan's batch, and what belongs to it: chunks that run apart, who watches, who is sampled late."""

    plan: StepPlan
    sampled: list[Request]
    batch: Batch
    apart: list[Chunk]
    taps: list[PlanTap]
    constrained: Constrained | None

    def launched(self) -> _Launched:
        """Return what is noted of one launch of it."""
        late = None if self.constrained is None else LateSampling(self.constrained, self.taps)
        return _Launched(self.plan, self.sampled, self.batch.mixed, late)


class _FailedChunk(NamedTuple):
    """A chunk that ran apart, and has failed alone."""

    request: Request
    error: RequestError

    def hand_out(self) -> dict[Request, RequestError]:
        return {self.request: self.error}


class LoopDrafts(Protocol):
    """What guesses tokens for the steps of one loop."""

    @property
    def counts(self) -> DraftStats:
        """What has come of all steps that were read."""
        ...

    @property
    def max_positions(self) -> int:
        """How many tokens a row may have, guesses among them."""
        ...

    def new_tokens(self, requests: Sequence[Request], step: int) -> int:
        """Return how many tokens each of these requests feeds in next; all but the first one are guesses."""
        ...

    def drafting(self, plan: StepPlan) -> Drafting: ...


class LoopDraftsPart(Protocol):
    """The part that guesses tokens, as a loop asks it."""

    def drafts_of(self, model_runner: ModelRunner, settings: LoopSettings) -> LoopDrafts: ...


_DRAFTS = Seam[LoopDraftsPart]("drafts", "engine")


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
        settings: LoopSettings,
        prefixes: PrefixTree | None = None,
        drafts: LoopDrafts | None = None,
    ) -> None:
        """``drafts`` are there if tokens are guessed."""
        self.drafts = drafts
        self._token_budget = token_budget
        self.model_runner = model_runner
        self.scheduler = scheduler
        self.prefixes = prefixes
        self._pipeline = Pipeline[_Launched](model_runner)
        self._taps = [tap(model_runner, scheduler, settings) for tap in engine_taps()]
        self._prepared: _Prepared | None = None  # for the last plan
        self._failed: list[_FailedChunk] = []  # of the step that is being launched
        self._late_launch = LateLaunch()
        self._mixed = settings.mixed
        self.steps = self.mixed_steps = 0
        self.ran_prompts = self.timing = False
        self.stuck = False

    @classmethod
    def of(cls, model_runner: ModelRunner, settings: LoopSettings) -> Loop:
        prefixes = model_runner.prefixes if settings.prefix_cache else None
        chunks, most = chunks_of(settings.max_step_ms, model_runner.device.type), model_runner.config.prefill_tokens
        packs_rows = settings.mixed == "auto" and model_runner.mixing_may_pay
        token_budget = TokenBudget(chunks, most, settings.mixed is True, packs_rows)
        drafts = None if settings.speculation is None else needed(_DRAFTS).drafts_of(model_runner, settings)
        scheduler = Scheduler(
            model_runner.pool,
            settings.max_num_seqs,
            token_budget.tokens,
            prefixes,
            slots=model_runner.state.slots.room_for,
            admission=policy_of(settings.admission),
            new_tokens=None if drafts is None else drafts.new_tokens,
            max_positions=None if drafts is None else drafts.max_positions,
        )
        return cls(model_runner, scheduler, token_budget, settings, prefixes, drafts)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to run and nothing to read."""
        return self.scheduler.idle and not self._pipeline.unread

    @property
    def underway(self) -> list[Request]:
        """The requests that run, and those whose last tokens have not been read."""
        unread = (request for request in self._unread_requests() if not request.done)
        return list(dict.fromkeys([*self.scheduler.running, *unread]))

    def _unread_requests(self) -> list[Request]:
        """Return whom tokens were sampled for that are not read."""
        return [request for ticket in self._pipeline.unread for request in ticket.note.sampled]

    @property
    def asynchronous(self) -> bool:
        """Whether a step may still run after its launch; else reading late gains nothing."""
        return self.model_runner.device.type != "cpu"

    def step(self, look: bool = False) -> list[Request]:
        """Launch the next plan, if any, read the previous one's tokens, and return requests that got one or ended."""
        # ``look`` looks at the model, which may have changed. The first requests after a rest need not wait for all of
        # that: it goes on while the device runs their step, which is thrown away if the model has changed.
        behind = look and self.asynchronous and not (self._pipeline.unread or self.scheduler.running)
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
        self.stuck = not (launched or self.scheduler.idle or self._pipeline.unread)
        return self._read_all_but(int(self.asynchronous and launched))

    def _forget_changed(self) -> bool:
        return self.model_runner.thread.call(self.model_runner.forget_changed)

    def _join_generation(self) -> None:
        """Let what is computed from now on be kept with the texts that are there."""
        if self.prefixes is not None:
            self.scheduler.generation = self.prefixes.generation

    def _repeat(self, plan: StepPlan) -> bool:
        """Run the last step once more, unless something has changed, or the plan is another."""
        prepared = self._prepared
        if self._pipeline.persistent.step is None or prepared is None or prepared.plan is not plan or plan.extend:
            return False
        launched = prepared.launched()
        launched.timer = self._timer_of(plan)
        repeat = self._pipeline.repeat if launched.timer is None else launched.timer.of(self._pipeline.repeat)
        if self.model_runner.thread.call_briefly(repeat, prepared.batch, launched) is None:
            return False
        if prepared.taps:
            self._note_arriving(prepared, launched)
        return True

    @property
    def due(self) -> float:
        """When the next step has to be launched, on the clock of ``time.perf_counter``; 0.0 for at once."""
        # A request that comes until then runs in it, and not a step later; prompts that are left take longer to launch.
        if not (len(self._pipeline.unread) == 1 and self.scheduler.has_room_for_more):
            return 0.0
        (ticket,) = self._pipeline.unread
        plan = ticket.note.plan
        if ticket.late or ticket.accepted is not None or not all(chunk.is_last for chunk in plan.extend):
            return 0.0
        return self._late_launch.due(self._token_budget.expected(plan))

    def read_first_tokens(self) -> list[Request]:
        """Read a step with prompts if it is done: their first tokens need not wait for the next launch."""
        if not self._pipeline.unread:
            return []
        ticket = self._pipeline.unread[0]
        done = ticket.note.plan.extend and not ticket.late and ticket.arrived
        return self._pipeline.read(self._read) if done else []

    def drain(self) -> list[Request]:
        """Read all that was launched, and let nothing go on; otherwise as ``step``."""
        self.model_runner.end_captures()
        return self._read_all_but(0)

    def restart(self) -> None:
        """Let all requests compute again what they need, after a step that failed: its tokens may be lost."""
        lost = self._unread_requests()
        self._pipeline.restart()
        self.scheduler.restart(lost)
        self._prepared = None

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
        self._pipeline.restart()
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
        launched = prepared.launched()
        self.mixed_steps += prepared.batch.mixed
        self._pipeline.launch(prepared.batch, launched, self._run_apart(prepared) if prepared.apart else ())
        if timer is not None:
            timer.stop()
            if self.model_runner.events.preparing.seconds == before:  # else that takes longer than the device does
                launched.timer = timer
        if prepared.taps or self._failed:
            self._note_arriving(prepared, launched)
        # To capture a step takes half as long again as to launch its kernels: if this one was missing its CUDA graph,
        # the next one has it. After prompts the next step has more rows.
        took = time.perf_counter() - began
        until = began + 3 * took
        self.model_runner.run_capture_slices(lambda: self._is_due(until), settled=not plan.extend)

    def _is_due(self, since: float) -> bool:
        """Whether captures, which may take some time of each step, are to leave the rest to it."""
        waits = len(self._pipeline.unread) > 1 and not self._pipeline.unread[0].arrived
        return not waits and time.perf_counter() >= since

    def _timer_of(self, plan: StepPlan) -> DeviceTimer | None:
        if plan.new_tokens > 1:  # it says nothing of other steps
            return None
        due = self._token_budget.wants_time_of(plan) and all(chunk.timed for chunk in plan.extend)
        self.timing = self._token_budget.timing
        return DeviceTimer(self.model_runner.device) if due else None

    def _note_arriving(self, prepared: _Prepared, launched: _Launched) -> None:
        failed, self._failed = self._failed, []
        launched.arriving = [*(each for tap in prepared.taps for each in tap.taken()), *failed]

    def _run_apart(self, prepared: _Prepared) -> Iterator[StepOutput]:
        """Run the launches of chunks that run apart, and yield what each has sampled."""
        for _, alike in itertools.groupby(prepared.apart, key=_launch_of):
            chunks = [*alike]
            apart = cast(RunsApart, chunks[0].apart)
            extensions = [chunk.extension(self.model_runner) for chunk in chunks]
            try:
                tokens = apart.run(self.model_runner, self._pipeline.persistent, extensions, prepared.taps)
            except RequestError as error:  # they fail alone, once the tokens of others are read
                self._failed += [_FailedChunk(chunk.request, error) for chunk in chunks]
                continue
            yield StepOutput([chunk.request.running_row for chunk in chunks if chunk.is_last], None, tokens)

    def _prepared_for(self, plan: StepPlan) -> _Prepared:
        """Return the batch of a plan; the scheduler repeats a plan while no request comes or goes."""
        if self._prepared is None or self._prepared.plan is not plan:
            rows = [request.running_row for request in plan.decode]
            extend = [chunk.extension(self.model_runner) for chunk in plan.extend if chunk.apart is None]
            apart = [chunk for chunk in plan.extend if chunk.apart is not None]
            mixed = self._mixes(rows, extend)
            taps = [own for tap in self._taps if (own := tap.of_plan(plan)) is not None]
            new_tokens = 1 if mixed else plan.new_tokens
            drafting = self.drafts.drafting(plan) if self.drafts is not None and new_tokens > 1 else None
            batch = Batch(rows, extend, mixed=mixed, taps=taps, drafting=drafting)
            constrained = Constrained.among(plan.sampled)
            self._prepared = _Prepared(plan, plan.sampled, batch, apart, taps, constrained)
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
        pipeline = self._pipeline
        if self.timing:
            self._late_launch.forget()
        unread = pipeline.unread
        while len(unread) > steps:
            self._sample_late(unread[0])
            timed = self.timing and len(unread) > 1
            waits = timed and not unread[0].arrived
            read = pipeline.read(self._read)
            changed = [*changed, *read] if changed else read
            if timed:
                self._late_launch.read(waits, bool(unread[-1].note.plan.extend))
        if unread:  # all before it has been read, and the device is busy with it
            self._sample_late(unread[0])
        return changed

    def _sample_late(self, ticket: Ticket[_Launched]) -> None:
        """Sample what the oldest step has left until all before it was read."""
        if ticket.late and ticket.late_readback is None and ticket.note.late is not None:
            ticket.note.late.sample(self.model_runner, self._pipeline)

    def _read(self, ticket: Ticket[_Launched], step: SampledTokens) -> list[Request]:
        """Hand a step's tokens out; return who got one or ended."""
        launched, arrived, failed = ticket.note, ticket.note.arriving, dict[Request, RequestError]()
        if launched.late is not None:
            arrived = [*arrived, *launched.late.read(step.tokens)]
            failed.update(launched.late.failed)
        for arriving in arrived:
            failed.update(arriving.hand_out())  # before the tokens: a reader of one finds what belongs to it
        if launched.timer is not None:
            plan = launched.plan
            prompts = sum(len(chunk.ids) for chunk in plan.extend)
            self._token_budget.ran(len(plan.decode), prompts, launched.timer.seconds, launched.mixed)
        for request, error in failed.items():
            self.scheduler.end(request, "error", error)
        if step.runs is None:
            changed = self.scheduler.read(launched.sampled, step.tokens, time.monotonic())
        else:
            runs = [tokens for _, tokens in step.by_row()]
            changed = self.scheduler.read_runs(launched.sampled, runs, time.monotonic())
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
