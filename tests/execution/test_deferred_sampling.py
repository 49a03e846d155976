"""Deferred sampling: rows are sampled from the logits of an earlier launch, once the host has written masks.

See test_batch.py for rows of all kinds together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

import compiled_llm
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.graphs.step_table import Budget
from compiled_llm.compilation.sampling.masks import mask_of
from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm.execution.batch import Batch, Extension
from compiled_llm.execution.decode.deferred_sampling import Masks
from compiled_llm.execution.steps.sampling_graphs import SamplingGraphs
from compiled_llm.kvcache.row import Row
from support.execution.alone import Alone
from support.execution.batches import (
    WIDTH,
    Batches,
    allowed_after,
    ids_of,
    let_a_cpu_capture_sampling,
    mask_after,
)
from support.ops.sampling_cases import EVERYTHING, SINGLE_EDITS

pytestmark = pytest.mark.core


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> None:
    let_a_cpu_capture_sampling(monkeypatch)


@pytest.fixture(params=["launched", "captured"])
def batch(request: pytest.FixtureRequest) -> Batches:
    if request.param == "captured":
        request.getfixturevalue("captures")
    made = Batches()
    made.call(made.model_runner.prepare_deferred, [2, 5])
    return made


def begun(batch: Batches, seed: int, *lengths: int) -> list[Row]:
    prompts = [ids_of(length, seed) for length in lengths]
    rows = [batch.admit(prompt) for prompt in prompts]
    batch.step(extend=[Extension.of(row, prompt) for row, prompt in zip(rows, prompts, strict=True)])
    return rows


def test_a_processor_of_the_users_own_gets_a_copy_and_has_its_say(batch, seed):
    rows = begun(batch, seed, 5, 2)
    step = batch.run(decode=rows)
    assert step.logits is not None
    before, own = step.logits.clone(), batch.persistent.deferred.logits_of(rows[0])
    assert torch.equal(own, before[0])
    wanted = allowed_after(batch.texts[rows[0]][-1])[4]
    own.zero_()
    own[wanted] = 1.0
    batch.twins[rows[0]].logits = own
    chosen = batch.sample(processed={rows[0]: own})
    assert chosen.tokens[0] == wanted
    assert torch.equal(step.logits, before)
    assert torch.equal(chosen.logits, before), "observers see the model's logits"


def test_a_step_before_the_tokens_are_sampled_is_refused(batch, seed):
    rows = begun(batch, seed, 5, 2)
    batch.run(decode=rows)
    with pytest.raises(RuntimeError, match="the rows have no next tokens"):
        batch.model_runner.run(Batch(rows), batch.persistent)
    batch.sample()
    batch.step(decode=rows)


def test_masks_are_for_rows_that_came_in_with_one(batch, seed):
    rows = begun(batch, seed, 5)
    plain, prompt = batch.admit(ids_of(4, seed), constrained=False), ids_of(4, seed)
    batch.run(decode=rows, extend=[Extension.of(plain, prompt)])
    with pytest.raises(ValueError, match="comes in with one"):
        batch.model_runner.sample_deferred(batch.persistent, Masks([plain], mask_after(3)[None]))
    batch.sample()


def test_observers_see_each_row_once_with_its_token(batch, seed):
    rows, prompt = begun(batch, seed, 5, 2), ids_of(6, seed)
    plain = batch.admit(prompt, constrained=False)
    batch.step(decode=rows, extend=[Extension.of(plain, prompt)])
    batch.seen.clear()
    batch.step(decode=[rows[0], plain, rows[1]])
    seen = {row: (logits, token) for step in batch.seen for row, logits, token in zip(*step[:3], strict=True)}
    assert len(seen) == sum(len(step.rows) for step in batch.seen) == 3
    for row, (logits, token) in seen.items():
        assert token == batch.texts[row][-1]
        torch.testing.assert_close(logits, batch.twins[row].logits, rtol=1e-3, atol=1e-3)


def test_captured_sampling_is_replayed_and_more_of_it_is_captured(batch, seed):
    graphs, replayed = batch.model_runner.steps.sampling_graphs, []
    graphs.sample = lambda launch: replayed.append(launch.key.rows) or SamplingGraphs.sample(graphs, launch)
    rows = begun(batch, seed, 5, 2, 4)
    batch.step(decode=rows)
    batch.step(decode=rows[:2])
    captured = bool(graphs.buckets)
    assert replayed == ([5, 5, 2] if captured else [])
    batch.run(decode=rows[:1])
    batch.call(batch.model_runner.prepare_deferred, [1, 4])  # kept logits are sampled from without a graph
    batch.sample()
    batch.step(decode=rows[:1])
    assert replayed == ([5, 5, 2, 1] if captured else [])
    batch.run(decode=rows[1:2])
    batch.call(batch.model_runner.prepare_deferred, [3])
    batch.run(decode=rows[2:])  # these two are sampled together, from two places
    batch.sample()
    assert replayed == ([5, 5, 2, 1] if captured else [])
    assert graphs.buckets == ([1, 2, 3, 4, 5] if captured else [])


def test_sampling_whose_graphs_made_room_is_launched(captures, seed):
    batch = Batches()
    steps, graphs = batch.model_runner.state.step_table, batch.model_runner.steps.sampling_graphs
    steps.budget = Budget(max_graphs=3)
    batch.call(batch.model_runner.prepare_deferred, [2, 5])
    assert set(steps.of("sampling")) == {
        StepKey.sampling(5, False),
        StepKey.sampling(5, True),
        StepKey.sampling(2, False),
    }, "there is room for three"
    rows = begun(batch, seed, 5, 2)
    for gone in (None, StepKey.sampling(5, True), StepKey.sampling(2, False), StepKey.sampling(5, False)):
        if gone is not None:
            steps._evict(steps.get(gone))
        for _ in range(2):
            batch.step(decode=rows)
    assert graphs.buckets == []
    table = batch.model.compiled.cuda_graphs
    assert [(row.phase, row.rows, row.variant, row.evictions) for row in table] == [
        *[("sampling", 2, 0, 1), ("sampling", 5, 0, 1), ("sampling", 5, 1, 1)]
    ]
    assert sum(row.replays for row in table) > 5


@pytest.mark.parametrize("most", [4, 8], ids=["some have no room there", "all lie there, and their graph is gone"])
def test_rows_of_two_launches_are_sampled_together_without_a_graph(most, captures, seed):
    batch = Batches()
    batch.call(batch.model_runner.prepare_deferred, [most])
    steps = batch.model_runner.state.step_table
    rows = begun(batch, seed, 5, 2, 4)
    for key in steps.of("sampling"):
        steps._evict(steps.get(key))
    batch.run(decode=rows)
    prompts = [ids_of(length, seed) for length in (3, 6)]
    batch.run(extend=[Extension.of(batch.admit(prompt), prompt) for prompt in prompts])
    graphs = batch.model_runner.steps.sampling_graphs
    assert (graphs.kept(batch.persistent.deferred, 5) is not None) == (most == 8)
    assert len(batch.sample().rows) == 5


def test_captured_sampling_is_captured_again_after_sleep(captures, seed):
    batch = Batches()
    batch.call(batch.model_runner.prepare_deferred, [2, 4])
    with compiled_llm.Engine(batch.model) as engine:
        engine.sleep(graphs=True)
        engine.wake()
    model_runner = batch.model.compiled.model_runner()
    assert model_runner is not batch.model_runner
    assert model_runner.steps.sampling_graphs.buckets == [2, 4]


def answers(settings: Sequence[Sampling], late: bool) -> list[list[int]]:
    """The tokens of a loop's rows; on CUDA it reads late."""
    batch = Batches()
    generate_loop = batch.model.compiled.generate_loop()
    rows = [generate_loop.admit(ids_of(4 + number, 0), 12, own) for number, own in enumerate(settings)]
    arrived = []
    for _ in range(12):
        arrived.append(generate_loop.step())
        if not late:
            arrived.append(generate_loop.drain())
    while last := generate_loop.drain():
        arrived.append(last)
    generate_loop.close()
    return [[tokens[row] for tokens in arrived if row in tokens] for row in rows]


