"""Rows that feed in several known tokens, of which the device decides how many count: till then the host has bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import compiled_llm
from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm.execution.decode.verification import Verification
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.execution.growth import sync_lengths
from compiled_llm.kvcache.row import Row
from compiled_llm_ops.reference.backend import Reference
from support.execution.alone import Alone
from support.execution.schedule import assert_logits, prompt_of
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.parity import assert_account_is_empty
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.core

OPTIONS: dict[str, Any] = {"page_size": 4, "kv_memory": "1500 tokens", "max_batch_size": 8, "progress": False}
OVERRIDES: dict[str, Any] = {"eos_token_id": None, "num_hidden_layers": 2}


def wrapped(**options: Any) -> Any:
    return compiled_llm.wrap(tiny_qwen3(**OVERRIDES), **{**OPTIONS, "mode": "eager", **options})


def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reference, "decode_ops", lambda self, device: None)


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

    def verify(self, new: int) -> tuple[Verification, dict[Row, list[int]]]:
        """Feed in tokens of which some count; return the result on its way, and what it will be."""
        tokens = [prompt_of(new, self.rng) for _ in self.twins]
        counts = self.rng.integers(1, new + 1, len(tokens))
        bounds = [row.length + new for row in self.loop.rows]
        result = self.loop.verify(torch.tensor(tokens), lambda sampled: torch.from_numpy(counts))
        buffers = self.model.compiled.model_runner().decode_buffers
        if not buffers.follows_pages:  # whose steps are planned for exact lengths
            assert [row.length for row in self.loop.rows] == bounds
        expected: dict[Row, list[int]] = {}
        for row, twin, own, count in zip(self.loop.rows, self.twins, tokens, counts, strict=True):
            expected[row] = []
            for token in own[:count]:
                twin.feed([token])
                expected[row].append(twin.next)
        return result, expected

    @property
    def lengths(self) -> list[int]:
        return [len(twin.fed) for twin in self.twins]

    def assert_exact(self) -> None:
        for row, length in zip(self.loop.rows, self.lengths, strict=True):
            assert (row.length, row.position, len(row.pages)) == (length, length, row._pool.pages_for(length))

    def close(self) -> None:
        self.loop.close()
        assert_account_is_empty(self.model)


@pytest.mark.drawn
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(
    ("mode", "lengths", "new", "set_up"),
    [
        pytest.param(*case, set_up, marks=pytest.mark.whole if case[0] == "compile" else ())
        for case in (("eager", [4], 2), ("eager", [3, 4, 9], 5), ("compile", [1, 7, 8, 15], 2))
        for set_up in (None, let_a_cpu_capture, planned)
    ],
)
def test_what_counts_is_what_as_many_steps_give(
    mode: str, lengths: list[int], new: int, set_up: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are read one step late, and until then lengths are bounds; then steps of one token go on."""
    if set_up is not None:
        set_up(monkeypatch)
    batch = Batch(wrapped(mode=mode), lengths, seed)
    before: tuple[Verification, dict[Row, list[int]]] | None = None
    for _ in range(8):
        result, expected = batch.verify(new)
        if before is not None:
            assert before[0].read() == before[1]
        assert [row.length - len(row.speculation.unread) * new for row in batch.loop.rows] == [
            length - len(expected[row]) for row, length in zip(batch.loop.rows, batch.lengths, strict=True)
        ]
        assert all(row.length >= length for row, length in zip(batch.loop.rows, batch.lengths, strict=True))
        before = result, expected
    assert result.next_tokens.tolist() == [twin.next for twin in batch.twins]
    for _ in range(5):
        batch.loop.step()
        for twin in batch.twins:
            twin.feed([twin.next])
        assert_logits(batch.loop, *batch.twins)
    assert result.read() == expected
    batch.assert_exact()
    assert batch.model.compiled.stats().recompiles == 0
    batch.close()


def test_nothing_is_written_while_the_same_rows_verify(seed: int) -> None:
    """The device goes on from its own lengths, whether or not the host has read them."""
    batch = Batch(wrapped(), [3, 9], seed)
    results = [batch.verify(2)]
    uploads = batch.model.compiled.model_runner().events.uploads
    before = uploads["rows_changed"] + uploads["call_moved_in"]
    for number in range(12):
        results.append(batch.verify(2))
        if number % 3:
            result, expected = results.pop(0)
            assert result.read() == expected
    assert uploads["rows_changed"] + uploads["call_moved_in"] == before
    for result, expected in results:
        assert result.read() == expected
    batch.assert_exact()
    batch.close()


def fork(batch: Batch) -> None:
    forked = batch.loop.fork()
    assert [row.length for row in forked.rows] == batch.lengths
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
        row.reserve(row.length + 20)


@pytest.mark.drawn(most=3)
@pytest.mark.parametrize("act", [fork, rewind, stored, extend, go_away, end])
def test_what_needs_exact_lengths_waits_for_them(act: Callable[[Batch], None], seed: int) -> None:
    batch = Batch(wrapped(), [3, 4, 9], seed)
    for _ in range(6):
        batch.verify(3)
        batch.verify(3)
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


