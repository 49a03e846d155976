"""Deferred sampling: rows are sampled from the logits that a launch left, once the host has written masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.compilation.graphs.rolling import Budget, Cost, SamplingKey
from compiled_llm.compilation.sampling.masks import mask_of
from compiled_llm.compilation.sampling.sampling import NOT_A_TOKEN, Sampling
from compiled_llm.execution.batch import Batch, Extension, StepOutput
from compiled_llm.execution.decode.deferred_sampling import Masks
from compiled_llm.execution.decode.persistent_batch import PersistentBatch
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.state import runner_state, sampling_graphs
from compiled_llm.execution.state.sampling_graphs import SamplingGraphs
from compiled_llm.kvcache.row import Row
from support.execution.alone import Alone
from support.ops.sampling_cases import EVERYTHING, SINGLE_EDITS
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.core

OPTIONS: dict[str, Any] = {"page_size": 3, "kv_memory": "90 tokens", "max_batch_size": 5, "progress": False}
OVERRIDES: dict[str, Any] = {"eos_token_id": None, "num_hidden_layers": 1}
WIDTH = 128
PENALISED = Sampling(temperature=0.0, frequency_penalty=1.5, presence_penalty=0.5)


def allowed_after(token: int) -> list[int]:
    """A toy grammar: of each token, every seventh may follow."""
    return list(range(3 + token * 5 % 7, WIDTH, 7))


def mask_after(token: int) -> NDArray[np.int32]:
    mask = mask_of(WIDTH, allowed=allowed_after(token))
    assert mask is not None
    return mask


class Constrained:
    """Runs rows, some of them under the toy grammar, beside a twin of each in HuggingFace's forward."""

    def __init__(self, mode: str = "eager", beside: Constrained | None = None) -> None:
        plain = tiny_qwen3(**OVERRIDES)
        self.model: PreTrainedModel = compiled_llm.wrap(plain, **OPTIONS, mode=mode) if beside is None else beside.model
        self.model_runner: ModelRunner = self.model.compiled.model_runner()
        self.persistent = PersistentBatch(self.model_runner.state, self.model_runner.decode)
        self.twins: dict[Row, Alone] = {}
        self.texts: dict[Row, list[int]] = {}
        self.constrained: set[Row] = set()
        self.penalised: set[Row] = set()
        self.seen: list[StepOutput] = []

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return self.model_runner.thread.call(function, *args, **kwargs)

    def admit(self, prompt: NDArray[np.int64], constrained: bool = True, penalised: bool = False) -> Row:
        row = Row(self.model_runner.pool, 0)
        sampling = PENALISED if penalised else Sampling(temperature=0.0)
        if constrained:
            fields = {"mask": mask_after(int(prompt[-1])), "deferred": True}
            sampling = Sampling(**vars(sampling) | fields)
            self.constrained.add(row)
        if penalised:
            self.penalised.add(row)
        self.call(self.model_runner.state.slots.admit, [row], [sampling])
        self.texts[row] = []
        return row

    def run(self, decode: Sequence[Row] = (), extend: Sequence[Extension] = (), unchanged: bool = False) -> StepOutput:
        batch = Batch(list(decode), list(extend), observer=self.seen.append)
        step: StepOutput = self.call(self.model_runner.run, batch, self.persistent, unchanged)
        for row in decode:
            self.twins[row].feed(self.texts[row][-1:])
        for extension in extend:
            row, ids = extension.row, extension.ids.tolist()
            assert isinstance(row, Row)
            if row in self.twins:
                self.twins[row].feed(ids)
            else:
                self.twins[row] = Alone(tiny_qwen3(**OVERRIDES), ids)
        for row, token in zip(step.rows, step.tokens.tolist(), strict=True):
            if row in self.constrained:
                assert token == NOT_A_TOKEN, "it waits to be sampled"
            else:
                self.take(row, token)
        return step

    def sample(self, without: Sequence[Row] = (), **processed: Any) -> StepOutput:
        """Choose what waits, with the masks that follow from the tokens so far."""
        rows = [row for row in self.persistent.deferred.rows if self.texts[row] and row not in without]
        masks = Masks(rows, np.stack([mask_after(self.texts[row][-1]) for row in rows])) if rows else None
        step: StepOutput = self.call(self.model_runner.sample_deferred, self.persistent, masks, **processed)
        for row, token in zip(step.rows, step.tokens.tolist(), strict=True):
            if row.slot is not None:
                self.take(row, token)
        return step

    def take(self, row: Row, token: int) -> None:
        assert token == self.expected(row)
        self.texts[row].append(token)

    def expected(self, row: Row) -> int:
        twin, text = self.twins[row], self.texts[row]
        scores = twin.logits.clone()
        if row in self.penalised:
            times = torch.bincount(torch.tensor(text, dtype=torch.int64), minlength=WIDTH)
            scores -= PENALISED.frequency_penalty * times + PENALISED.presence_penalty * (times > 0)
        if row in self.constrained:
            allowed = allowed_after(text[-1] if text else twin.fed[-1])
            return allowed[int(scores[allowed].argmax())]
        return int(scores.argmax())


