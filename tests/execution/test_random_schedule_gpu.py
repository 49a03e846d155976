"""Rows come and go at random on a GPU, in bfloat16: no step reads a stale page table, or another row's pages.

Shapes: B rows, T steps, V vocabulary.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config

import compiled_llm
from compiled_llm.execution.state.slots import Slots
from compiled_llm.kvcache.row import Row
from support.execution.twins import (
    DEVICE,
    OPTIONS,
    ROWS,
    SMALL,
    WINDOWED,
    Twins,
    hf_logits,
    random_model,
    rms,
    small_qwen3,
    twins_of,
)
from support.parity import assert_account_is_empty

pytestmark = pytest.mark.gpu

LARGER_GROUPS: dict[str, Any] = {**SMALL, "num_attention_heads": 8}


class Step(NamedTuple):
    """One step of a schedule; rows have numbers."""

    released: list[int]
    admitted: dict[int, list[int]]  # prompts
    rows: list[int]  # that take part, in order
    forced: list[int] | None  # tokens for them; None where they feed in their own


PROMISE = 260


def random_schedule(steps: int, vocabulary: int, seed: int) -> list[Step]:
    """Rows come and go all along, so that batches of 1 to ROWS decode again and again; a few rows are long."""
    rng = random.Random(seed)
    left: dict[int, int] = {}  # decode steps until each row goes
    schedule, count = [], 0
    while len(schedule) < steps:
        turn = len(schedule) // 8 % (2 * ROWS)
        wanted = 1 + min(turn, 2 * ROWS - 1 - turn)
        released = [row for row, steps_left in left.items() if steps_left == 0]
        while len(left) - len(released) > wanted:
            released.append(rng.choice([row for row in left if row not in released]))
        for row in released:
            del left[row]
        admitted: dict[int, list[int]] = {}
        if not left or (len(left) < wanted and rng.random() < 0.5):
            for _ in range(rng.randint(1, min(3, wanted - len(left)))):
                longest = rng.choices([3, 60, 300, 900], [1, 6, 2, 1])[0]
                admitted[count] = [rng.randrange(vocabulary) for _ in range(rng.randint(1, longest))]
                count += 1
        rows = list(admitted or left)
        forced = [rng.randrange(vocabulary) for _ in rows] if not admitted and rng.random() < 0.6 else None
        schedule.append(Step(released, admitted, rows, forced))
        if not admitted:
            left = {row: steps_left - 1 for row, steps_left in left.items()}
        left.update({row: rng.randint(1, PROMISE) for row in admitted})
    return schedule


def play(
    model: PreTrainedModel, schedule: list[Step], *, upload_each_step: bool = False
) -> tuple[list[Tensor], list[dict[int, int]]]:
    """Run a schedule as fast as it goes; return each step's `[B, V]` logits and each row's token."""
    model_runner, generate_loop = model.compiled.model_runner(), model.compiled.generate_loop()
    rows: dict[int, Row] = {}
    forced = [None if step.forced is None else torch.tensor(step.forced).to(DEVICE) for step in schedule]
    logits, arrived = [], []
    for step, tokens in zip(schedule, forced, strict=True):
        for number in step.released:
            generate_loop.release(rows[number])
        for number, prompt in step.admitted.items():
            rows[number] = generate_loop.admit(prompt, PROMISE + 1)
        if upload_each_step and not step.admitted:
            model_runner.thread.call(model_runner.decode_buffers.claim, None)  # no row is there: it uploads again
        arrived.append(generate_loop.step(tokens))
        logits.append(generate_loop.logits())
    while last := generate_loop.drain():
        arrived.append(last)
    generate_loop.close()
    numbers = {row: number for number, row in rows.items()}
    return logits, [{numbers[row]: token for row, token in tokens.items()} for tokens in arrived[1:]]


def with_tokens_fed(schedule: list[Step], chosen: list[dict[int, int]]) -> tuple[list[Step], dict[int, list[int]]]:
    """The same schedule with every token forced, and each row's whole sequence."""
    sequences: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    forced = []
    for step, tokens in zip(schedule, chosen, strict=True):
        assert list(tokens) == step.rows
        fed = step.forced
        if step.admitted:
            sequences.update({row: list(prompt) for row, prompt in step.admitted.items()})
        else:
            fed = [last[row] for row in step.rows] if fed is None else fed
            for row, token in zip(step.rows, fed, strict=True):
                sequences[row].append(token)
        last.update(tokens)
        forced.append(step._replace(forced=fed))
    return forced, sequences


class Reference(NamedTuple):
    """Some rows of a schedule on HuggingFace: logits in float32, and how far bfloat16 strays from them."""

    exact: dict[int, Tensor]  # [steps of the row, V]
    noise: Tensor  # [all steps of these rows]


def reference(twins: Twins, schedule: list[Step], sequences: dict[int, list[int]], rows: int) -> Reference:
    counts: dict[int, int] = {}
    for step in schedule:
        for row in step.rows:
            counts[row] = counts.get(row, 0) + 1
    longest = sorted(counts, key=lambda row: counts[row], reverse=True)[:rows]
    exact, noise = {}, []
    for row in longest:
        ids = torch.tensor(sequences[row]).to(DEVICE)
        exact[row] = hf_logits(twins.exact, ids, counts[row])
        noise.append(rms(hf_logits(twins.plain, ids, counts[row]) - exact[row]))
    return Reference(exact, torch.cat(noise))