def test_drafts_of_which_the_longest_right_beginning_counts_give_the_greedy_text(seed: int) -> None:
    """The next step's tokens never pass through the host; a draft is right now and then."""
    batch = Batch(wrapped(), [3, 6], seed)
    following = torch.tensor([twin.next for twin in batch.twins])
    texts = [list(twin.fed) for twin in batch.twins]
    answers = [
        batch.plain.generate(torch.tensor([text]), max_new_tokens=60, do_sample=False)[0].tolist() for text in texts
    ]
    results, rows = [], list(batch.loop.rows)
    for _ in range(12):
        at = [len(text) + 1 for text in texts]
        drafts = torch.tensor([answer[begin : begin + 2] for answer, begin in zip(answers, at, strict=True)])
        drafts += torch.from_numpy(batch.rng.integers(0, 2, drafts.shape))
        tokens = torch.cat([following[:, None], drafts], dim=1)
        result = batch.loop.verify(tokens, lambda sampled, tokens=tokens: right_beginning(tokens, sampled))
        following = result.next_tokens
        results.append(result)
        for row, text in zip(rows, texts, strict=True):
            kept = result.counts()[rows.index(row)]
            text += tokens[rows.index(row), :kept].tolist()
    sampled = [result.read() for result in results]
    for row, text, answer, twin in zip(rows, texts, answers, batch.twins, strict=True):
        assert text == answer[: len(text)]
        assert [token for own in sampled for token in own[row]] == answer[len(twin.fed) + 1 :][
            : len(text) - len(twin.fed)
        ]
        assert row.length == len(text) > len(twin.fed) + 12
    batch.close()


def right_beginning(tokens: Tensor, sampled: Tensor) -> Tensor:
    return 1 + (tokens[:, 1:] == sampled[:, :-1]).long().cumprod(1).sum(1)


def test_counts_that_are_no_counts_never_leave_a_rows_pages(seed: int) -> None:
    batch = Batch(wrapped(), [3, 4], seed)
    start = batch.lengths
    low = batch.loop.verify(torch.ones(2, 3, dtype=torch.int64), lambda sampled: torch.tensor([-5, 99]))
    assert low.counts().tolist() == [1, 3]
    low.read()
    assert [row.length for row in batch.loop.rows] == [start[0] + 1, start[1] + 3]
    batch.close()


def fails(sampled: Tensor) -> Tensor:
    raise KeyError("rule")


@pytest.mark.parametrize(("accept", "error"), [(fails, KeyError), (lambda sampled: sampled, ValueError)])
def test_a_rule_that_fails_leaves_rows_that_go_on(accept: Any, error: type[Exception], seed: int) -> None:
    batch = Batch(wrapped(), [3, 4], seed)
    batch.verify(2)
    with pytest.raises(error):
        batch.loop.verify(torch.tensor([[5, 6], [5, 6]]), accept)
    for twin in batch.twins:
        twin.feed([5, 6])
    batch.loop.step(torch.tensor([7, 7]))
    for twin in batch.twins:
        twin.feed([7])
    assert_logits(batch.loop, *batch.twins)
    batch.assert_exact()
    batch.close()


def test_a_step_that_fails_is_undone_alone_when_earlier_tokens_are_rejected_meanwhile(seed: int, monkeypatch) -> None:
    """What places the rows reads how many tokens count."""
    batch = Batch(wrapped(), [3, 4], seed)
    batch.loop.step(torch.tensor([7, 7]))  # its step is prepared
    tokens = torch.ones(2, 3, dtype=torch.int64)
    batch.loop.verify(tokens, lambda sampled: torch.tensor([1, 2])).read()
    batch.loop.verify(tokens, lambda sampled: torch.tensor([2, 1]))
    buffers = batch.model.compiled.model_runner().decode_buffers

    def place(self: Any, rows: list[Row], *_: Any, **__: Any) -> None:
        sync_lengths(rows)
        raise KeyError

    monkeypatch.setattr(type(buffers), "place", place)
    with pytest.raises(KeyError):
        batch.loop.step(torch.tensor([7, 7]))
    assert [(row.length, row.position) for row in batch.loop.rows] == [(7, 7), (8, 8)]
    batch.close()


def test_a_row_that_was_freed_rejects_nothing(seed: int) -> None:
    batch = Batch(wrapped(), [3, 4], seed)
    gone = batch.loop.rows[0]
    result = batch.loop.verify(torch.ones(2, 3, dtype=torch.int64), lambda sampled: torch.tensor([1, 1]))
    batch.loop.release(gone)
    result.read()
    assert [(row.length, row.position) for row in (gone, *batch.loop.rows)] == [(0, 0), (5, 5)]
    batch.close()


def test_bounds_take_no_pages_that_were_not_promised(seed: int) -> None:
    """16 tokens are promised; bounds would take 24, and the pool has no more."""
    batch = Batch(wrapped(), [4], seed)
    row = batch.loop.rows[0]
    row.release_unused()
    row.reserve(16)
    pool = batch.model.compiled.model_runner().pool
    others = pool.available
    pool.reserve(others)
    for _ in range(8):
        batch.loop.verify(torch.tensor([[5, 6, 7, 8]]), lambda sampled: torch.tensor([1]))
    row.speculation.sync()
    assert row.length == 12
    pool.give_back((), others)
    batch.close()


def test_what_cannot_be_verified_is_refused() -> None:
    model = wrapped()
    loop = model.compiled.generate_loop()
    loop.admit([3, 4], 10, Sampling(repetition_penalty=1.5))
    loop.step()
    with pytest.raises(ValueError, match="two tokens"):
        loop.verify(torch.ones(1, 1, dtype=torch.int64), lambda sampled: sampled[:, 0])
    with pytest.raises(ValueError, match="penalties"):
        loop.verify(torch.ones(1, 2, dtype=torch.int64), lambda sampled: sampled[:, 0])