def ids_of(length: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, length]).integers(3, WIDTH, length)


@pytest.mark.parametrize("mode", ["eager", pytest.param("compile", marks=pytest.mark.whole)])
def test_rows_follow_a_grammar_beside_others_with_penalties_over_pages(mode, seed):
    batch = Constrained(mode)
    prompts = [ids_of(length, seed) for length in (5, 2, 7, 4)]
    kinds = [(True, False), (False, True), (True, True), (False, False)]
    rows = [batch.admit(prompt, *kind) for prompt, kind in zip(prompts, kinds, strict=True)]
    batch.run(extend=[Extension.of(row, prompt) for row, prompt in zip(rows, prompts, strict=True)])
    batch.sample()
    for step in range(8):
        batch.run(decode=rows, unchanged=step > 0)
        batch.sample()
    assert not batch.persistent.deferred


class ReplayedGraphCapture:
    """Captures nothing: a replay launches once more, into the same tensor, as a CUDA graph does."""

    def __init__(self, device: torch.device) -> None:
        pass

    def capture(self, launch: Callable[[], torch.Tensor]) -> Any:
        output = launch()
        return SimpleNamespace(replay=lambda: output.copy_(launch()), cost=Cost(), release=lambda: None)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU capture choices."""
    monkeypatch.setattr(sampling_graphs, "GraphCapture", ReplayedGraphCapture)
    monkeypatch.setattr(
        runner_state, "SamplingGraphs", lambda device, records, rolling: SamplingGraphs(device, True, rolling)
    )


@pytest.fixture(params=["launched", "captured"])
def batch(request: pytest.FixtureRequest) -> Constrained:
    if request.param == "captured":
        request.getfixturevalue("captures")
    made = Constrained()
    made.call(made.model_runner.prepare_deferred, [2, 5])
    return made


def begun(batch: Constrained, seed: int, *lengths: int) -> list[Row]:
    prompts = [ids_of(length, seed) for length in lengths]
    rows = [batch.admit(prompt) for prompt in prompts]
    batch.run(extend=[Extension.of(row, prompt) for row, prompt in zip(rows, prompts, strict=True)])
    batch.sample()
    return rows


def test_a_prompt_in_chunks_ends_beside_rows_that_decode(batch, seed):
    rows, prompt, plain = begun(batch, seed, 5, 2), ids_of(7, seed), ids_of(6, seed)
    new, other = batch.admit(prompt), batch.admit(plain, constrained=False)
    batch.run(decode=rows, extend=[Extension.of(new, prompt[:4], is_last=False)])
    batch.sample()
    batch.run(decode=rows, extend=[Extension.of(new, prompt[4:]), Extension.of(other, plain)])
    batch.sample()
    for _ in range(3):
        batch.run(decode=[other, *rows, new])
        batch.sample()


def test_what_others_run_meanwhile_changes_nothing(batch, seed):
    rows = begun(batch, seed, 5, 2)
    batch.run(decode=rows)
    other = Constrained(beside=batch)
    begun(other, seed + 1, 4, 3)
    batch.sample()
    batch.run(decode=rows)
    batch.sample()


def test_a_row_that_ends_before_its_choice_is_left_out_and_its_slot_is_free(batch, seed):
    ended, row = begun(batch, seed, 5, 2)
    batch.run(decode=[ended, row])
    ended.free()
    new = batch.admit(ids_of(4, seed), constrained=False)  # takes the slot
    before = batch.model_runner.state.slots.tables.counts.clone()
    assert dict(zip(*batch.sample()[::2], strict=True))[ended] == NOT_A_TOKEN
    assert torch.equal(before, batch.model_runner.state.slots.tables.counts)
    batch.run(decode=[row], extend=[Extension.of(new, ids_of(4, seed))])
    batch.sample()
    batch.run(decode=[row, new])
    batch.sample()


def test_a_row_that_comes_again_goes_on_right(batch, seed):
    preempted, row = begun(batch, seed, 5, 2)
    batch.run(decode=[preempted, row])
    text = np.concatenate([ids_of(5, seed), batch.texts[preempted]])
    preempted.free()
    batch.sample()
    again = batch.admit(text)
    batch.run(decode=[row], extend=[Extension.of(again, text)])
    batch.sample()
    for _ in range(3):
        batch.run(decode=[again, row])
        batch.sample()


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
    assert torch.equal(chosen.logits, before), "observers see what the model has computed"


def test_a_step_before_the_choice_is_refused(batch, seed):
    rows = begun(batch, seed, 5, 2)
    batch.run(decode=rows)
    with pytest.raises(RuntimeError, match="the rows have no next tokens"):
        batch.model_runner.run(Batch(rows), batch.persistent, unchanged=True)
    batch.sample()
    batch.run(decode=rows)
    batch.sample()


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
    batch.run(decode=rows, extend=[Extension.of(plain, prompt)])
    batch.sample()
    batch.seen.clear()
    batch.run(decode=[rows[0], plain, rows[1]])
    batch.sample()
    seen = {row: (logits, token) for step in batch.seen for row, logits, token in zip(*step[:3], strict=True)}
    assert len(seen) == sum(len(step.rows) for step in batch.seen) == 3
    for row, (logits, token) in seen.items():
        assert token == batch.texts[row][-1]
        torch.testing.assert_close(logits, batch.twins[row].logits, rtol=1e-3, atol=1e-3)


def test_captured_choices_are_replayed_and_more_of_them_are_captured(batch, seed):
    graphs, replayed = batch.model_runner.state.sampling_graphs, []
    graphs.sample = lambda bucket, masked: replayed.append(bucket) or SamplingGraphs.sample(graphs, bucket, masked)
    rows = begun(batch, seed, 5, 2, 4)
    batch.run(decode=rows)
    batch.sample()
    batch.run(decode=rows[:2])
    batch.sample()
    captured = bool(graphs.buckets)
    assert replayed == ([5, 5, 2] if captured else [])
    batch.run(decode=rows[:1])
    batch.call(batch.model_runner.prepare_deferred, [1, 4])  # what is kept is sampled from, without a graph
    batch.sample()
    batch.run(decode=rows[:1])
    batch.sample()
    assert replayed == ([5, 5, 2, 1] if captured else [])
    batch.run(decode=rows[1:2])
    batch.call(batch.model_runner.prepare_deferred, [3])
    batch.run(decode=rows[2:])  # these two are sampled together, from two places
    batch.sample()
    assert replayed == ([5, 5, 2, 1] if captured else [])
    assert graphs.buckets == ([1, 2, 3, 4, 5] if captured else [])


def test_choices_whose_graphs_made_room_are_launched(captures, seed):
    batch = Constrained()
    rolling, graphs = batch.model_runner.state.cuda_graphs, batch.model_runner.state.sampling_graphs
    rolling.budget = Budget(max_graphs=3)
    batch.call(batch.model_runner.prepare_deferred, [2, 5])
    assert set(rolling.of("sampling")) == {SamplingKey(5, False), SamplingKey(5, True), SamplingKey(2, False)}, (
        "there is room for three"
    )
    rows = begun(batch, seed, 5, 2)
    for gone in (None, SamplingKey(5, True), SamplingKey(2, False), SamplingKey(5, False)):
        if gone is not None:
            rolling._evict(rolling.get(gone))
        for _ in range(2):
            batch.run(decode=rows)
            batch.sample()
    assert graphs.buckets == []
    table = batch.model.compiled.cuda_graphs
    assert [(row.phase, row.rows, row.variant, row.evictions) for row in table] == [
        *[("sampling", 2, 0, 1), ("sampling", 5, 0, 1), ("sampling", 5, 1, 1)]
    ]
    assert sum(row.replays for row in table) > 5


def test_what_was_captured_is_captured_again_after_sleep(captures, seed):
    batch = Constrained()
    batch.call(batch.model_runner.prepare_deferred, [2, 4])
    with compiled_llm.Engine(batch.model) as engine:
        engine.sleep()
        engine.wake()
    state = batch.model.compiled.model_runner().state
    assert state is not batch.model_runner.state
    assert state.sampling_graphs.buckets == [2, 4]


def answers(settings: Sequence[Sampling], late: bool) -> list[list[int]]:
    """What a runner's rows get; on CUDA it reads late."""
    batch = Constrained()
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
def test_a_choice_is_the_same_however_late(late, seed):
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
    batch.run(decode=rows)
    batch.sample()


