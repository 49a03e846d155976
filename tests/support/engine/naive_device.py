"""A device as simple as can be, beneath an engine's loop: pages hold tokens, and the next one follows from all of them.

Pages that are taken or given back are poisoned, so a row that reads what it has not written finds it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from compiled_llm.compilation.sampling.sampling import NOT_A_TOKEN, Sampling
from compiled_llm.execution.batch import Batch, Extension, StepOutput
from compiled_llm.execution.growth import grown
from compiled_llm.kvcache.pool import PagePool
from compiled_llm.kvcache.row import Row

VOCABULARY = 6
BAD = 5
"""A token after which nothing can be drawn."""
POISON = (-1, -1)


class PoisonedPool(PagePool):
    """Forgets what is written in a page when it is taken or given back."""

    def __init__(self, pages: int, page_size: int) -> None:
        super().__init__(pages, page_size)
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
        self.thread = SimpleNamespace(call=lambda function, *args: function(*args))
        self.readbacks = SimpleNamespace(start=self._start_reading)
        config = SimpleNamespace(page_size=pool.page_size)
        self.taken = 0
        self.deferring: set[int] = set()
        graphs = SimpleNamespace(leave=lambda user: None)
        self.state = SimpleNamespace(
            arena=None,
            slots=self,
            pool=pool,
            config=config,
            cascade=None,
            taps=(),
            max_positions=10_000,
            sampling_graphs=graphs,
            validity=pool.validity,
        )
        self.unsampled: list[Row] = []
        self.steps = SimpleNamespace(decode=None)
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

    def go_on(self) -> None:
        """Nothing is captured here."""

    def settle(self) -> None:
        """Likewise."""

    def can_mix(self, decode: Sequence[Row], extend: Sequence[Extension]) -> bool:
        return bool(decode and extend)

    def mixing_pays(self, decode: Sequence[Row], extend: Sequence[Extension]) -> bool:
        return sum(row.length for row in decode) % 2 == 0  # now and then

    def run(self, batch: Batch, persistent: Any) -> StepOutput:
        self.fault("run")
        entries = [(row, [self.next[row]], True) for row in batch.decode]
        entries += [(entry.row, entry.ids.tolist(), entry.is_last) for entry in batch.extend]  # type: ignore[misc]
        rows = [row for row, _, _ in entries]
        assert len(set(rows)) == len(rows), "a row is twice in a step"
        for extension in batch.extend:
            row = extension.row
            assert isinstance(row, Row)
            assert row.position == row.length
            assert extension.positions.tolist() == list(range(row.length, row.length + len(extension.ids)))
        with grown(rows, [len(ids) for _, ids, _ in entries], None, self._copies):
            for row, ids, _ in entries:
                self._write(row, ids)
            self.fault("written")
            assert not self.unsampled, "the rows of an earlier step have no tokens yet"
            chosen = [(row, self._now_or_late(row)) for row, _, ends in entries if ends]
        for row in rows:
            row.position = row.length
        self.next.update((row, max(0, token)) for row, token in chosen if row not in self.unsampled)
        self.fault("ran")
        return StepOutput([row for row, _ in chosen], None, [token for _, token in chosen])  # type: ignore[arg-type]

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
        tokens = [NOT_A_TOKEN if row.slot is None else self._choose(row) for row in rows]
        self.next.update((row, max(0, token)) for row, token in zip(rows, tokens, strict=True) if row.slot is not None)
        return StepOutput(rows, None, tokens)  # type: ignore[arg-type]

    def _copies(self, copies: object) -> None:
        raise AssertionError("an engine's rows share full pages alone")

    def _write(self, row: Row, ids: Sequence[int]) -> None:
        size = self.pool.page_size
        for at, token in enumerate(ids, start=row.length - len(ids)):
            page = row.pages[at // size]
            assert self.pool._owners[page] == 1, "a row writes into a page that others read"
            self.pool.memory[page][at % size] = token, self.version

    def text(self, row: Row) -> list[int]:
        """What a row reads."""
        size = self.pool.page_size
        read = [self.pool.memory[row.pages[at // size]][at % size] for at in range(row.length)]
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
