"""The generate loop: rows come and go, and each gets HuggingFace's logits and tokens as if it were alone."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm import OutOfPagesError
from compiled_llm.execution.decode.decode import Decode
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.execution.prefill.prefill import Prefill
from compiled_llm.kvcache.row import Row
from support.execution.alone import Alone
from support.parity import assert_account_is_empty
from support.tiny_models import tiny_llama, tiny_qwen3

pytestmark = pytest.mark.core

OPTIONS: dict[str, Any] = {"mode": "eager", "page_size": 3, "kv_memory": "1500 tokens", "max_batch_size": 9}
OVERRIDES: dict[str, Any] = {"eos_token_id": None, "num_hidden_layers": 1}
TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture
def model() -> PreTrainedModel:
    return compiled_llm.wrap(tiny_qwen3(**OVERRIDES), **OPTIONS, progress=False)


@pytest.fixture
def generate_loop(model: PreTrainedModel) -> GenerateLoop:
    return model.compiled.generate_loop()


def prompt_of(length: int, rng: np.random.Generator) -> list[int]:
    return rng.integers(3, 128, length).tolist()


class Schedule:
    """A runner and its rows' twins, each alone on HuggingFace's forward."""

    def __init__(self, generate_loop: GenerateLoop, plain: PreTrainedModel, rng: np.random.Generator) -> None:
        self.generate_loop, self._plain, self._rng = generate_loop, plain, rng
        self.twins: dict[Row, Alone] = {}
        self.waiting: dict[Row, list[int]] = {}
        self.expected: dict[Row, int] = {}  # of the step before
        self.left: dict[Row, int] = {}

    def admit(self, length: int, new: int) -> None:
        prompt = prompt_of(length, self._rng)
        row = self.generate_loop.admit(prompt, new)
        self.waiting[row], self.left[row] = prompt, new

    def release(self, row: Row) -> None:
        self.generate_loop.release(row)
        self.waiting.pop(row, None)
        self.twins.pop(row, None)
        del self.left[row]

    def step(self, forced: bool) -> None:
        """One step, and everything about it that HuggingFace can confirm."""
        tokens = None
        if self.waiting:
            took_part = list(self.waiting)
            for row in took_part:
                self.twins[row] = Alone(self._plain, self.waiting.pop(row))
        else:
            took_part = list(self.generate_loop.rows)
            if forced:
                tokens = torch.tensor(prompt_of(len(took_part), self._rng))
            for index, row in enumerate(took_part):
                self.left[row] -= 1
                self.twins[row].feed([self.twins[row].next if tokens is None else int(tokens[index])])
        arrived = self.generate_loop.step(tokens, unchanged=True)
        assert arrived == self.expected, "tokens of the step before, of the rows that took part in it"
        torch.testing.assert_close(
            self.generate_loop.logits(), torch.stack([self.twins[row].logits for row in took_part]), **TOLERANCE
        )
        self.expected = {row: self.twins[row].next for row in took_part}
        assert all(row.length == len(self.twins[row].fed) for row in took_part)

    def anything(self) -> None:
        """Admit, release and step at random; rows that reached their promise leave."""
        for row in [row for row, left in self.left.items() if left == 0]:
            self.release(row)
        if self.left and self._rng.random() < 0.12:
            self.release(list(self.left)[self._rng.integers(len(self.left))])
        room = 9 - len(self.left)
        wanted = room if not self.left else int(self._rng.random() < 0.2) * int(self._rng.integers(1, 4))
        for _ in range(min(room, max(wanted, 0 if self.left else 1))):
            self.admit(int(self._rng.integers(1, 25)), int(self._rng.integers(1, 40)))
        self.step(forced=bool(self._rng.random() < 0.4))


@pytest.mark.parametrize("make", [tiny_qwen3, tiny_llama])
def test_random_schedule_gives_every_row_huggingfaces_logits(make: Callable[..., PreTrainedModel], seed):
    model = compiled_llm.wrap(make(**OVERRIDES), **OPTIONS, progress=False)
    generate_loop = model.compiled.generate_loop()
    schedule = Schedule(generate_loop, make(**OVERRIDES), np.random.default_rng(seed))
    sizes = set()
    for _ in range(300):
        schedule.anything()
        sizes.add(len(generate_loop.rows))
        account = model.compiled.stats().pages
        assert account.used == sum(len(row.pages) + len(row.ahead) for row in generate_loop.rows)
        assert account.used + account.free + account.cached == account.total
    assert sizes >= {1, 2, 4, 9}
    assert generate_loop.steps == 300
    generate_loop.close()
    assert_account_is_empty(model)


def test_two_runners_step_by_step_keep_their_own_tokens(model, seed):
    plain, rng = tiny_qwen3(**OVERRIDES), np.random.default_rng(seed)
    schedules = [Schedule(model.compiled.generate_loop(), plain, rng) for _ in range(2)]
    for _ in range(80):
        for schedule in schedules:
            schedule.anything()
    for schedule in schedules:
        schedule.generate_loop.close()
    assert_account_is_empty(model)


def test_a_runner_goes_on_after_generate_took_the_decode_buffers(model, seed):
    schedule = Schedule(model.compiled.generate_loop(), tiny_qwen3(**OVERRIDES), np.random.default_rng(seed))
    for length in (4, 7, 1):
        schedule.admit(length, 30)
    for number in range(25):
        if number % 5 == 3:
            model.generate(torch.randint(3, 128, (1 + number % 4, 5)), max_new_tokens=3, do_sample=False)
        schedule.step(forced=False)


def test_tokens_arrive_one_step_late_and_drain_gives_the_rest(generate_loop):
    first = generate_loop.admit([3, 4, 5], 10)
    assert generate_loop.step() == {}
    assert list(generate_loop.step()) == [first]
    second = generate_loop.admit([6, 7], 10)
    assert list(generate_loop.step()) == [first], "of the decode step before the prefill"
    assert list(generate_loop.step()) == [second], "of the prefill"
    assert list(generate_loop.drain()) == [first, second]
    assert generate_loop.drain() == {}


def test_free_running_tokens_are_generates(model, seed):
    prompts = [prompt_of(length, np.random.default_rng(seed)) for length in (5, 5)]
    generate_loop = model.compiled.generate_loop()
    row = generate_loop.admit(prompts[0], 20)
    tokens: list[int] = []
    while len(tokens) < 20:
        arrived = generate_loop.step() if generate_loop.steps < 20 else generate_loop.drain()
        tokens += [arrived[row]] if arrived else []
    expected = model.generate(torch.tensor(prompts[:1]), max_new_tokens=20, do_sample=False)
    assert tokens == expected[0, 5:].tolist()


def test_extend_between_steps_gives_huggingfaces_logits(model, generate_loop, seed):
    """A conversation: decode, more tokens of the user, decode again, nobody else in between."""
    plain, rng = tiny_qwen3(**OVERRIDES), np.random.default_rng(seed)
    prompts = [prompt_of(length, rng) for length in (4, 5)]
    rows = [generate_loop.admit(prompt, 60) for prompt in prompts]
    twins = [Alone(plain, prompt) for prompt in prompts]
    generate_loop.step()
    for count in (1, 2, 4, 1, 3):
        for _ in range(2):
            generate_loop.step(torch.tensor([7, 9]))
            for twin, token in zip(twins, (7, 9), strict=True):
                twin.feed([token])
            torch.testing.assert_close(
                generate_loop.logits(), torch.stack([twin.logits for twin in twins]), **TOLERANCE
            )
        more = [prompt_of(count, rng) for _ in rows]
        for twin, tokens in zip(twins, more, strict=True):
            twin.feed(tokens)
        logits = generate_loop.extend(
            rows, [np.array(tokens) for tokens in more], [np.arange(row.length, row.length + count) for row in rows]
        )
        torch.testing.assert_close(logits, torch.stack([twin.logits for twin in twins]), **TOLERANCE)


def test_rewind_between_steps_gives_huggingfaces_logits(model, generate_loop, seed):
    plain, prompt = tiny_qwen3(**OVERRIDES), prompt_of(5, np.random.default_rng(seed))
    row = generate_loop.admit(prompt, 60)
    generate_loop.step()
    for token in (10, 11, 12, 13):
        generate_loop.step(torch.tensor([token]))
    row.rewind(7)
    twin = Alone(plain, [*prompt, 10, 11])
    for token in (20, 21, 22):
        generate_loop.step(torch.tensor([token]))
        twin.feed([token])
        torch.testing.assert_close(generate_loop.logits()[0], twin.logits, **TOLERANCE)


def test_a_fork_between_steps_keeps_what_it_holds(model, generate_loop, seed):
    rng = np.random.default_rng(seed)
    prompts = [prompt_of(length, rng) for length in (4, 6)]
    twins = [Alone(tiny_qwen3(**OVERRIDES), prompt) for prompt in prompts]
    for prompt in prompts:
        generate_loop.admit(prompt, 20)
    generate_loop.step()
    forks = []
    for number in range(12):
        if number % 4 < 2:  # in a row, and after steps that looked at no row
            fork = generate_loop.fork()
            forks.append((fork, fork.stored(0)))
        generate_loop.step(unchanged=True)
        for twin in twins:
            twin.feed([twin.next])
        torch.testing.assert_close(generate_loop.logits(), torch.stack([twin.logits for twin in twins]), **TOLERANCE)
    for fork, held in forks:
        assert all(map(torch.equal, fork.stored(0), held))


def test_a_rewind_within_a_page_between_steps_is_seen(model, generate_loop, seed):
    """The token that comes next stays the same, whatever is forgotten before it."""
    prompt = prompt_of(4, np.random.default_rng(seed))
    row, twin = generate_loop.admit(prompt, 30), Alone(tiny_qwen3(**OVERRIDES), prompt)
    generate_loop.step()
    for _ in range(3):  # the last one enters a page and stays in it
        generate_loop.step(unchanged=True)
        twin.feed([twin.next])
    following = twin.next
    row.rewind(row.length - 1)
    generate_loop.step(unchanged=True)
    again = Alone(tiny_qwen3(**OVERRIDES), [*twin.fed[:-1], following])
    torch.testing.assert_close(generate_loop.logits()[0], again.logits, **TOLERANCE)


# ---- pages


def test_admit_promises_pages_and_release_gives_them_back(model, generate_loop):
    pool = model.compiled.model_runner().pool
    before = pool.available
    row = generate_loop.admit([3] * 7, 14)
    assert before - pool.available == 7
    assert pool.account().used == 0
    generate_loop.step()
    assert pool.account().used == 3
    generate_loop.release(row)
    assert generate_loop.rows == []
    assert_account_is_empty(model)


def test_a_row_released_before_its_prefill_leaves_no_trace(model, generate_loop):
    kept, dropped = generate_loop.admit([3, 4], 5), generate_loop.admit([5, 6], 5)
    generate_loop.release(dropped)
    generate_loop.step()
    assert list(generate_loop.drain()) == [kept]
    generate_loop.close()
    assert_account_is_empty(model)


def test_close_gives_everything_back_and_the_runner_goes_on(model, generate_loop):
    for length in (3, 9):
        generate_loop.admit([5] * length, 9)
    generate_loop.step()
    generate_loop.step()
    generate_loop.admit([4], 3)
    generate_loop.close()
    generate_loop.close()
    assert_account_is_empty(model)
    row = generate_loop.admit([3, 4], 2)
    assert generate_loop.step() == {}
    assert list(generate_loop.drain()) == [row]


def test_dropping_a_runner_gives_its_pages_back(model):
    generate_loop = model.compiled.generate_loop()
    generate_loop.admit([3, 4, 5], 30)
    generate_loop.step()
    assert model.compiled.stats().pages.used == 1
    del generate_loop
    gc.collect()
    assert_account_is_empty(model)


def test_a_row_may_outgrow_its_promise_while_pages_are_free(model, generate_loop):
    row = generate_loop.admit([3, 4, 5], 1)
    for _ in range(10):
        generate_loop.step()
    assert row.length == 12


# ---- errors leave everything as it was


def works(generate_loop: GenerateLoop, model: PreTrainedModel) -> None:
    """A row on this runner gets HuggingFace's logits, beside those that are in."""
    others = list(generate_loop.rows)
    row = generate_loop.admit([9, 8, 7, 6], 3)
    generate_loop.step()
    twin = Alone(tiny_qwen3(**OVERRIDES), [9, 8, 7, 6])
    torch.testing.assert_close(generate_loop.logits()[-1], twin.logits, **TOLERANCE)
    generate_loop.release(row)
    assert generate_loop.rows == others