def strays(ours: list[Tensor], others: list[Tensor], schedule: list[Step], tolerance: float) -> list[str]:
    """Every row of every step whose logits differ by more."""
    errors = torch.cat([rms(mine.float() - theirs.float()) for mine, theirs in zip(ours, others, strict=True)]).tolist()
    places = [(number, row) for number, step in enumerate(schedule) for row in step.rows]
    return [
        f"step {number}, row {row} (place {schedule[number].rows.index(row)} of {len(schedule[number].rows)}): "
        f"RMS difference {error:.3e} is more than {tolerance:.3e}"
        for (number, row), error in zip(places, errors, strict=True)
        if not error <= tolerance
    ]


def run_schedule(twins: Twins, schedule: list[Step]) -> None:
    """Ours against a twin in eager mode that uploads each step, and a sample of rows against HuggingFace in float32.

    The tolerance of a row's logits (RMS over the vocabulary) is twice the largest distance that HuggingFace's bfloat16
    has from float32 in any step of the sample: two paths, each as noisy as that.
    """
    twins.wrapped.compiled.warmup()
    before = twins.wrapped.compiled.stats()
    ours, chosen = play(twins.wrapped, schedule)
    schedule, sequences = with_tokens_fed(schedule, chosen)
    for step, logits, tokens in zip(schedule, ours, chosen, strict=True):
        picked = logits.gather(1, torch.tensor([tokens[row] for row in step.rows]).to(DEVICE)[:, None])[:, 0]
        assert bool((picked == logits.amax(dim=1)).all()), "a token that arrived is not the most likely one"
    after = twins.wrapped.compiled.stats()
    assert (after.cuda_graphs, after.graphs, after.recompiles) == (before.cuda_graphs, before.graphs, 0)
    assert after.cudagraph_skips == 0

    eager = compiled_llm.wrap(copy.deepcopy(twins.plain), **{**OPTIONS, "mode": "eager"})
    theirs, _ = play(eager, schedule, upload_each_step=True)
    assert eager.compiled.stats().uploads >= sum(not step.admitted for step in schedule)
    compiled_llm.unwrap(eager)

    truth = reference(twins, schedule, sequences, 16)
    tolerance = 2 * float(truth.noise.max())
    print(
        f"{len(schedule)} steps, {len(sequences)} rows of up to {max(map(len, sequences.values()))} tokens; noise of "
        f"bfloat16 {float(truth.noise.mean()):.3e}, at most {float(truth.noise.max()):.3e}; tolerance {tolerance:.3e} "
        f"for logits of {float(torch.cat(list(truth.exact.values())).square().mean().sqrt()):.3e}"
    )
    wrong = strays(ours, theirs, schedule, tolerance)
    assert not wrong, f"{len(wrong)} of {sum(len(step.rows) for step in schedule)} rows:\n" + "\n".join(wrong[:20])
    for row, exact in truth.exact.items():
        mine = [logits[step.rows.index(row)] for step, logits in zip(schedule, ours, strict=True) if row in step.rows]
        error = float(rms(torch.stack(mine) - exact).max())
        assert error <= tolerance, f"row {row}: RMS difference from HuggingFace {error:.3e}"


def test_random_schedule_equals_a_twin_that_uploads_each_step(seed: int) -> None:
    twins = twins_of(random_model(Qwen3Config(**WINDOWED), seed, (1, 2)))
    schedule = random_schedule(2000, WINDOWED["vocab_size"], seed)
    assert {len(step.rows) for step in schedule if not step.admitted} == set(range(1, ROWS + 1))
    run_schedule(twins, schedule)
    assert_account_is_empty(twins.wrapped)
    compiled_llm.unwrap(twins.wrapped)


@pytest.mark.parametrize("backend", ["auto", "flashinfer"])
def test_random_schedule_equals_a_twin_that_uploads_each_step_in_larger_groups(backend: str, seed: int) -> None:
    """The twin decodes with our own kernel, whatever we decode with."""
    twins = twins_of(small_qwen3(seed, **LARGER_GROUPS), backend=backend)
    run_schedule(twins, random_schedule(700, LARGER_GROUPS["vocab_size"], seed + 1))
    compiled_llm.unwrap(twins.wrapped)


@pytest.mark.unchecked_pages  # they would name the page
def test_the_schedule_shows_page_tables_that_are_not_renewed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above are good for. A row past the pages that its slot names goes on in nobody's."""
    twins = twins_of(small_qwen3(seed))
    twins.wrapped.compiled.warmup()
    listing, stale = Slots.list_pages, twins.wrapped.compiled.model_runner().state.slots

    def list_pages(slots: Slots, rows: Sequence[Row]) -> bool:
        for row in rows if slots is stale else ():
            if row.listed:
                row.list_pages(8)  # taken as listed, and not written
        return listing(slots, rows)

    monkeypatch.setattr(Slots, "list_pages", list_pages)
    with pytest.raises(AssertionError, match="RMS difference"):
        run_schedule(twins, random_schedule(200, SMALL["vocab_size"], seed))
    compiled_llm.unwrap(twins.wrapped)