def test_a_loop_that_begins_again_has_nothing_to_choose(batch, seed):
    rows = begun(batch, seed, 5, 2)
    batch.run(decode=rows)
    batch.persistent.restart(rows)
    assert not batch.persistent.deferred
    texts = [np.concatenate([ids_of(length, seed), batch.texts[row]]) for row, length in zip(rows, (5, 2), strict=True)]
    for row in rows:
        row.free()
    again = [batch.admit(text) for text in texts]
    batch.run(extend=[Extension.of(row, text) for row, text in zip(again, texts, strict=True)])
    batch.sample()
    batch.run(decode=again)
    batch.sample()


def test_a_fork_goes_its_own_way(batch, seed):
    (row,) = begun(batch, seed, 5)
    fork = row.fork()
    sampling = Sampling(temperature=0.0, mask=mask_after(batch.texts[row][-1]), deferred=True)
    batch.call(batch.model_runner.state.slots.admit, [fork], [sampling])
    other = allowed_after(int(ids_of(5, seed)[-1]))[3]  # where the row went another way
    batch.twins[fork], batch.texts[fork] = Alone(tiny_qwen3(**OVERRIDES), ids_of(5, seed).tolist()), [other]
    batch.constrained.add(fork)
    given = Batch([row, fork], tokens=torch.tensor([batch.texts[row][-1], other]))
    batch.call(batch.model_runner.run, given, batch.persistent)
    for each in (row, fork):
        batch.twins[each].feed(batch.texts[each][-1:])
    batch.sample()
    for _ in range(3):
        batch.run(decode=[fork, row])
        batch.sample()