def test_a_step_without_rows_is_refused(model, generate_loop):
    with pytest.raises(RuntimeError, match="no rows; admit a prompt first"):
        generate_loop.step()
    works(generate_loop, model)


@pytest.mark.parametrize("prompt", [[], np.array([], dtype=np.int64)])
def test_an_empty_prompt_is_refused(prompt, model, generate_loop):
    with pytest.raises(ValueError, match="prompt is empty"):
        generate_loop.admit(prompt, 5)
    assert generate_loop.rows == []
    assert_account_is_empty(model)
    works(generate_loop, model)


@pytest.mark.parametrize(("prompt", "new"), [([3, 4], -1), ([3, 4], -50), ([3.5, 4.0], 5), ([3, 128], 5), ([-1], 5)])
def test_an_impossible_prompt_is_refused_before_it_is_let_in(prompt, new, model, generate_loop):
    available = model.compiled.model_runner().pool.available
    with pytest.raises(ValueError, match=r"prompt|max_new_tokens"):
        generate_loop.admit(prompt, new)
    assert generate_loop.rows == []
    assert model.compiled.model_runner().pool.available == available
    works(generate_loop, model)


def test_too_many_rows_are_refused(model, generate_loop):
    for _ in range(9):
        generate_loop.admit([3, 4], 5)
    available = model.compiled.model_runner().pool.available
    with pytest.raises(ValueError, match=r"10 rows are more than max_batch_size=9"):
        generate_loop.admit([3], 5)
    assert len(generate_loop.rows) == 9
    assert model.compiled.model_runner().pool.available == available
    generate_loop.step()
    generate_loop.step()
    generate_loop.release(generate_loop.rows[4])
    works(generate_loop, model)