@pytest.mark.parametrize("late", [False, True])
def test_a_row_gets_the_same_tokens_however_late_they_are_sampled(late, seed):
    """Draws, penalties, biases that look back and masks: a deferred row's tokens are those of one that is not."""
    masked = {"mask": mask_of(WIDTH, banned=range(0, WIDTH, 3))}
    kinds = [{}, {"top_k": 9, **masked}, EVERYTHING | {"start": 6}, SINGLE_EDITS["following"] | {"start": 7}]
    plain = [Sampling(**kind, seed=seed + number) for number, kind in enumerate(kinds)]
    expected = answers(plain, late)
    assert [len(tokens) for tokens in expected] == [12] * 4
    assert answers([replace(own, deferred=True) for own in plain], late) == expected
    assert answers([replace(own, deferred=at in (1, 2)) for at, own in enumerate(plain)], late) == expected


def test_rows_under_a_grammar_keep_their_slots_while_others_come(batch, seed):
    """They would come back with other counts and masks than they left with; and their tokens may not be sampled yet."""
    rows = begun(batch, seed, 5, 2)
    batch.run(decode=rows)
    slots = batch.model_runner.state.slots
    others = [Row(batch.model_runner.pool, 0) for _ in range(slots.padding)]
    with pytest.raises(RuntimeError, match="whose penalties or grammars need them"):
        batch.call(slots.admit, others, [None] * len(others))
    batch.call(slots.admit, others[2:], [None] * len(others[2:]))
    batch.sample()
    for row in others:
        row.free()
    batch.step(decode=rows)


def test_a_loop_that_begins_again_has_nothing_to_sample(batch, seed):
    rows = begun(batch, seed, 5, 2)
    batch.run(decode=rows)
    batch.persistent.restart(rows)
    assert not batch.persistent.deferred
    texts = [np.concatenate([ids_of(length, seed), batch.texts[row]]) for row, length in zip(rows, (5, 2), strict=True)]
    for row in rows:
        row.free()
    again = [batch.admit(text) for text in texts]
    batch.step(extend=[Extension.of(row, text) for row, text in zip(again, texts, strict=True)])
    batch.step(decode=again)


def test_a_fork_goes_its_own_way(batch, seed):
    (row,) = begun(batch, seed, 5)
    fork = row.fork()
    sampling = Sampling(temperature=0.0, mask=mask_after(batch.texts[row][-1]), deferred=True)
    batch.call(batch.model_runner.state.slots.admit, [fork], [sampling])
    other = allowed_after(int(ids_of(5, seed)[-1]))[3]  # where the row went another way
    batch.twins[fork], batch.texts[fork] = Alone(batch.plain, ids_of(5, seed).tolist()), [other]
    batch.constrained.add(fork)
    given = Batch([row, fork], tokens=torch.tensor([batch.texts[row][-1], other]))
    batch.call(batch.model_runner.run, given, batch.persistent)
    for each in (row, fork):
        batch.twins[each].feed(batch.texts[each][-1:])
    batch.sample()
    for _ in range(3):
        batch.step(decode=[fork, row])
