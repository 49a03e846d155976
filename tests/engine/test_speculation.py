"""An engine that guesses tokens: the same tokens as without, whatever is guessed, comes, goes and runs out."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import initialize

from compiled_llm.compilation.sampling.sampling import NOT_A_TOKEN
from compiled_llm.engine.steps.request import Request
from compiled_llm.execution.batch import Batch, StepOutput, Tap
from compiled_llm.execution.growth import grown
from compiled_llm.kvcache.row import Row
from support.engine.crowd import VOCABULARY, Crowd, NaiveDevice, PoisonedPool, next_token

pytestmark = pytest.mark.core

NOT_ACCEPTED = -2


# ---- any guesses, over a naive device


class DraftTap(Tap):
    """Asks for a step of ``new_tokens`` a row."""

    def __init__(self, new_tokens: int) -> None:
        self.new_tokens = new_tokens


class DraftingDevice(NaiveDevice):
    """A naive device that guesses, and alone knows how long its rows are.

    Attributes:
        right: of 4 guesses, about so many are right.
    """

    right = 2

    def __init__(self, pool: PoisonedPool, max_rows: int) -> None:
        super().__init__(pool, max_rows)
        self.exact: dict[Row, int] = {}
        self.drafted = 0

    def run(self, batch: Batch, persistent: Any) -> StepOutput:
        for row in batch.decode:
            self.exact.setdefault(row, row.length)
        for entry in batch.extend:
            assert isinstance(entry.row, Row)
            self.exact.setdefault(entry.row, entry.row.length)
        new = max([tap.new_tokens for tap in batch.taps if isinstance(tap, DraftTap)], default=1)
        if new == 1:
            return self._plain(batch, persistent)
        decoded = self._drafted(batch.decode, new)
        if not batch.extend:
            return StepOutput(batch.decode, None, decoded)  # type: ignore[arg-type]
        earlier, self.unsampled = self.unsampled, []
        extended = self._plain(batch._replace(decode=()), persistent)
        self.unsampled = [*earlier, *self.unsampled]
        return StepOutput([*batch.decode, *extended.rows], None, [*decoded, *extended.tokens])  # type: ignore[arg-type]

    def _plain(self, batch: Batch, persistent: Any) -> StepOutput:
        for row in batch.decode:
            self.exact[row] += 1
        for entry in batch.extend:
            assert isinstance(entry.row, Row)
            self.exact[entry.row] += len(entry.ids)
        return super().run(batch, persistent)

    def _drafted(self, rows: Sequence[Row], new: int) -> list[int]:
        self.fault("run")
        assert not self.unsampled, "the rows of an earlier step have no tokens yet"
        self.drafted += 1
        with grown(rows, [new] * len(rows), None, self._copies):
            runs = [self._run_of(row, new) for row in rows]
            self.fault("ran")
        return [token for run in runs for token in run]

    def _run_of(self, row: Row, new: int) -> list[int]:
        """Feed in the next token and guesses; return what was sampled, ``NOT_ACCEPTED`` for what does not count."""
        assert row.slot is not None, "a row runs without a slot"
        sampling, _ = self.slots[row.slot]
        start, tokens = self.exact[row], list[int]()
        fed = [self.next[row], *self._guesses(row, new)]
        assert row.length >= start + new, "the host's length is an upper bound"
        size = self.pool.page_size
        for at, token in enumerate(fed, start=start):
            page = row.pages[at // size]
            assert self.pool._owners[page] == 1, "a row guesses into a page that others read"
            self.pool.memory[page][at % size] = max(0, token), self.version
        deferred = sampling is not None and sampling.deferred
        for at in range(new):
            self.exact[row] = start + at + 1
            tokens.append(self._now_or_late(row))
            if deferred or tokens[-1] == NOT_A_TOKEN or at + 1 == new or fed[at + 1] != tokens[-1]:
                break
        row.position = row.length
        if not deferred:
            self.next[row] = max(0, tokens[-1])
        return tokens + [NOT_ACCEPTED] * (new - len(tokens))

    def _guesses(self, row: Row, new: int) -> list[int]:
        assert row.slot is not None
        sampling, seen = self.slots[row.slot]
        text, counted, guesses = [*self.text(row), self.next[row]], [*seen], list[int]()
        for at in range(new - 1):
            token = max(0, next_token(text, sampling, counted))
            if zlib.crc32(bytes([*text, at])) % 4 >= self.right:
                token = (token + 1) % VOCABULARY
            text.append(token)
            counted.append(token)
            guesses.append(token)
        return guesses

    def text(self, row: Row) -> list[int]:
        bound, row.length = row.length, self.exact.get(row, row.length)
        try:
            return super().text(row)
        finally:
            row.length = bound

    def _write(self, row: Row, ids: Sequence[int]) -> None:
        bound, row.length = row.length, self.exact[row]
        try:
            super()._write(row, ids)
        finally:
            row.length = bound


class NaiveAccepted:
    """What counts of a step, which the host has not read."""

    def __init__(self, rows: Sequence[Row], readback: Any, new_tokens: int) -> None:
        self._rows, self._readback, self.new_tokens, self._synced = rows, readback, new_tokens, False
        for row in rows:
            row.speculation.grow(self)

    def read(self) -> list[list[int]]:
        tokens = self._readback.result()
        starts = range(0, len(self._rows) * self.new_tokens, self.new_tokens)
        return [[token for token in tokens[at : at + self.new_tokens] if token != NOT_ACCEPTED] for at in starts]

    def sync(self) -> None:
        if not self._synced:
            for row, run in zip(self._rows, self.read(), strict=True):
                row.reject(self, self.new_tokens - len(run))
            self._synced = True


class NaiveDrafts:
    """The guesses of a loop, whose number of tokens a row changes now and then."""

    def __init__(self, numbers: Sequence[int], device: DraftingDevice) -> None:
        self._numbers, self._device = numbers, device
        self._taps = {number: DraftTap(number) for number in {*numbers}}

    def new_tokens(self, requests: Sequence[Request]) -> int:
        if all(request.constraint is not None for request in requests):
            return 1
        return self._numbers[self._device.taken // 3 % len(self._numbers)]

    def tap(self, new_tokens: int) -> Tap:
        return self._taps[new_tokens]

    def enter(self, requests: Iterable[Request]) -> None:
        for request in requests:
            known = request.text.tolist()
            assert [*self._device.text(request.running_row), 0][: len(known) - 1] == known[:-1]

    def launched(self, requests: Sequence[Request], readback: Any, new_tokens: int) -> NaiveAccepted:
        self._device.taken += 1
        return NaiveAccepted([request.running_row for request in requests], readback, new_tokens)

    def read(self, accepted: NaiveAccepted) -> list[list[int]]:
        accepted.sync()
        return accepted.read()


class Guessing(Crowd):
    """Requests that come and go while tokens are guessed."""

    @initialize(
        pages=st.integers(6, 20),
        size=st.integers(1, 4),
        rows=st.integers(1, 5),
        budget=st.integers(1, 12),
        caches=st.booleans(),
        late=st.booleans(),
        policy=st.sampled_from(["greedy", "greedy", "peak", "auto"]),
        numbers=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=3),
        right=st.integers(0, 4),
        positions=st.sampled_from([10_000, 30]),
    )
    def start(self, pages, size, rows, budget, caches, late, policy, numbers, right, positions):  # type: ignore[no-untyped-def, override]
        self.numbers, self.right, self.positions = numbers, right, positions
        super().start(pages, size, rows, budget, caches, late, policy)

    def device_of(self, pool: PoisonedPool, slots: int) -> DraftingDevice:
        device = DraftingDevice(pool, slots)
        device.right = self.right
        return device

    def drafting(self) -> dict[str, Any]:
        assert isinstance(self.device, DraftingDevice)
        self.drafts = NaiveDrafts(self.numbers, self.device)
        return {"new_tokens": self.drafts.new_tokens, "max_positions": self.positions}


class TestGuessing(Guessing.TestCase):  # type: ignore[misc]
    settings = settings(derandomize=True, deadline=None, max_examples=40, stateful_step_count=30)


@pytest.mark.whole
class TestLargeGuessing(Guessing.TestCase):  # type: ignore[misc]
    settings = settings(deadline=None, max_examples=1000, stateful_step_count=80, database=None)