def test_a_prompt_that_does_not_fit_is_refused(model, generate_loop):
    kept = generate_loop.admit([3] * 30, 970)
    available = model.compiled.model_runner().pool.available
    with pytest.raises(OutOfPagesError, match=r"\d+ pages are needed and \d+ of \d+ are available"):
        generate_loop.admit([3] * 30, 700)
    assert generate_loop.rows == [kept]
    assert model.compiled.model_runner().pool.available == available
    works(generate_loop, model)


def test_running_out_of_pages_in_a_step_keeps_rows_and_tokens(seed):
    model = compiled_llm.wrap(tiny_qwen3(**OVERRIDES), mode="eager", page_size=3, kv_memory="12 tokens", progress=False)
    generate_loop, twins = (
        model.compiled.generate_loop(),
        [Alone(tiny_qwen3(**OVERRIDES), [3, 4, token]) for token in (5, 6)],
    )
    rows = [generate_loop.admit([3, 4, token], 0) for token in (5, 6)]
    generate_loop.step()
    for _ in range(3):
        generate_loop.step()
        for twin in twins:
            twin.feed([twin.next])
    account = model.compiled.stats().pages
    with pytest.raises(OutOfPagesError, match="pages are needed"):
        generate_loop.step()
    assert [row.length for row in rows] == [6, 6]
    assert model.compiled.stats().pages == account
    generate_loop.release(rows[0])
    for _ in range(2):
        generate_loop.step()
        twins[1].feed([twins[1].next])
        torch.testing.assert_close(generate_loop.logits()[0], twins[1].logits, **TOLERANCE)


