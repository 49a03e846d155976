"""All recordings of a model in one place: what each of them cost, and which has to go if there are too many.

The least recently used goes. The largest decode step and the largest prefill stay as long as anything else can go: any
smaller step can run in them.

Nothing here knows of CUDA. Everything runs in the model's executor, but for ``table``.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from compiled_llm.compilation.graphs.table import Phase, RecordingRow, RecordingTable, mib
from compiled_llm.compilation.inputs import Shape

logger = logging.getLogger("compiled_llm.graphs")


class Choice(NamedTuple):
    """What a recorded choice of tokens is fixed to.

    Attributes:
        rows: how many rows choose.
        masked: whether it writes masks into the table before.
    """

    rows: int
    masked: bool


Key = int | Shape | Choice
"""A decode bucket, what a prefill is padded to, or a choice."""


class Replayable(Protocol):
    """A captured graph."""

    def replay(self) -> Any:
        """Launch it; returns the same tensors each time."""
        ...

    def release(self) -> None:
        """Give back what it takes; it is replayed no more."""


class Budget(NamedTuple):
    """What recordings may take.

    Attributes:
        nbytes: device memory, what they share included; None for any.
        most: how many there may be; None for any number.
    """

    nbytes: int | None = None
    most: int | None = None


UNBOUNDED = Budget()


class Cost(NamedTuple):
    """What a capture took.

    Attributes:
        nbytes: device memory that the recording gives back.
        shared: device memory by which what all share has grown.
        seconds: how long it took.
    """

    nbytes: int = 0
    shared: int = 0
    seconds: float = 0.0


class _Leaving(NamedTuple):
    """A recording that was evicted and may still run.

    Attributes:
        recording: it.
        nbytes: device memory that it takes until it is released.
        ended: tells whether all that had been launched by then has ended.
    """

    recording: Replayable
    nbytes: int
    ended: Callable[[], bool]


KeptT = TypeVar("KeptT", bound=Replayable)


class Entry(Generic[KeptT]):
    """A recording that there is or was, and its account.

    Attributes:
        key: what it is fixed to.
        recording: None if it has been evicted or dropped.
        nbytes: device memory that it takes, and took before it was evicted.
    """

    def __init__(self, key: Key, clock: Callable[[], float]) -> None:
        """Begin with nothing captured."""
        self.key = key
        self.phase: Phase
        self.phase, self.tokens, self.rows, self.variant = described(key)
        self.recording: KeptT | None = None
        self.nbytes = self.captures = self.evictions = self.replays = self.failures = 0
        self.misses = self.padded = 0
        self.seconds = 0.0
        self.used = clock()
        self._clock = clock

    def captured(self, recording: KeptT, cost: Cost) -> None:
        """Have it again, or for the first time."""
        self.recording, self.nbytes, self.used = recording, cost.nbytes, self._clock()
        self.captures += 1
        self.seconds += cost.seconds

    def replay(self) -> Any:
        """Launch it, and count that."""
        self.replays += 1
        self.used = self._clock()
        assert self.recording is not None
        return self.recording.replay()

    def row(self) -> RecordingRow:
        """Return what there is to see of it."""
        ready = self.recording is not None
        return RecordingRow(
            phase=self.phase,
            tokens=self.tokens,
            rows=self.rows,
            variant=self.variant,
            ready=ready,
            nbytes=self.nbytes if ready else 0,
            captures=self.captures,
            evictions=self.evictions,
            replays=self.replays,
            misses=self.misses,
            padded=self.padded,
            failures=self.failures,
            idle_seconds=round(max(0.0, self._clock() - self.used), 3),
            capture_seconds=round(self.seconds, 6),
        )


class RollingRecordings:
    """The recordings of a model, the least recently used of which make room for others.

    Attributes:
        shared: device memory that recordings of one recorder share, by whose it is.
        anchors: of each phase, those in which all others can run, the most important first; they go last.
        when_dropped: called with each recording that can be replayed no more. They hold nothing that holds this: the
            memory of graphs goes back when nobody refers to them any more, not when garbage is next collected.
    """

    def __init__(
        self,
        budget: Budget = UNBOUNDED,
        wait: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        mark: Callable[[], Callable[[], bool]] = lambda: lambda: True,
    ) -> None:
        """Begin with none.

        Args:
            budget: what they may take.
            wait: waits until nothing that was launched runs any more.
            clock: tells the time in seconds.
            mark: returns what tells whether all has ended that has been launched by now.
        """
        self.budget = budget
        self.shared: Counter[str] = Counter()
        self.anchors: dict[Phase, list[Key]] = {"decode": [], "prefill": []}
        self.when_dropped: list[Callable[[Key], None]] = []
        self._wait, self._clock, self._mark = wait, clock, mark
        self._entries: dict[Key, Entry[Any]] = {}  # those that are not ready, too
        self._ready: dict[Key, Entry[Any]] = {}
        self._leaving: list[_Leaving] = []

    def __contains__(self, key: Key) -> bool:
        """Whether there is a recording of it."""
        return key in self._ready

    def get(self, key: Key) -> Entry[Any] | None:
        """Return a recording, if there is one."""
        return self._ready.get(key)

    def of(self, *phases: Phase) -> list[Key]:
        """Return what is recorded of some phases."""
        return [key for key, entry in self._ready.items() if entry.phase in phases]

    @property
    def nbytes(self) -> int:
        """Device memory that all take together, with those that were evicted and may still run."""
        return self._kept_nbytes + self._leaving_nbytes

    @property
    def _leaving_nbytes(self) -> int:
        return sum(leaving.nbytes for leaving in list(self._leaving))

    @property
    def _kept_nbytes(self) -> int:
        return self.shared.total() + sum(entry.nbytes for entry in self._ready.values())

    @property
    def full(self) -> bool:
        """Whether another one has room only where one of these was."""
        return self._exceeds(1, 1)

    def _exceeds(self, more: int = 0, nbytes: int = 0) -> bool:
        """Whether so many more that take so much do not fit."""
        limit, most = self.budget
        too_many = most is not None and len(self._ready) + more > most
        return too_many or (limit is not None and self._kept_nbytes + nbytes > limit)

    # ---- come

    def has_room_for(self, key: Key) -> bool:
        """Whether a recording fits, as far as that is known, if those go that any step can do without."""
        limit, most = self.budget
        going = self._smaller(key)
        left = [entry for entry in self._ready.values() if entry not in going and entry.key != key]
        known = self._entries.get(key)
        nbytes = self.shared.total() + sum(entry.nbytes for entry in left) + (known.nbytes if known else 0)
        return (most is None or len(left) < most) and (limit is None or nbytes <= limit)

    def make_room(self, key: Key) -> None:
        """Evict what has to go before a recording is captured, as far as that is known."""
        known = self._entries.get(key)
        while self._exceeds(1, known.nbytes if known else 0) and (victim := self._victim(key)) is not None:
            self._evict(victim)
        self._release_evicted()

    def add(self, key: Key, recording: Replayable, cost: Cost, owner: str) -> None:
        """Keep a recording for which there was room made, and evict what has to go for it.

        Args:
            key: its name from now on.
            recording: can be replayed.
            cost: what capturing it took.
            owner: in whose name it shares memory.

        Raises:
            ValueError: it does not fit beside what the same step replays; it is dropped.
        """
        self._add(key, recording, cost, owner)
        while self._exceeds() and (victim := self._victim(key)) is not None:
            self._evict(victim)
        self._release_evicted()
        if self._exceeds():
            least = self.nbytes
            self._drop(self._ready[key])
            raise ValueError(
                f"graph_memory: the recordings of one step take {mib(least)} ({least} bytes), and the limit is "
                f"{mib(self.budget.nbytes or 0)}; give at least graph_memory={least}"
            )

    def try_to_add(self, key: Key, recording: Replayable, cost: Cost, owner: str) -> bool:
        """Keep a recording if those can make room for it that any step can do without; else drop it.

        Args: those of ``add``.

        Returns:
            Whether it was kept.
        """
        self._add(key, recording, cost, owner)
        fits = self.has_room_for(key)
        while fits and self._exceeds():
            self._evict(min(self._smaller(key), key=_used))
        if not fits:
            self._drop(self._ready[key])
            self._entries[key].evictions += 1
        return fits

    def _add(self, key: Key, recording: Replayable, cost: Cost, owner: str) -> None:
        self.shared[owner] += cost.shared
        entry = self._entry(key)
        entry.captured(recording, cost)
        self._ready[key] = entry

    def missed(self, key: Key, padded: bool = False) -> None:
        """Count a step that wants a recording that there is not; ``padded`` if it runs in a larger one."""
        entry = self._entry(key)
        entry.misses += 1
        entry.padded += padded

    def failed(self, key: Key) -> None:
        """Count one that could not be captured."""
        self._entry(key).failures += 1

    def _entry(self, key: Key) -> Entry[Any]:
        return self._entries.setdefault(key, Entry(key, self._clock))

    def _victim(self, new: Key) -> Entry[Any] | None:
        """Return which goes for one that has to be captured now, but none that runs in one step with that.

        The least recently used, and after these anchors, the least important first.
        """
        return max(self._apart_from(new), key=lambda entry: (self._rank(entry), -entry.used), default=None)

    def _smaller(self, new: Key) -> list[Entry[Any]]:
        """Return those that any step can do without, once there is a new one: another one is ready to run in."""
        stay = {new, *self._staying("decode", new), *self._staying("prefill", new)}
        return [entry for entry in self._ready.values() if entry.key not in stay]

    def _staying(self, phase: Phase, new: Key) -> list[Key]:
        """Return the anchors of a phase; if there are none, the largest."""
        found = [key for key in (*self._ready, new) if described(key)[0] == phase]
        anchors = [key for key in found if key in self.anchors[phase]]
        return anchors or sorted(found, key=_size)[-1:]

    def _apart_from(self, new: Key) -> list[Entry[Any]]:
        """Return all but those that run in one step with a new one."""
        latest = {entry.phase: entry for entry in sorted(self._ready.values(), key=_used)}
        phase = described(new)[0]
        stay = [entry for other, entry in latest.items() if other in ("decode", "prefill") and other != phase]
        return [entry for entry in self._ready.values() if entry.key != new and entry not in stay]

    def _rank(self, entry: Entry[Any]) -> float:
        """Return how unimportant it is as an anchor."""
        anchors = self.anchors.get(entry.phase, [])
        return anchors.index(entry.key) if entry.key in anchors else float("inf")

    # ---- go

    @property
    def releases_later(self) -> bool:
        """Whether something was evicted that may still run."""
        return bool(self._leaving)

    def release_ended(self) -> bool:
        """Give back what evicted recordings take that have ended, while nothing is captured; whether none is left."""
        while self._leaving and self._leaving[0].ended():
            self._leaving.pop(0).recording.release()
        return not self._leaving

    def _release_evicted(self) -> None:
        if not self.release_ended():
            self._wait()
            while self._leaving:
                self._leaving.pop(0).recording.release()

    def _evict(self, entry: Entry[Any]) -> None:
        self._leaving.append(_Leaving(self._taken_out(entry), entry.nbytes, self._mark()))
        entry.evictions += 1
        logger.debug("evicted a %s of %d tokens, %d rows", entry.phase, entry.tokens, entry.rows)

    def drop(self, keys: Iterable[Key]) -> None:
        """Drop recordings that hold no more; nothing of them is launched any more."""
        self._release_evicted()
        for key in keys:
            self._drop(self._ready[key])

    def _drop(self, entry: Entry[Any]) -> None:
        self._taken_out(entry).release()

    def _taken_out(self, entry: Entry[Any]) -> Replayable:
        recording: Replayable | None = entry.recording
        assert recording is not None
        entry.recording = None
        del self._ready[entry.key]
        for dropped in self.when_dropped:
            dropped(entry.key)
        return recording

    # ---- accounts

    def table(self) -> RecordingTable:
        """Return what there is to see of all; any thread may ask."""
        order = {"decode": 0, "prefill": 1, "choice": 2}
        rows = [entry.row() for entry in list(self._entries.values())]
        rows.sort(key=lambda row: (order[row.phase], row.rows, row.tokens, row.variant))
        shared = self.shared.total()
        nbytes = shared + self._leaving_nbytes + sum(row.nbytes for row in rows)
        return RecordingTable(rows, nbytes, shared, self.budget.nbytes, self.budget.most)


def _used(entry: Entry[Any]) -> float:
    return entry.used


def _size(key: Key) -> tuple[int, int, int]:
    _, tokens, rows, variant = described(key)
    return tokens, rows, -variant


def described(key: Key) -> tuple[Phase, int, int, int]:
    """Return phase, tokens, rows and variant."""
    if isinstance(key, Shape):
        return "prefill", key.tokens, key.rows, key.variant
    if isinstance(key, Choice):
        return "choice", key.rows, key.rows, int(key.masked)
    return "decode", key, key, 0
