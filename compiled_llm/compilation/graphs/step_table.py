"""The steps of a model: the state of each, the memory of those that have a CUDA graph, and which of these go first."""

# If there are too many, the least recently used is evicted. The largest decode step and the largest prefill go last:
# any smaller step of as many new tokens a row can run in them. This module does not use CUDA. All of it runs in the
# model's executor, but for ``table``.

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from compiled_llm.compilation.graphs.step_key import STEPS, Phase, StepKey
from compiled_llm.compilation.graphs.table import CudaGraphRow, CudaGraphTable, StepState, mib
from compiled_llm.compilation.graphs.validity import Checks

logger = logging.getLogger("compiled_llm.graphs")


class Replayable(Protocol):
    """A captured graph, launched by ``launch``, and the ``outputs`` that it writes."""

    @property
    def launch(self) -> Callable[[], object]: ...

    @property
    def outputs(self) -> Any: ...

    def release(self) -> None:
        """Free its memory; it is not replayed any more."""


class Budget(NamedTuple):
    """The limits of CUDA graphs."""

    nbytes: int | None = None  # device memory, the shared part included; None for any
    max_graphs: int | None = None  # how many graphs; None for any number


UNBOUNDED = Budget()

ATTEMPTS = 3
"""Failed captures in a row after which a step runs kernel by kernel for good."""
# One failure says little: another thread may have disturbed the capture.


class Cost(NamedTuple):
    """The cost of a capture."""

    nbytes: int = 0  # device memory that goes back with the graph
    shared: int = 0  # growth of the memory that all graphs share
    seconds: float = 0.0


class _EvictedGraph(NamedTuple):
    """An evicted graph that may still run."""

    cuda_graph: Replayable
    nbytes: int  # device memory that it takes until it is released
    ended: Callable[[], bool]  # tells whether all work launched by then has ended


KeptT = TypeVar("KeptT", bound=Replayable)


class StepEntry(Generic[KeptT]):
    """A step: its state, which only the table changes, its CUDA graph, and its account.

    Attributes:
        checked_at: the number of the check of the model at which the step was last found to be as its state says.
        spare: whether it was captured for others to run in, and no step has wanted it for itself.
        losses: how often its graph was dropped because the model, or what it reads, had changed.
        failed: how many of its captures have failed since the last one that did not.
    """

    def __init__(self, key: StepKey, clock: Callable[[], float]) -> None:
        self.key = key
        self.state: StepState = "missing"
        self.cuda_graph: KeptT | None = None
        self.guards: Checks | None = None
        self.filled: Tensor | None = None
        self.checked_at = -1
        self.spare = False
        self.nbytes = self.captures = self.evictions = self.replays = self.failures = 0
        self.misses = self.padded = self.losses = self.failed = 0
        self.seconds = 0.0
        self.used = clock()
        self.clock = clock

    def row(self) -> CudaGraphRow:
        return CudaGraphRow(
            *self.key.numbers,
            states=bool(self.key.wants or self.key.pooling),
            state=self.state,
            nbytes=self.nbytes if self.state == "ready" else 0,
            captures=self.captures,
            evictions=self.evictions,
            replays=self.replays,
            misses=self.misses,
            padded=self.padded,
            failures=self.failures,
            idle_seconds=round(max(0.0, self.clock() - self.used), 3),
            capture_seconds=round(self.seconds, 6),
        )