@pytest.mark.parametrize("forced", [torch.tensor([1]), torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0])])
def test_forced_tokens_of_a_wrong_shape_or_type_are_refused(forced: Tensor, model, generate_loop):
    for length in (2, 5):
        generate_loop.admit([4] * length, 20)
    generate_loop.step()
    generate_loop.step()
    with pytest.raises(ValueError, match="forced"):
        generate_loop.step(forced)
    assert [row.length for row in generate_loop.rows] == [3, 6]
    generate_loop.step()


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_exception_inside_a_decode_step_leaves_lengths_and_account(error, model, generate_loop, monkeypatch):
    prompts = [[3, 4, 5], [6, 7, 8, 9, 10]]
    twins = [Alone(tiny_qwen3(**OVERRIDES), prompt) for prompt in prompts]
    rows = [generate_loop.admit(prompt, 30) for prompt in prompts]
    forced = torch.tensor([11, 12])
    generate_loop.step()
    generate_loop.step(forced)
    lengths, positions = [row.length for row in rows], [row.position for row in rows]
    available = model.compiled.model_runner().pool.available
    original, calls = Decode.run, []

    def fails_once(self: Decode, bucket: int, wanted: int) -> Tensor:
        calls.append(bucket)
        if len(calls) == 1:
            raise error("in the step")
        return original(self, bucket, wanted)

    monkeypatch.setattr(Decode, "run", fails_once)
    with pytest.raises(error):
        generate_loop.step(forced)
    assert [row.length for row in rows] == lengths
    assert [row.position for row in rows] == positions
    assert model.compiled.stats().pages.used == sum(len(row.pages) + len(row.ahead) for row in rows)
    assert model.compiled.model_runner().pool.available == available
    for twin, token in zip(twins, (11, 12), strict=True):
        twin.feed([token])
    for _ in range(5):  # over page boundaries
        generate_loop.step(forced)
        for twin, token in zip(twins, (11, 12), strict=True):
            twin.feed([token])
        torch.testing.assert_close(generate_loop.logits(), torch.stack([twin.logits for twin in twins]), **TOLERANCE)


