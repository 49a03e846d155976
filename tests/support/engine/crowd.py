"""Scheduler, loop, pool and prefix tree in random order, over a device whose pages are poisoned.

Each request gets the tokens that it gets alone, whatever comes, goes, fails and runs out beside it.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from compiled_llm.compilation.sampling.sampling import NOT_A_TOKEN, Sampling
from compiled_llm.engine.admission.policies import POLICIES
from compiled_llm.engine.chunks.whole import Whole
from compiled_llm.engine.loop_settings import LoopSettings
from compiled_llm.engine.steps.constraint import Constraint
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.engine.steps.plan import StepPlan
from compiled_llm.engine.steps.request import Request, RequestError
from compiled_llm.engine.steps.scheduler import Scheduler
from compiled_llm.engine.steps.token_budget import TokenBudget
from compiled_llm.execution.batch import Batch, Extension, StepOutput
from compiled_llm.execution.growth import grown
from compiled_llm.kinds.rows import NO_ENTRY
from compiled_llm.kvcache.errors import OutOfPagesError
from compiled_llm.kvcache.pool import PagePool, StatePool
from compiled_llm.kvcache.prefix_tree import PrefixTree
from compiled_llm.kvcache.row import PageCopy, Row

VOCABULARY = 6
BAD = 5
"""A token after which nothing can be drawn."""
POISON = (-1, -1)


class PoisonedPool(PagePool):
    """Forgets what is written in a page when it is taken or given back."""

    def __init__(self, pages: int, page_size: int, states: StatePool | None = None) -> None:
        super().__init__(pages, page_size, states=states)
        self.memory = [[POISON] * page_size for _ in range(pages)]

    def _poison(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.memory[page] = [POISON] * self.page_size

    def take_reserved(self, count: int) -> list[int]:
        pages = super().take_reserved(count)
        self._poison(pages)
        return pages

    def _disown(self, pages: Iterable[int]) -> int:
        back = super()._disown(pages)
        self._poison(self._free)
        return back

    def uncache(self, pages: Iterable[int]) -> None:
        super().uncache(pages)
        self._poison(self._free)


def next_token(text: Sequence[int], sampling: Sampling | None, seen: Iterable[int]) -> int:
    """What follows a text; of a sampled row it depends on its seed, and on what it has counted."""
    if sampling is None:
        return zlib.crc32(bytes(text)) % (VOCABULARY - 1)
    if BAD in text:
        return NOT_A_TOKEN
    penalised = [] if sampling.forgets else sorted(seen)
    return zlib.crc32(bytes([*text, 99, sampling.seed, *penalised])) % (VOCABULARY - 1)


class PlantedError(Exception):
    """A fault."""


class NaiveDevice:
    """Stands in for ``ModelRunner``.

    Attributes:
        version: of the weights; what pages hold was computed with one.
        faults: where the next step fails, and of what; emptied by it.
        mixed: rows that may read what other weights have computed: they run since before those were changed.
        arrived: whether what is being read is there already.
    """

    device = SimpleNamespace(type="cpu")

    def __init__(self, pool: PoisonedPool, max_rows: int) -> None:
        self.pool, self.version, self.arrived = pool, 0, False
        self.faults: dict[str, BaseException] = {}
        self.free_slots = list(range(max_rows))
        self.slots: dict[int, tuple[Sampling, list[int]]] = {}
        self.next: dict[Row, int] = {}
        self.mixed: set[Row] = set()
        self.after: dict[int, list[int]] = {}  # the text after which an entry's state is
        self.thread = SimpleNamespace(call=lambda function, *args: function(*args))
        self.readbacks = SimpleNamespace(start=self._start_reading)
        config = SimpleNamespace(page_size=pool.page_size)
        self.taken = 0
        self.deferring: set[int] = set()
        self.state = SimpleNamespace(
            arena=None,
            slots=self,
            pool=pool,
            config=config,
            sharing=None,
            taps=(),
            max_positions=10_000,
            validity=pool.validity,
        )
        self.unsampled: list[Row] = []
        graphs = SimpleNamespace(give_room_back=lambda user: None)
        self.steps = SimpleNamespace(buffers=None, sampling_graphs=graphs)
        self.events = SimpleNamespace(preparing=SimpleNamespace(seconds=0.0))

    def fault(self, place: str) -> None:
        if place in self.faults:
            raise self.faults.pop(place)

    # ---- what a loop calls

    def admit(self, rows: Sequence[Row], settings: Sequence[Sampling | None], goes_on: Callable[[], bool]) -> None:
        self.fault("admit")
        for row, sampling in zip(rows, settings, strict=True):
            row.take_slot(self.free_slots)
            assert row.slot is not None
            counted = [] if sampling is None else [*sampling.seen.tolist(), *sampling.output_ids.tolist()]
            self.slots[row.slot] = sampling, counted

    def forget_next(self, rows: Sequence[Row]) -> None:
        self.unsampled.clear()
        for row in rows:
            self.next.pop(row, None)

    def run_capture_slices(self, due: Callable[[], bool], settled: bool) -> None:
        """Nothing is captured here."""

    def end_captures(self) -> None:
        """Likewise."""

    def can_mix(self, decode: Sequence[Row], extend: Sequence[Extension]) -> bool:
        return bool(decode and extend)

    def mixing_pays(self, decode: Sequence[Row], extend: Sequence[Extension]) -> bool:
        return sum(row.length_at_most for row in decode) % 2 == 0  # now and then

    def run(self, batch: Batch, persistent: Any) -> StepOutput:
        self.fault("run")
        entries = [(row, [self.next[row]], True) for row in batch.decode]
        entries += [(entry.row, entry.ids.tolist(), entry.is_last) for entry in batch.extend]  # type: ignore[misc]
        rows = [row for row, _, _ in entries]
        assert len(set(rows)) == len(rows), "a row is twice in a step"
        for extension in batch.extend:
            row = extension.row
            assert isinstance(row, Row)
            assert row.position_at_most == row.length_at_most
            assert extension.positions.tolist() == list(
                range(row.length_at_most, row.length_at_most + len(extension.ids))
            )
        with grown(rows, [len(ids) for _, ids, _ in entries], None, self._copies):
            for row, ids, _ in entries:
                self._write(row, ids)
                self._write_state(row, len(ids))
            self.fault("written")
            assert not self.unsampled, "the rows of an earlier step have no tokens yet"
            chosen = [(row, self._now_or_late(row)) for row, _, ends in entries if ends]
        for row in rows:
            row.position_at_most = row.length_at_most
        self.next.update((row, max(0, token)) for row, token in chosen if row not in self.unsampled)
        self._note_unsampled(persistent)
        self.fault("ran")
        return StepOutput([row for row, _ in chosen], None, [token for _, token in chosen])  # type: ignore[arg-type]

    def _note_unsampled(self, persistent: Any) -> None:
        persistent.deferred.unsampled = [SimpleNamespace(rows=[*self.unsampled])] if self.unsampled else []

    def _now_or_late(self, row: Row) -> int:
        assert row.slot is not None, "a row runs without a slot"
        sampling, _ = self.slots[row.slot]
        if sampling is None or not sampling.deferred:
            return self._choose(row)
        self.next.pop(row, None)
        self.unsampled.append(row)
        return NOT_A_TOKEN

    def sample_deferred(self, persistent: Any, masks: None, processed: object) -> StepOutput:
        self.fault("late")
        rows, self.unsampled = self.unsampled, []
        persistent.deferred.unsampled = []
        tokens = [NOT_A_TOKEN if row.slot is None else self._choose(row) for row in rows]
        self.next.update((row, max(0, token)) for row, token in zip(rows, tokens, strict=True) if row.slot is not None)
        return StepOutput(rows, None, tokens)  # type: ignore[arg-type]

    def _copies(self, copies: Sequence[PageCopy]) -> None:
        assert self.pool.states is not None, "without states rows share full pages alone"
        for copy in copies:
            self.pool.memory[copy.target] = self.pool.memory[copy.source].copy()

    def _write(self, row: Row, ids: Sequence[int]) -> None:
        size = self.pool.page_size
        for at, token in enumerate(ids, start=row.length_at_most - len(ids)):
            page = row.pages[at // size]
            unwritten = self.pool.memory[page][at % size] == POISON  # others begin with it in the same step
            assert unwritten or self.pool._owners[page] == 1, "a row writes into a page that others read"
            self.pool.memory[page][at % size] = token, self.version

    def _write_state(self, row: Row, tokens: int) -> None:
        if row.states is None:
            return
        text, (read, write) = self.text(row), row.states.step
        before = text[: row.length_at_most - tokens]
        assert (read == NO_ENTRY and not before) or self.after[read] == before, "a state after another text"
        assert self.pool.states is not None
        assert self.pool.states._owners[write] == 1, "a row writes a state that others read"
        self.after[write] = text

    def text(self, row: Row) -> list[int]:
        """What a row reads."""
        size = self.pool.page_size
        read = [self.pool.memory[row.pages[at // size]][at % size] for at in range(row.length_at_most)]
        assert POISON not in read, "a row reads a page that it has not written"
        assert row in self.mixed or {version for _, version in read} == {self.version}, "computed with other weights"
        return [token for token, _ in read]

    def _choose(self, row: Row) -> int:
        text = self.text(row)
        assert row.slot is not None, "a row runs without a slot"
        sampling, seen = self.slots[row.slot]
        token = next_token(text, sampling, seen)
        seen.append(token)
        return token

    def _start_reading(self, tokens: list[int]) -> Any:
        self.fault("reading")
        return SimpleNamespace(result=lambda: self._read(tokens), arrived=self.arrived)

    def _read(self, tokens: list[int]) -> list[int]:
        self.fault("read")
        return tokens


def answer(
    prompt: Sequence[int], sampling: Sampling | None, most: int, ends: Callable[[int], bool]
) -> tuple[list[int], str]:
    """What a request gets alone, and why it ends."""
    text, tokens = list(prompt), list[int]()
    while len(tokens) < most:
        seen = [] if sampling is None else [*sampling.seen.tolist(), *tokens]
        token = next_token(text, sampling, seen)
        if token == NOT_A_TOKEN:
            return tokens, "error"
        text.append(token)
        tokens.append(token)
        if ends(token):
            return tokens, "stop"
    return tokens, "length"


def seen_in(prompt: Sequence[int]) -> Any:
    """The tokens of a prompt, as ``Sampling.seen``."""
    return np.unique(np.array(prompt, dtype=np.int64))


STEMS = [[], [], [0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 3, 3, 3, 2, 1, 0, 4]]
ENDS = frozenset({4})

prompts = st.tuples(st.sampled_from(STEMS), st.lists(st.sampled_from([0, 1, 2, 3, 4] * 3 + [BAD]), min_size=1)).map(
    lambda parts: parts[0] + parts[1]
)
places = st.sampled_from(["admit", "run", "written", "ran", "late", "reading", "read"])


def came(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival


class Watched(Scheduler):
    """Looks at each plan."""

    def plan(self) -> StepPlan:
        before, preempted = set(self.running), self.preemptions
        plan = super().plan()
        rows = [*plan.decode, *(chunk.request for chunk in plan.extend)]
        assert len(set(rows)) == len(rows) <= self._max_num_seqs
        assert set(rows) <= set(self.running)
        assert sum(len(chunk.ids) for chunk in plan.extend) <= self._budget(self, plan.decode)
        assert all(len(chunk.ids) for chunk in plan.extend)
        for request in plan.decode:
            chosen = request.running_row.length_at_least - len(request.prompt) + 1
            assert len(request.tokens) <= chosen < request.max_tokens
        admitted = [request for request in self.running if request not in before]
        assert all(came(a) < came(b) for a in admitted for b in self._queue.ready), "a request has been passed over"
        assert not admitted or (self.admission_deadline > 0 and self.preemptions == preempted)
        return plan


class Crowd(RuleBasedStateMachine):
    """Requests that come and go, and rows of others that take pages."""

    drafts: Any = None  # of the loop
    positions = 10_000  # that requests may have

    def device_of(self, pool: PoisonedPool, slots: int) -> NaiveDevice:
        return NaiveDevice(pool, slots)

    def drafting(self) -> dict[str, Any]:
        """What the scheduler knows of guesses."""
        return {}

    @initialize(
        pages=st.integers(4, 14),
        size=st.integers(1, 4),
        rows=st.integers(1, 5),
        budget=st.integers(1, 12),
        caches=st.booleans(),
        late=st.booleans(),
        policy=st.sampled_from(["greedy", "greedy", "peak", "auto"]),
    )
    def start(
        self,
        pages: int,
        size: int,
        rows: int,
        budget: int,
        caches: bool,
        late: bool,
        policy: str,
        states: int | None = None,
    ) -> None:
        self.pool = PoisonedPool(pages + 1, size, None if states is None else StatePool(states))
        self.device = self.device_of(self.pool, 2 * rows)
        self.tree = PrefixTree(self.pool) if caches else None
        self.policy = POLICIES[policy]()
        self.scheduler = Watched(
            *(self.pool, rows, lambda _, decode: max(1, budget - len(decode)), self.tree),
            admission=self.policy,
            **self.drafting(),
        )
        self.loop = type("", (Loop,), {"asynchronous": late})(
            self.device, self.scheduler, TokenBudget(Whole(), 1), LoopSettings(rows), self.tree, self.drafts
        )
        self.now = 0.0
        self.requests: list[Request] = []
        self.expected: dict[Request, tuple[list[int], str]] = {}
        self.old: set[Request] = set()  # which began to run before the weights were changed
        self.others: list[Row] = []

    # ---- requests come and go

    @rule(
        prompt=prompts,
        most=st.integers(1, 12),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        seed=st.none() | st.integers(0, 200),
        penalised=st.booleans(),
        priority=st.integers(0, 1),
        timeout=st.sampled_from([None, None, 1, 3, 10]),
        salt=st.sampled_from([None, None, "a"]),
        stops=st.booleans(),
        late=st.booleans(),
    )
    def add(self, prompt, most, n, seed, penalised, priority, timeout, salt, stops, late):  # type: ignore[no-untyped-def]
        if self.pool.pages_for(len(prompt) + most - 1) > self.pool.total or len(prompt) + most > self.positions:
            return
        owner: Request | None = None
        for index in range(n):
            penalty = {"repetition_penalty": 2.0, "seen": seen_in(prompt)} if penalised else {}
            sampling = None if seed is None else Sampling(seed=seed + index, deferred=late, **penalty)
            request = Request(
                prompt=np.array(prompt, dtype=np.int64),
                sampling=sampling,
                max_tokens=most,
                stop_token_ids=ENDS if stops else frozenset(),
                priority=priority,
                deadline=None if timeout is None else self.now + timeout,
                salt=salt,
                index=index,
                prefix_owner=owner,
                constraint=Constraint() if late and seed is not None else None,
                known_length=not stops,
            )
            owner = owner or request
            self.expected[request] = answer(prompt, sampling, most, request.stop_token_ids.__contains__)
            self.requests.append(request)
            self.scheduler.add(request)

    def alive(self) -> list[Request]:
        return [request for request in self.requests if not request.done]

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.scheduler.end(data.draw(st.sampled_from(self.alive())), "cancelled")

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def admit_none_or_again(self) -> None:
        self.scheduler.admission_deadline = -self.scheduler.admission_deadline

    # ---- steps

    @rule(count=st.integers(1, 6), arrived=st.booleans())
    def step(self, count: int, arrived: bool) -> None:
        self.device.arrived = arrived
        for _ in range(count):
            self.loop.read_first_tokens()
            self.scheduler.expire(self.now)
            self.loop.step()
            self.check()

    @rule(place=places, interrupted=st.booleans(), reads=st.booleans())
    def fail(self, place: str, interrupted: bool, reads: bool) -> None:
        error = KeyboardInterrupt() if interrupted else PlantedError()
        self.device.faults = {place: error}
        try:
            self.loop.read_first_tokens()
            self.loop.step()
        except (KeyboardInterrupt, PlantedError):
            if reads:
                self.loop.drain()
            failed = [] if interrupted else self.loop.underway
            self.loop.restart()
            for request in failed:
                self.scheduler.end(request, "error", error)
        self.device.faults.clear()

    @rule()
    def drain(self) -> None:
        self.loop.drain()

    @precondition(lambda self: self.tree is not None)
    @rule()
    def change_weights(self) -> None:
        assert self.tree is not None
        self.loop.drain()
        self.tree.clear()
        self.device.version += 1
        self.old |= {request for request in self.requests if request.row is not None or request.tokens}
        self.device.mixed |= {request.row for request in self.requests if request.row is not None}

    # ---- others

    @rule(tokens=st.integers(1, 40))
    def others_take_pages(self, tokens: int) -> None:
        try:
            row = Row(self.pool, tokens)
        except OutOfPagesError:
            return
        row.grow(tokens)
        self.others.append(row)

    @precondition(lambda self: self.others)
    @rule()
    def others_give_pages_back(self) -> None:
        self.others.pop().free()

    # ---- what always holds

    def check(self) -> None:
        ended = [request for request in self.requests if request.done]
        self.requests = self.alive()
        for request in (*self.requests, *ended):
            tokens, reason = self.expected[request]
            if request in self.old:
                assert len(request.tokens) <= request.max_tokens
            elif request.finish_reason in ("stop", "length") or isinstance(request.error, RequestError):
                assert (request.tokens, request.finish_reason) == (tokens, reason)
            else:
                assert request.tokens == tokens[: len(request.tokens)]
            if request.row is not None:
                assert request.row.length_at_least < len(request.prompt) + request.max_tokens, (
                    "it runs on after its last token"
                )

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.check()
        scheduler, pool = self.scheduler, self.pool
        assert scheduler.running == sorted(scheduler.running, key=lambda request: request.order)
        assert scheduler._queue.ready == sorted(scheduler._queue.ready, key=lambda request: request.order)
        assert all(request.row is not None for request in scheduler.running)
        assert not any(request.done or request.row for request in scheduler.waiting)
        assert not any(owner.prefilled or owner.done for owner in scheduler._queue._followers), "they wait for ever"
        for (_, tokens), page in () if self.tree is None else self.tree._pages.items():
            ids = np.frombuffer(tokens, dtype=np.int64).tolist()
            assert ids == [token for token, _ in pool.memory[page][: len(ids)]]
        known = [*scheduler.running, *scheduler.waiting, *self.unread()]
        assert len(set(known)) == len(known)
        assert set(known) == set(self.alive()), "a request is lost"
        rows = [*(request.row for request in scheduler.running if request.row is not None), *self.others]
        owners = [0] * len(pool._owners)
        for page in (page for row in rows for page in (*row.pages, *row.ahead)):
            owners[page] += 1
        for page in () if self.tree is None else self.tree._pages.values():
            owners[page] += 1
        assert pool._owners == owners
        assert pool.available == pool.total - sum(map(bool, owners)) + pool._cached - sum(
            row.held - len(row.pages) - len(row.ahead) + row._promised_copy for row in rows
        )
        assert pool.available >= 0
        slots = sorted([*self.device.free_slots, *(row.slot for row in rows if row.slot is not None)])
        assert slots == list(range(len(slots))), "a slot is lost or taken twice"

    def unread(self) -> Iterator[Request]:
        """Requests that gave their pages back after their last token was sampled, before it is read."""
        chosen = Counter(request for request in self.loop._unread_requests())
        for request, tokens in chosen.items():
            if request.row is None and not request.done and len(request.tokens) + tokens == request.max_tokens:
                yield request

    def teardown(self) -> None:
        """Left alone, all requests end."""
        if not hasattr(self, "pool"):
            return
        while self.others:
            self.others.pop().free()
        self.scheduler.admission_deadline = math.inf
        steps = (
            2 + sum(len(request.prompt) + request.max_tokens + 2 for request in self.alive()) * 3
        )  # 2: those whose tokens are not read
        while not self.loop.idle:
            self.loop.step()
            self.everything_adds_up()
            assert (steps := steps - 1) > 0, "a request starves"
        assert not self.alive()
        account = self.pool.account()
        assert (account.used, account.free + account.cached) == (0, account.total)
        assert self.pool.available == account.total
        states = self.pool.states
        assert states is None or (states.account().used, states.available) == (0, states.total)
        assert len(self.device.free_slots) == 2 * self.scheduler._max_num_seqs
