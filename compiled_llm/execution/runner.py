"""The way of a token as an object: ``admit`` a prompt, ``step``, ``release`` the row.

A step is launched before the tokens of the step before are read, so the host stays one step behind the device and
never holds it up.

Shapes: B rows, L tokens whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.compilation.sampling import Sampling
from compiled_llm.execution.device_model import PagedModel
from compiled_llm.execution.events import Upload
from compiled_llm.execution.packing import Extension
from compiled_llm.execution.staging import Readback
from compiled_llm.execution.threads.interrupts import held
from compiled_llm.kvcache.pool import Promise
from compiled_llm.kvcache.row import Row


class Runner:
    """Runs a changing set of rows; several runners of one model take turns in its decode buffers.

    Attributes:
        paged: the model's device side.
        rows: the rows whose prompts have been admitted, in the order of ``step``'s forced tokens and ``logits``.
        steps: how many steps have been launched.
        promise: pages that the rows may take together, while a call holds it.
    """

    def __init__(self, paged: PagedModel) -> None:
        """Start without rows."""
        self.paged = paged
        self._thread = paged.thread
        self.rows: list[Row] = []
        self.steps = 0
        self.promise = Promise(paged.pool)
        self._pending: list[tuple[Row, NDArray[np.int64], Sampling | None]] = []
        # The rows in the order in which the device holds their next tokens: in _tokens, or where that is None in the
        # decode buffers.
        self._order: list[Row] = []
        self._tokens: Tensor | None = None
        self._bucket = 0
        # What the decode buffers said of each row, if they are ours, before the rows went on by _gone_on tokens:
        # anything else must be uploaded anew. The rows can go on as long as _gone_on is less than _limit, when one of
        # them enters a page; unless by then, after _changes of the pool, pages have been shared or given back.
        self._left: list[tuple[Row, int, int]] = []
        self._gone_on = self._limit = self._changes = 0
        self._logits: Tensor | None = None
        self._launched: deque[tuple[list[Row], Readback]] = deque()
        self._finalizer = weakref.finalize(self, _free, self.rows)

    @property
    def max_positions(self) -> int:
        """How many positions the model was made for."""
        return self.paged.max_positions

    @property
    def max_rows(self) -> int:
        """How many rows there can be."""
        return self.paged.config.max_batch_size

    @property
    def vocabulary(self) -> int:
        """How many token ids the model can take."""
        return self.paged.vocabulary

    @property
    def asynchronous(self) -> bool:
        """Whether a step may still be running when ``step`` returns; else reading late gains nothing."""
        return self.paged.device.type != "cpu"

    @property
    def prepared(self) -> bool:
        """Whether the next decode step can be launched at once: nothing has to be compiled or recorded for it."""
        return self._bucket_for(len(self.rows)) in self.paged.ready_buckets

    # ---- the three verbs

    def admit(self, prompt: ArrayLike, max_new_tokens: int, sampling: Sampling | None = None) -> Row:
        """Let a prompt in; the next ``step`` prefills it together with all others that are waiting.

        Args:
            prompt: token ids, at least one.
            max_new_tokens: how many tokens the row may grow by; its pages are promised now.
            sampling: how it chooses its tokens; the most likely ones where None.

        Raises:
            ValueError: the prompt is empty or not of tokens of the model, ``max_new_tokens`` is negative, or
                there would be more rows than ``max_batch_size``.
            OutOfPagesError: the pages it may need are not free; nothing was taken.
        """
        given = np.asarray(prompt)
        if given.size == 0:
            raise ValueError("prompt is empty: give at least one token")
        vocabulary = self.paged.vocabulary
        if given.dtype.kind not in "iu" or given.min() < 0 or given.max() >= vocabulary:
            raise ValueError(
                f"prompt: token ids are integers from 0 to {vocabulary - 1}; got {given.dtype} from {given.min()} to "
                f"{given.max()}"
            )
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={max_new_tokens}: must not be negative")
        # The last token is chosen but never stored.
        row = self.add_row(given.size + max(0, max_new_tokens - 1))
        self._pending.append((row, given.astype(np.int64).reshape(-1), sampling))
        return row

    def resume(
        self, row: Row, tokens: NDArray[np.int64], max_new_tokens: int, sampling: Sampling | None = None
    ) -> None:
        """Let a row go on with more tokens given; otherwise as ``admit``.

        Args:
            row: one of this runner's.
            tokens: ``[Q]`` token ids, at least one.
            max_new_tokens: how many tokens the row may grow by after them; its pages are promised now.
            sampling: how it chooses its tokens; the most likely ones where None.

        Raises:
            OutOfPagesError: the pages it may need are not free; nothing was taken.
        """
        row.reserve(row.length + len(tokens) + max(0, max_new_tokens - 1))
        row.leave_slot()
        self._pending.append((row, tokens, sampling))

    def step(self, forced: Tensor | None = None, unchanged: bool = False) -> dict[Row, int]:
        """Launch one step and return the tokens of the step before.

        The step is a prefill where prompts are waiting, else one decode step of all rows.

        Args:
            forced: ``[B]`` int64, tokens for the rows to feed in, in the order of ``rows``, instead of their own.
            unchanged: nobody can have changed the model since the step before, so that what that has looked at need
                not be looked at again.

        Returns:
            The next token of each row that took part in the step before; ``sampling.NOT_A_TOKEN`` for one whose
            logits cannot be sampled from.

        Raises:
            RuntimeError: there is nothing to run.
            ValueError: ``forced`` does not have one integer a row.
            OutOfPagesError: a row has outgrown what it was promised, and no page is free; nothing has changed.
        """
        if forced is not None and not self._pending:
            self._check_tokens(forced)
        self._thread.call(self._launch, forced, unchanged)
        return self._read() if len(self._launched) > 1 else {}

    def release(self, row: Row) -> None:
        """Take a row out and give its pages back.

        Raises:
            ValueError: it is not one of this runner's.
        """
        if row not in self.rows:
            raise ValueError("release: the row is not one of this runner's; has it been released already?")
        self.rows.remove(row)
        self._pending = [entry for entry in self._pending if entry[0] is not row]
        row.free()

    def select(self, indices: Sequence[int]) -> None:
        """Replace the rows by some of them, each as often as it is named; pages are shared, not copied.

        Args:
            indices: for each new row, the old one that it goes on from.

        Raises:
            ValueError: they are more than ``max_batch_size``; nothing has changed.
        """
        self._check_room(len(indices))
        old = list(self.rows)
        rows = [old[index] if index == seat else old[index].fork() for seat, index in enumerate(indices)]
        self.rows[:] = rows
        with self.promise.drawn_on():
            for row in old:
                if row not in rows:
                    row.free()

    def fork(self) -> Runner:
        """Return a runner of its own with the same rows; pages are shared, not copied."""
        runner = Runner(self.paged)
        runner.rows += [row.fork() for row in self.rows]
        return runner

    def belongs_to(self, paged: PagedModel) -> bool:
        """Whether these rows lie in the pages of ``paged``."""
        return self.paged is paged

    def runs(self, model: PreTrainedModel) -> bool:
        """Whether these rows are of ``model``, as it is now or as it was."""
        return self.paged.is_of(model)

    # ---- around them

    def drain(self) -> dict[Row, int]:
        """Return the tokens of the oldest step not yet read, waiting for it; empty where there is none."""
        return self._read() if self._launched else {}

    def logits(self) -> Tensor:
        """Return ``[B, V]``, the last step's logits of the rows that took part, in the model's dtype."""
        assert self._logits is not None, "no step has run"
        return self._thread.call(self._logits.clone)

    def close(self) -> None:
        """Release all rows; the runner can be used again."""
        self._finalizer()
        self._finalizer = weakref.finalize(self, _free, self.rows)
        self.rows.clear()
        self.restart()

    def restart(self) -> None:
        """Begin a new loop with the rows as they are; what an earlier one left is forgotten."""
        self._pending.clear()
        self._launched.clear()
        self._forget()
        self._logits, self.steps, self._bucket = None, 0, 0

    def add_row(self, tokens: int) -> Row:
        """Add an empty row with pages promised for ``tokens``, for ``extend``.

        Raises:
            ValueError: there would be more rows than ``max_batch_size``.
            OutOfPagesError: the pages are not free; nothing was taken.
        """
        self._check_room(len(self.rows) + 1)
        row = Row(self.paged.pool, tokens)
        self.rows.append(row)
        return row

    def extend(
        self,
        rows: Sequence[Row],
        ids: Sequence[NDArray[np.int64]],
        positions: Sequence[NDArray[np.int64]],
        keep: NDArray[np.int64] | None = None,
        embeddings: Tensor | None = None,
    ) -> Tensor:
        """Store and compute more tokens of some rows, packed, and wait for nothing.

        Args:
            rows: rows of this runner.
            ids: each row's new tokens, at least one.
            positions: their rotary positions.
            keep: which packed tokens' logits are wanted; each row's last where None.
            embeddings: ``[T, hidden]``, what the model reads in place of ``ids``, packed.

        Returns:
            ``[L, V]`` logits in the model's dtype.
        """
        logits, _ = self._thread.call(self._extend, rows, ids, positions, keep, embeddings)
        return logits

    def stored(self, layer: int) -> list[Tensor]:
        """Return ``[2, K, length, D]`` for each row: copies of a layer's keys and values."""
        return self._thread.call(lambda: [self.paged.read(layer, row) for row in self.rows])

    def decode(self, tokens: Tensor, positions: Sequence[int]) -> Tensor:
        """Run one decode step of all rows with given tokens, and read nothing back.

        Args:
            tokens: ``[B]`` int64, in the order of ``rows``.
            positions: their rotary positions.

        Returns:
            ``[B, V]`` logits in the model's dtype, the caller's to keep.
        """
        return self._thread.call(self._decode_given, tokens, positions)

    def unseat(self) -> None:
        """Take this runner's tokens out of the decode buffers, before another's move in."""
        if self._order and self._tokens is None:
            self._tokens = self.paged.buffers.bucket(self.paged.bucket_for(len(self._order))).tokens.clone()
        if self._logits is not None:
            self._logits = self._logits.clone()  # the next replay overwrites them
        self._left, self._limit = [], 0

    def _check_room(self, rows: int) -> None:
        if rows > self.max_rows:
            raise ValueError(f"{rows} rows are more than max_batch_size={self.max_rows}; wrap with a larger one")

    def _check_tokens(self, tokens: Tensor) -> None:
        if tokens.shape != (len(self.rows),) or tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"forced: one integer token for each of {len(self.rows)} rows is needed; got {tokens.dtype} "
                f"{list(tokens.shape)}"
            )

    def _forget(self) -> None:
        """Hold no next tokens any more."""
        self._order, self._tokens, self._left, self._limit = [], None, [], 0

    # ---- in the executor

    def _launch(self, forced: Tensor | None, unchanged: bool = False) -> None:
        if self._pending:
            rows, tokens = self._prefill_pending()
        elif unchanged and forced is None and self._can_go_on():
            rows, tokens = self._go_on()
        elif self.rows:
            rows, tokens = self._decode(forced, unchanged)
        else:
            raise RuntimeError("step: there are no rows; admit a prompt first")
        self.steps += 1
        self._launched.append((rows, self.paged.readbacks.start(tokens)))

    def _prefill_pending(self) -> tuple[list[Row], Tensor]:
        rows = [row for row, _, _ in self._pending]
        ids = [tokens for _, tokens, _ in self._pending]
        positions = [row.position + np.arange(len(tokens)) for row, tokens in zip(rows, ids, strict=True)]
        sampled = [(row, sampling) for row, _, sampling in self._pending if sampling is not None and row.slot is None]
        if sampled:
            self.paged.sampler.admit([row for row, _ in sampled], [sampling for _, sampling in sampled])
        self.unseat()
        self._logits, tokens = self._extend(rows, ids, positions, None)
        self._pending.clear()
        self._hold(rows, tokens.clamp(min=0))
        return rows, tokens

    def _extend(
        self,
        rows: Sequence[Row],
        ids: Sequence[NDArray[np.int64]],
        positions: Sequence[NDArray[np.int64]],
        keep: NDArray[np.int64] | None,
        embeddings: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        batch = [Extension(*extension) for extension in zip(rows, ids, positions, strict=True)]
        self._left, self._limit = [], 0
        with self._grown(rows, [len(extension.ids) for extension in batch]):
            logits, tokens = self.paged.prefill(batch, keep, embeddings)
        for row, row_positions in zip(rows, positions, strict=True):
            row.position = int(row_positions[-1]) + 1
        return logits, tokens

    def _hold(self, rows: list[Row], tokens: Tensor) -> None:
        """Keep the next tokens of newly prefilled rows beside those of the rows that were there, already unseated."""
        held = [tokens] if self._tokens is None else [self._tokens[: len(self._order)], tokens]
        self._order = [*self._order, *rows]
        self._tokens = torch.cat(held) if len(held) > 1 else tokens

    def _decode_given(self, tokens: Tensor, positions: Sequence[int]) -> Tensor:
        for row, position in zip(self.rows, positions, strict=True):
            row.position = position
        self._decode(tokens)
        assert self._logits is not None
        return self._logits.clone()

    def _decode(self, forced: Tensor | None, unchanged: bool = False) -> tuple[list[Row], Tensor]:
        rows, paged = self.rows, self.paged
        bucket = self._bucket = self._bucket_for(len(rows))
        cause: Upload = "rows joined, left or went back" if paged.owned_by(self) else "a call moved its rows in"
        paged.make_decode_ready(bucket, waiting=len(rows), unchanged=unchanged)
        changes = paged.pool.changes
        seated = (unchanged and self._are_as_left()) or self._are_as_seated()
        if not seated and forced is None:
            self.unseat()
            forced = self._next_tokens()
        pages = sum(len(row.pages) for row in rows)
        with self._grown(rows, [1] * len(rows)) as copied:
            try:
                if not seated:
                    self._seat(bucket, forced, cause)
                elif copied:
                    paged.upload(rows, bucket, forced, "a row stopped sharing a page")
                elif sum(len(row.pages) for row in rows) != pages:
                    paged.upload(rows, bucket, forced, "a row entered a new page")
                elif forced is not None:
                    paged.buffers.bucket(bucket).tokens[: len(rows)].copy_(forced)
                logits, tokens = paged.run_decode(bucket)
            except BaseException:  # the buffers may have advanced
                self._forget()
                paged.claim(None)
                raise
        for row in rows:
            row.position += 1
        self._order, self._tokens = list(rows), None
        if seated:
            self._gone_on += 1
        else:
            self._left, self._gone_on = [(row, row.length, row.position) for row in rows], 0
        self._limit, self._changes = self._gone_on + min(row.room for row in rows), changes
        return self._taken_part(logits, tokens)

    def _can_go_on(self) -> bool:
        """Whether the decode buffers, as the last step left them, say all there is to say of the next one."""
        return self._gone_on < self._limit and self._are_as_left() and self.paged.is_ready(self._bucket)

    def _are_as_left(self) -> bool:
        """Whether the rows are those of the last step, in its pages, if nobody else has touched them."""
        paged = self.paged
        return (
            bool(self._left)
            and self._changes == paged.pool.changes
            and self._order == self.rows
            and paged.owned_by(self)
        )

    def _are_as_seated(self) -> bool:
        """Whether the decode buffers say of each row what is so."""
        gone_on = self._gone_on
        now = [(row, row.length - gone_on, row.position - gone_on) for row in self.rows]
        return self.paged.owned_by(self) and self._left == now

    def _go_on(self) -> tuple[list[Row], Tensor]:
        """Run a step of the same rows in the same pages."""
        try:
            logits, tokens = self.paged.run_decode(self._bucket)
            with held():
                self._gone_on += 1
                for row in self._order:
                    row.length += 1
                    row.position += 1
        except BaseException:  # the buffers may have advanced
            self._forget()
            self.paged.claim(None)
            raise
        return self._taken_part(logits, tokens)

    def _taken_part(self, logits: Tensor, tokens: Tensor) -> tuple[list[Row], Tensor]:
        """Keep the logits of the rows that took part in a decode step; return the rows, and their tokens."""
        rows = len(self._order)
        if rows < self._bucket:
            logits, tokens = logits[:rows], tokens[:rows]
        self._logits = logits
        return self._order, tokens

    def _bucket_for(self, rows: int) -> int:
        """Return the smallest bucket for so many rows; where there were more, the smallest that is ready.

        Nobody waits for a smaller one to be prepared because rows have ended.
        """
        smallest = self.paged.bucket_for(rows)
        if smallest >= self._bucket:
            return smallest
        return next((bucket for bucket in self.paged.ready_buckets if smallest <= bucket <= self._bucket), smallest)

    @contextmanager
    def _grown(self, rows: Sequence[Row], counts: Sequence[int]) -> Iterator[bool]:
        """Grow rows for the block, which learns whether pages were copied; if it fails, they shrink again."""
        marks = [row.mark() for row in rows]
        try:
            with held(), self.promise.drawn_on():
                grown = [row.grow(count) for row, count in zip(rows, counts, strict=True)]
                copies = [copy for copy in grown if copy is not None]
                if copies:
                    self.paged.copy_pages(copies)
            yield bool(copies)
        except BaseException:
            with held(), self.promise.drawn_on():
                for row, mark in zip(rows, marks, strict=True):
                    row.restore(mark)
            raise

    def _seat(self, bucket: int, tokens: Tensor | None, cause: Upload) -> None:
        """Move this runner's rows, in their present order, into the decode buffers."""
        self.paged.claim(self)
        self.paged.upload(self.rows, bucket, tokens, cause)

    def _next_tokens(self) -> Tensor:
        seats = {row: seat for seat, row in enumerate(self._order)}
        if self._tokens is None or any(row not in seats for row in self.rows):
            raise RuntimeError("step: the rows have no next tokens; give them as forced tokens")
        if self._order == self.rows:
            return self._tokens[: len(self.rows)]
        (order,) = self.paged.staging.to_device([np.array([seats[row] for row in self.rows], dtype=np.int64)])
        return self._tokens[order]

    def _read(self) -> dict[Row, int]:
        rows, readback = self._launched.popleft()
        return dict(zip(rows, readback.result(), strict=True))


@held()
def _free(rows: list[Row]) -> None:
    for row in rows:
        row.free()