def test_an_exception_inside_a_prefill_leaves_the_prompt_waiting(model, generate_loop, monkeypatch):
    twin = Alone(tiny_qwen3(**OVERRIDES), [3, 4, 5])
    row = generate_loop.admit([3, 4, 5], 9)
    available = model.compiled.model_runner().pool.available
    with monkeypatch.context() as patched:
        patched.setattr(Prefill, "_launch", lambda *_: (_ for _ in ()).throw(MemoryError("in the prefill")))
        with pytest.raises(MemoryError):
            generate_loop.step()
    assert (row.length, row.position, row.pages) == (0, 0, [])
    assert model.compiled.model_runner().pool.available == available
    generate_loop.step()
    torch.testing.assert_close(generate_loop.logits()[0], twin.logits, **TOLERANCE)


def test_a_row_of_another_runner_cannot_be_released(model, generate_loop):
    row = model.compiled.generate_loop().admit([3, 4], 5)
    with pytest.raises(ValueError, match="row"):
        generate_loop.release(row)
    works(generate_loop, model)


@pytest.mark.parametrize(
    ("prepared", "used"),
    [([8], [8, 8, 8, 1]), ([8, 2], [8, 2, 2, 1]), ([8, 4, 2, 1], [8, 2, 1, 1]), ([], [8, 8, 8, 1])],
)
def test_no_row_waits_for_a_smaller_bucket_because_others_have_ended(model, monkeypatch, prepared, used):
    model.compiled.warmup(prepared)
    generate_loop, own, seen = model.compiled.generate_loop(), Decode.run, []
    monkeypatch.setattr(Decode, "run", lambda self, bucket, wanted: (seen.append(bucket), own(self, bucket, wanted))[1])
    twin = Alone(tiny_qwen3(**OVERRIDES), [3, 4, 5])
    rows = [generate_loop.admit([3, 4, 5], 9) for _ in range(5)]
    generate_loop.step()
    for leaving in (0, 3, 1):
        for row in rows[:leaving]:
            generate_loop.release(row)
        rows = rows[leaving:]
        generate_loop.step()
        twin.feed([twin.next])
        torch.testing.assert_close(generate_loop.logits(), twin.logits.expand(len(rows), -1), **TOLERANCE)
    generate_loop.close()
    generate_loop.admit([3, 4, 5], 9)
    generate_loop.step()
    generate_loop.step()
    assert seen == used