class StepTable:
    """The steps of a model, each in one state. If they are bounded, the least recently used graphs make room.

    Attributes:
        runnable_state: the state of a step that runs at once: ready, or compiled if nothing is captured.
        anchors: of each phase, those in which all others can run, the most important first; they go last. Of decode,
            those of one new token a row; of several, steps of as many rows are anchors, too.
        pending: whether a graph may be to capture or to release between steps; who has seen to it says that none is.
        when_dropped: called with each dropped graph's key. They hold no reference to this object: the memory of graphs
            goes back with the last reference, not at the next garbage collection.
    """

    def __init__(
        self,
        budget: Budget = UNBOUNDED,
        wait: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        mark: Callable[[], Callable[[], bool]] = lambda: lambda: True,
        changed: Callable[[], None] = lambda: None,
        captures: bool = True,
    ) -> None:
        """Begin without graphs; ``wait`` waits until launched work has ended, ``mark`` what tells whether it has."""
        self.budget = budget
        self.runnable_state: StepState = "ready" if captures else "compiled"
        self.model_checks = 0
        self.shared: Counter[str] = Counter()
        self.anchors: dict[Phase, list[StepKey]] = {"decode": [], "prefill": []}
        self.when_dropped: list[Callable[[StepKey], None]] = []
        self.pending, self._changed = False, changed
        self.entries: dict[StepKey, StepEntry[Any]] = {}
        self._wait, self._clock, self._mark = wait, clock, mark
        self._evicted: list[_EvictedGraph] = []

    def changed(self) -> None:
        """Note that a graph has come or gone, or that a capture is wanted or has ended."""
        self.pending = True
        self._changed()

    # ---- which state has a step?

    def state(self, key: StepKey) -> StepState:
        entry = self.entries.get(key)
        return "missing" if entry is None else entry.state

    def get(self, key: StepKey) -> StepEntry[Any] | None:
        """Return a step that has a CUDA graph, valid or not."""
        entry = self.entries.get(key)
        return entry if entry is not None and entry.state == "ready" else None

    def of(self, *phases: Phase) -> list[StepKey]:
        """Return the steps that have CUDA graphs."""
        return [entry.key for entry in self._ready if entry.key.phase in phases]

    def runnable(self, phase: Phase, shares: bool = False) -> list[StepKey]:
        """Return the steps that run at once, smallest first; any thread may ask."""
        # Of decode those of one new token, which any rows can run in: without the ones that give more than logits, or
        # read shared pages once unless these ``shares`` are wanted, too; of prefills those that read ids.
        keys = [entry.key for entry in list(self.entries.values()) if entry.state == self.runnable_state]
        plain = [key for key in keys if key.phase == phase and key.is_plain and key.shares <= shares]
        return sorted(key for key in plain if phase != "decode" or key.new_tokens_per_row == 1)

    @property
    def _ready(self) -> list[StepEntry[Any]]:
        return [entry for entry in self.entries.values() if entry.state == "ready"]

    # ---- transitions

    def compiled(self, key: StepKey) -> None:
        """Note that as of this check, a step can be launched kernel by kernel: nothing has to be compiled for it."""
        entry = self.entry(key)
        if entry.state in ("missing", "stale"):
            entry.state = "compiled"
        entry.checked_at = self.model_checks

    def begin(self, key: StepKey) -> None:
        """Note that the capture of a step has begun."""
        self._move(self.entry(key), "capturing", "missing", "compiled", "stale", "failed", "evicted")

    def give_up(self, key: StepKey) -> None:
        """Note that the capture of a step has ended before there was a graph, for no reason of its own."""
        self._move(self.entries[key], "compiled", "capturing")

    def fail(self, key: StepKey) -> None:
        """Note that the capture of a step has failed; after ATTEMPTS of them, only ``warmup`` tries again."""
        entry = self.entries[key]
        self._move(entry, "failed" if entry.failed + 1 >= ATTEMPTS else "compiled", "capturing")
        entry.failures += 1
        entry.failed += 1

    @contextmanager
    def capturing(self, key: StepKey) -> Iterator[None]:
        """Capture a step in the block, and add it, or give it up."""
        self.begin(key)
        try:
            yield
        except BaseException:
            if self.entries[key].state == "capturing":
                self.give_up(key)
            raise

    def forget(self, *phases: Phase) -> None:
        """Drop the graphs of phases, which no step launches any more; nothing is known of these steps from now on."""
        self._release_evicted()
        for entry in self.entries.values():
            if entry.key.phase not in phases:
                continue
            entry.checked_at, entry.failed = -1, 0
            if entry.state == "ready":
                self._taken_out(entry, "stale").release()
                entry.losses += 1
            elif entry.state != "stale":
                entry.state = "missing"

    def entry(self, key: StepKey) -> StepEntry[Any]:
        if key not in self.entries:
            self.entries[key] = StepEntry(key, self._clock)
        return self.entries[key]

    def _move(self, entry: StepEntry[Any], to: StepState, *states: StepState) -> None:
        assert entry.state in states, f"a {entry.key} is {entry.state}, and cannot become {to}"
        entry.state = to

    # ---- memory

    @property
    def nbytes(self) -> int:
        """Device memory of all graphs, with evicted ones that may still run."""
        return self._kept_nbytes + self._evicted_nbytes

    @property
    def _evicted_nbytes(self) -> int:
        return sum(graph.nbytes for graph in list(self._evicted))

    @property
    def _kept_nbytes(self) -> int:
        return self.shared.total() + sum(entry.nbytes for entry in self._ready)

    @property
    def full(self) -> bool:
        """Whether another one has room only in place of one of these."""
        return self._exceeds(1, 1)

    def _exceeds(self, more: int = 0, nbytes: int = 0) -> bool:
        """Whether ``more`` graphs of ``nbytes`` do not fit."""
        limit, most = self.budget
        too_many = most is not None and len(self._ready) + more > most
        return too_many or (limit is not None and self._kept_nbytes + nbytes > limit)

    # ---- come

    def has_room_for(self, key: StepKey) -> bool:
        limit, most = self.budget
        going = self._smaller(key)
        left = [entry for entry in self._ready if entry not in going and entry.key != key]
        known = self.entries.get(key)
        nbytes = self.shared.total() + sum(entry.nbytes for entry in left) + (known.nbytes if known else 0)
        return (most is None or len(left) < most) and (limit is None or nbytes <= limit)

    def make_room(self, key: StepKey) -> None:
        """Evict graphs before a capture, as far as their number is known."""
        known = self.entries.get(key)
        while self._exceeds(1, known.nbytes if known else 0) and (victim := self._victim(key)) is not None:
            self._evict(victim)
        self._release_evicted()

    def add(self, key: StepKey, cuda_graph: Replayable, cost: Cost, owner: str) -> None:
        """Keep a graph for which room was made, and evict others for it; graphs of an ``owner`` share memory."""
        # ValueError if it does not fit together with the graphs that the same step replays; it is dropped then.
        self._add(key, cuda_graph, cost, owner)
        while self._exceeds() and (victim := self._victim(key)) is not None:
            self._evict(victim)
        self._release_evicted()
        if self._exceeds():
            least = self.nbytes
            self._taken_out(self.entries[key], "evicted").release()
            raise ValueError(
                f"graph_memory: the CUDA graphs of one step take {mib(least)} ({least} bytes), and the limit is "
                f"{mib(self.budget.nbytes or 0)}; give at least graph_memory={least}"
            )

    def try_to_add(self, key: StepKey, cuda_graph: Replayable, cost: Cost, owner: str) -> bool:
        """As ``add``, if dispensable graphs can make room; return whether it was kept, and else drop it."""
        self._add(key, cuda_graph, cost, owner)
        fits = self.has_room_for(key)
        while fits and self._exceeds():
            self._evict(min(self._smaller(key), key=_used))
        if not fits:
            self._taken_out(self.entries[key], "evicted").release()
            self.entries[key].evictions += 1
        return fits

    def _add(self, key: StepKey, cuda_graph: Replayable, cost: Cost, owner: str) -> None:
        self.shared[owner] += cost.shared
        entry = self.entry(key)
        self._move(entry, "ready", "capturing")
        entry.cuda_graph, entry.nbytes, entry.used, entry.checked_at = cuda_graph, cost.nbytes, self._clock(), -1
        entry.captures += 1
        entry.failed = 0
        entry.seconds += cost.seconds
        self.changed()

    def missed(self, key: StepKey, padded: bool = False) -> None:
        """Count a step whose graph is missing; ``padded`` if it runs in a larger one."""
        entry = self.entry(key)
        entry.misses += 1
        entry.padded += padded

    def _victim(self, new: StepKey) -> StepEntry[Any] | None:
        """The graph to evict for a capture, none of the same step: the least recently used, then the least anchor."""
        return max(self._apart_from(new), key=lambda entry: (self._rank(entry.key), -entry.used), default=None)

    def _smaller(self, new: StepKey) -> list[StepEntry[Any]]:
        """Return the dispensable graphs, once there is a new one: for each, another one is ready to run in."""
        stay = {new, *self._staying(new)}
        return [entry for entry in self._ready if entry.key not in stay]

    def _staying(self, new: StepKey) -> list[StepKey]:
        """Return the anchors; of prefills, or decode steps of as many new tokens, that have none, the largest."""
        alike: defaultdict[tuple[Phase, int, str], list[StepKey]] = defaultdict(list)
        for key in (*self.of("decode", "prefill"), new):
            alike[key.phase, key.new_tokens_per_row if key.phase == "decode" else 0, key.program].append(key)
        anchors = {like: [key for key in keys if self._rank(key) < math.inf] for like, keys in alike.items()}
        return [key for like, keys in alike.items() for key in anchors[like] or [max(keys, key=_size)]]

    def _apart_from(self, new: StepKey) -> list[StepEntry[Any]]:
        latest = {entry.key.phase: entry for entry in sorted(self._ready, key=_used)}
        stay = [entry for other, entry in latest.items() if other in ("decode", "prefill") and other != new.phase]
        return [entry for entry in self._ready if entry.key != new and entry not in stay]

    def _rank(self, key: StepKey) -> float:
        """Return a key's rank as an anchor, larger if less important; each number of new tokens a row has its own."""
        anchors = self.anchors.get(key.phase, [])
        like = StepKey.decode(key.rows) if key.phase == "decode" else key
        return anchors.index(like) if like in anchors else math.inf

    # ---- go

    @property
    def releases_later(self) -> bool:
        """Whether an evicted graph may still run."""
        return bool(self._evicted)

    def release_ended(self) -> bool:
        """Release evicted graphs that have ended, while no capture runs; return whether none is left."""
        while self._evicted and self._evicted[0].ended():
            self._evicted.pop(0).cuda_graph.release()
        return not self._evicted

    def _release_evicted(self) -> None:
        if not self.release_ended():
            self._wait()
            while self._evicted:
                self._evicted.pop(0).cuda_graph.release()

    def _evict(self, entry: StepEntry[Any]) -> None:
        self._evicted.append(_EvictedGraph(self._taken_out(entry, "evicted"), entry.nbytes, self._mark()))
        entry.evictions += 1
        logger.debug("evicted a %s", entry.key)

    def _taken_out(self, entry: StepEntry[Any], state: StepState) -> Replayable:
        """Take the graph out of a step, which no step launches any more."""
        cuda_graph: Replayable | None = entry.cuda_graph
        assert cuda_graph is not None
        self._move(entry, state, "ready")
        entry.cuda_graph = entry.guards = entry.filled = None
        self.changed()
        for dropped in self.when_dropped:
            dropped(entry.key)
        return cuda_graph

    # ---- accounts

    def captures(self, phase: Phase) -> int:
        """Return how often steps of a phase were captured; any thread may ask."""
        return sum(entry.captures for entry in list(self.entries.values()) if entry.key.phase == phase)

    def table(self) -> CudaGraphTable:
        """Return the table of steps that were captured, or should have been; any thread may."""
        order = {phase: number for number, phase in enumerate((*STEPS, "sampling"))}
        entries = list(self.entries.values())
        rows = [entry.row() for entry in entries if entry.captures or entry.misses or entry.failures]
        rows.sort(key=lambda row: (order[row.phase], row.rows, row.tokens, row.variant))
        shared = self.shared.total()
        nbytes = shared + self._evicted_nbytes + sum(row.nbytes for row in rows)
        return CudaGraphTable(rows, nbytes, shared, self.budget.nbytes, self.budget.max_graphs)


def _used(entry: StepEntry[Any]) -> float:
    return entry.used


def _size(key: StepKey) -> tuple[int, int, int]:
    return key.tokens, key.rows, -key.variant
