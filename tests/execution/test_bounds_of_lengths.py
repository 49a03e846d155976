"""Rows that draft: the device decides how many of their tokens count, and until that is read the host has bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import compiled_llm
from compiled_llm.compilation.drafts import DrafterError
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.execution.growth import sync_lengths
from compiled_llm.kvcache.row import Row
from support.execution.alone import Alone
from support.execution.schedule import assert_logits, prompt_of
from support.execution.scripted_drafts import Launched, Scripted, ScriptedDrafts
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.parity import assert_account_is_empty
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.core

OPTIONS: dict[str, Any] = {"page_size": 4, "kv_memory": "1500 tokens", "max_batch_size": 8, "progress": False}
OVERRIDES: dict[str, Any] = {"eos_token_id": None, "num_hidden_layers": 2}


def wrapped(**options: Any) -> Any:
    return compiled_llm.wrap(tiny_qwen3(**OVERRIDES), **{**OPTIONS, "mode": "eager", **options})


class Batch:
    """Rows, their twins in HuggingFace's forward, and what each has fed in on the device."""

    def __init__(self, model: Any, lengths: list[int], seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.model, self.plain = model, tiny_qwen3(**OVERRIDES)
        self.loop: GenerateLoop = model.compiled.generate_loop()
        prompts = [prompt_of(length, self.rng) for length in lengths]
        self.twins = [Alone(self.plain, prompt) for prompt in prompts]
        for prompt in prompts:
            self.loop.admit(prompt, 120)
        self.loop.step()
        self.loop.drain()
        self.drafts = ScriptedDrafts(self.loop)

    def draft(self, new: int, counts: list[int] | None = None) -> Launched:
        """Launch a step that drafts, of which any number of tokens count if these are no ``counts``."""
        bounds = [row.length_at_most + new for row in self.loop.rows]
        drawn = self.rng.integers(1, new + 1, len(self.twins)).tolist()
        launched = self.drafts.launch(new, counts or drawn, self.twins)
        assert [row.length_at_most for row in self.loop.rows] == bounds
        return launched

    @property
    def lengths(self) -> list[int]:
        return [len(twin.fed) for twin in self.twins]

    def assert_exact(self) -> None:
        for row, length in zip(self.loop.rows, self.lengths, strict=True):
            assert (row.length_at_most, row.position_at_most, len(row.pages)) == (
                length,
                length,
                row._pool.pages_for(length),
            )

    def close(self) -> None:
        self.loop.close()
        assert_account_is_empty(self.model)


@pytest.mark.drawn(most=1)
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(
    ("mode", "lengths", "new", "set_up"),
    [
        pytest.param(*case, set_up, marks=pytest.mark.whole if case[0] == "compile" else ())
        for case in (("eager", [4], 2), ("eager", [3, 4, 9], 4), ("compile", [1, 7, 8, 15], 2))
        for set_up in (None, let_a_cpu_capture)
    ],
)
def test_what_counts_is_what_as_many_steps_give(
    mode: str, lengths: list[int], new: int, set_up: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are read one step late, and until then lengths are bounds; then steps of one token go on."""
    if set_up is not None:
        set_up(monkeypatch)
    batch = Batch(wrapped(mode=mode), lengths, seed)
    before: Launched | None = None
    for _ in range(8):
        launched = batch.draft(new)
        if before is not None:
            before.check()
        rows = batch.loop.rows
        assert [row.length_at_most - len(row.speculation.unread) * new for row in rows] == [
            length - len(launched.expected[row]) for row, length in zip(rows, batch.lengths, strict=True)
        ]
        assert all(row.length_at_most >= length for row, length in zip(rows, batch.lengths, strict=True))
        before = launched
    for _ in range(5):
        batch.loop.step()
        for twin in batch.twins:
            twin.feed([twin.next])
        assert_logits(batch.loop, *batch.twins)
    launched.check()
    batch.assert_exact()
    assert batch.model.compiled.stats().recompiles == 0
    batch.close()


def test_nothing_is_written_while_the_same_rows_draft(seed: int) -> None:
    """The device goes on from its own lengths, whether or not the host has read them."""
    batch = Batch(wrapped(), [3, 9], seed)
    launched = [batch.draft(2)]
    uploads = batch.model.compiled.model_runner().events.uploads
    before = uploads["rows_changed"] + uploads["call_moved_in"]
    for number in range(12):
        launched.append(batch.draft(2))
        if number % 3:
            launched.pop(0).check()
    assert uploads["rows_changed"] + uploads["call_moved_in"] == before
    for step in launched:
        step.check()
    batch.assert_exact()
    batch.close()


def fork(batch: Batch) -> None:
    forked = batch.loop.fork()
    assert [row.length_at_most for row in forked.rows] == batch.lengths
    forked.close()


def rewind(batch: Batch) -> None:
    for number, (row, twin) in enumerate(zip(batch.loop.rows, batch.twins, strict=True)):
        row.rewind(len(twin.fed) - 1)
        batch.twins[number] = Alone(batch.plain, twin.fed[:-1])


def stored(batch: Batch) -> None:
    assert [keys.shape[1] for keys, _ in batch.loop.stored(0)] == batch.lengths


def extend(batch: Batch) -> None:
    ids = [np.array([5, 6]) for _ in batch.twins]
    batch.loop.extend(batch.loop.rows, ids, [length + np.arange(2) for length in batch.lengths])
    for twin in batch.twins:
        twin.feed([5, 6])


def go_away(batch: Batch) -> None:
    batch.loop.release(batch.loop.rows[0])
    del batch.twins[0]
    batch.loop.step()
    for twin in batch.twins:
        twin.feed([twin.next])


def end(batch: Batch) -> None:
    for row in batch.loop.rows:
        row.release_unused()
        row.reserve(row.length_at_most + 20)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("act", [fork, rewind, stored, extend, go_away, end])
def test_what_needs_exact_lengths_waits_for_them(act: Callable[[Batch], None], seed: int) -> None:
    batch = Batch(wrapped(), [3, 4, 9], seed)
    for _ in range(6):
        batch.draft(4)
        batch.draft(4)
        act(batch)
        batch.loop.step(torch.tensor([7] * len(batch.twins)))
        for twin in batch.twins:
            twin.feed([7])
        assert_logits(batch.loop, *batch.twins)
        sync_lengths(batch.loop.rows)  # a step of other rows, or of one token, does not
        batch.assert_exact()
        if act is go_away and len(batch.twins) == 1:
            break
    batch.close()


def test_a_drafter_that_raises_leaves_rows_that_go_on(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(wrapped(), [3, 4], seed)
    batch.draft(2)
    with monkeypatch.context() as patch:

        def fails(*_: Any) -> Any:
            raise KeyError("scripted")

        patch.setattr(Scripted, "propose", fails)
        with pytest.raises(DrafterError, match="the drafter Scripted has raised KeyError: 'scripted'"):
            batch.drafts.launch(2, [0, 0], batch.twins)
    batch.loop.step(torch.tensor([7, 7]))
    for twin in batch.twins:
        twin.feed([7])
    assert_logits(batch.loop, *batch.twins)
    sync_lengths(batch.loop.rows)
    batch.assert_exact()
    batch.close()


def test_a_step_that_fails_is_undone_alone_when_earlier_tokens_are_rejected_meanwhile(seed: int, monkeypatch) -> None:
    """What places the rows reads how many tokens count."""
    batch = Batch(wrapped(), [3, 4], seed)
    batch.loop.step(torch.tensor([7, 7]))  # its step is prepared
    for twin in batch.twins:
        twin.feed([7])
    batch.draft(4, [1, 2]).check()
    batch.draft(4, [2, 1])
    buffers = batch.model.compiled.model_runner().decode_buffers

    def place(self: Any, rows: list[Row], *_: Any, **__: Any) -> None:
        sync_lengths(rows)
        raise KeyError

    monkeypatch.setattr(type(buffers), "place", place)
    with pytest.raises(KeyError):
        batch.loop.step(torch.tensor([7, 7]))
    assert [(row.length_at_most, row.position_at_most) for row in batch.loop.rows] == [(7, 7), (8, 8)]
    batch.close()


def test_a_row_that_was_freed_rejects_nothing(seed: int) -> None:
    batch = Batch(wrapped(), [3, 4], seed)
    gone = batch.loop.rows[0]
    launched = batch.draft(4, [1, 1])
    batch.loop.release(gone)
    launched.check()
    assert [(row.length_at_most, row.position_at_most) for row in (gone, *batch.loop.rows)] == [(0, 0), (5, 5)]
    batch.close()


def test_bounds_take_no_pages_that_were_not_promised(seed: int) -> None:
    """16 tokens are promised; bounds would take 24, and the pool has no more."""
    batch = Batch(wrapped(), [4], seed)
    row = batch.loop.rows[0]
    row.release_unused()
    row.reserve(16)
    batch.loop.step(torch.tensor([7]))
    batch.twins[0].feed([7])
    pool = batch.model.compiled.model_runner().pool
    others = pool.available
    pool.reserve(others)
    for _ in range(8):
        batch.drafts.launch(4, [1], batch.twins)
    row.speculation.sync()
    assert row.length_at_most == 13
    pool.give_back((), others)
    batch.close()
