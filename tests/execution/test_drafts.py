"""Steps that draft give the tokens that steps without drafts give, whoever drafts, and however many count."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import compiled_llm
from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm.execution.decode.decode_step import DecodeStep
from compiled_llm.execution.drafts import texts
from compiled_llm.execution.drafts.costs import Costs
from compiled_llm.execution.drafts.rounds import Rounds
from compiled_llm.execution.drafts.rule import Rule
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.execution.steps.launch import Launch
from compiled_llm.kvcache.pool import PagePool
from compiled_llm.kvcache.row import Row
from compiled_llm.kvcache.speculation import Speculation
from support.execution.drafters import KINDS, Kind, drafted_answers, drafting, plain_answers
from support.execution.page_checks import check_pages
from support.execution.schedule import prompt_of
from support.execution.stand_in_cuda_graphs import StandIn, let_a_cpu_capture, uncompiled
from support.in_threads import PATIENCE, start
from support.noting import note_calls, note_decode_steps
from support.parity import assert_account_is_empty
from support.tiny_models import WINDOWS, tiny_qwen3
from support.walk import Walk

OPTIONS: dict[str, Any] = {"page_size": 4, "kv_memory": "3000 tokens", "max_batch_size": 8, "progress": False}
GREEDY: list[Sampling | None] = [None] * 3
DRAWN = [
    Sampling(temperature=0.8, top_p=0.9, seed=5),
    Sampling(temperature=1.2, top_k=20, seed=6),
    Sampling(temperature=0.7, repetition_penalty=1.3, seed=7),
]


def wrapped(mode: str = "eager", overrides: dict[str, Any] | None = None, **options: Any) -> Any:
    overrides = {"eos_token_id": None, "num_hidden_layers": 2, **(overrides or {})}
    return compiled_llm.wrap(tiny_qwen3(**overrides), **{**OPTIONS, "mode": mode, **options})


def prompts_of(seed: int, lengths: tuple[int, ...] = (3, 8, 13)) -> list[list[int]]:
    """Prompts whose first tokens differ."""
    rng = np.random.default_rng(seed)
    return [[10 + number, *prompt_of(length, rng)] for number, length in enumerate(lengths)]


def assert_same(model: Any, seed: int, settings: Any, *kinds: Kind | None, new: int = 40, **how: Any) -> None:
    prompts = prompts_of(seed)
    expected = plain_answers(model, prompts, new, settings)
    for kind in kinds:
        loop, rounds = drafting(model, prompts, new, settings, kind, expected, **how)
        assert drafted_answers(loop, rounds, new) == expected
        assert_account_is_empty(model)


@pytest.mark.drawn(most=3)
@pytest.mark.parametrize("settings", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_drafts_change_no_token(kind: Kind | None, settings: Any, seed: int) -> None:
    assert_same(wrapped(), seed, settings, kind)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token_of_captured_steps(kind: Kind, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are read a step late."""
    let_a_cpu_capture(monkeypatch)
    monkeypatch.setattr(GenerateLoop, "asynchronous", True)
    model = wrapped()
    for settings in (DRAWN, GREEDY):
        assert_same(model, seed, settings, kind, name=str(settings is DRAWN))


@pytest.mark.whole
@pytest.mark.parametrize("budget", [{"max_graphs": 3}, {"nbytes": 2**18}], ids=str)
def test_graphs_of_steps_that_draft_keep_to_the_limits(
    budget: dict[str, int], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number of tokens has a graph, besides prefills and plain steps: they make room for each other."""
    let_a_cpu_capture(monkeypatch)
    model = uncompiled(monkeypatch, **budget)
    for number in range(2):
        assert_same(model, seed, DRAWN, None, sizes=[8, 8, 1, 2, 2, 4, 4, 1], name=str(number))
    table = model.compiled.cuda_graphs
    captured = {row.tokens // row.rows for row in table if row.phase == "decode" and row.replays}
    assert captured > {1}, "some that draft are replayed"
    assert table.captures > table.ready, "some have made room"
    assert table.ready <= budget.get("max_graphs", table.ready)
    assert table.nbytes <= budget.get("nbytes", table.nbytes)
    assert model.compiled.stats().recompiles == 0


@pytest.mark.whole
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", [*KINDS])
def test_another_number_of_tokens_each_step(
    kind: Kind, asynchronous: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain steps come between, which write no text; nothing is read for it."""
    monkeypatch.setattr(GenerateLoop, "asynchronous", asynchronous)
    assert_same(wrapped(), seed, DRAWN, kind, sizes=[8, 1, 2, 4, 1, 1, 2])


@pytest.mark.whole
@pytest.mark.parametrize(
    ("overrides", "options"),
    [({}, {"page_size": 1}), ({}, {"page_size": 3}), (WINDOWS, {})],
    ids=["pages of 1", "pages of 3", "windows"],
)
def test_whatever_the_pages_are(overrides: Any, options: Any, seed: int) -> None:
    model = check_pages(wrapped(overrides=overrides, **options))
    assert_same(model, seed, DRAWN, "right now and then", None)


def test_short_answers(seed: int) -> None:
    model = wrapped()
    for new in (1, 2, 3):
        assert_same(model, seed, GREEDY, "right", "wrong", new=new, name=str(new))


@pytest.mark.whole
@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_of_exactly_the_promised_pages_is_enough(kind: Kind, seed: int) -> None:
    """Rows end with steps of one token then: no page is there for drafts."""
    prompts, new = prompts_of(seed), 40
    pages = sum(-(-(len(prompt) + new - 1) // 4) for prompt in prompts)
    assert_same(wrapped(kv_memory=f"{4 * pages} tokens"), seed, DRAWN, kind)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_position_of_the_model_is_used(kind: Kind, seed: int) -> None:
    assert_same(wrapped(overrides={"max_position_embeddings": 54}), seed, DRAWN, kind, new=41)


def test_right_drafts_take_few_steps_and_wrong_ones_as_many_as_tokens(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = wrapped(), prompts_of(seed)
    expected = plain_answers(model, prompts, 40, GREEDY)
    steps: dict[Kind, int] = {}
    for kind in KINDS:
        loop, rounds = drafting(model, prompts, 40, GREEDY, kind, expected)
        with monkeypatch.context() as patch:
            ran = note_decode_steps(patch)
            drafted_answers(loop, rounds, 40)
        steps[kind] = len(ran) - (kind == KINDS[0])  # one was prepared
    assert steps["right"] == 5
    assert steps["wrong"] == 39
    assert steps["right"] < min(steps[KINDS[2]], steps[KINDS[3]]) <= max(steps[KINDS[2]], steps[KINDS[3]]) < 39


@pytest.mark.whole
def test_rows_that_leave_move_the_others_without_a_wait(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that stay go on from lengths that the host has not read."""
    monkeypatch.setattr(GenerateLoop, "asynchronous", True)
    model, prompts = wrapped(), prompts_of(seed)
    expected = plain_answers(model, prompts, 60, DRAWN)
    for number in range(2):  # what has to be compiled first is
        loop, rounds = drafting(model, prompts, 60, DRAWN, "right now and then", expected, sizes=[4, 8, 1, 4])
        waits = note_calls(monkeypatch, Speculation, "sync", lambda own: own.unread) if number else []
        assert leaving(loop, rounds) == [own[:size] for own, size in zip(expected, (10, 60, 23), strict=True)]
        assert not any(waits), "it was read when its turn came"
        loop.close()
    assert_account_is_empty(model)


def leaving(loop: GenerateLoop, rounds: Rounds) -> list[list[int]]:
    """Return the tokens of three rows, of which two are released when they have 10 and 23."""
    rows, answers = list(loop.rows), list[list[int]]([[], [], []])
    for number in range(60):
        while not (sampled := rounds.next()):
            pass
        for row, token in sampled.items():
            answers[rows.index(row)].append(token)
        if number in (9, 22):
            rounds.leave(rows[number // 10])
            loop.release(rows[number // 10])
    return answers


def test_a_drafter_that_gives_wrong_numbers_ends_the_call_with_its_name(seed: int) -> None:
    model, prompts = wrapped(), prompts_of(seed)
    loop, rounds = drafting(model, prompts, 20, GREEDY, "right", [[0] * 20] * 3, name="that lies")
    view = model.compiled.model_runner().decode_buffers.drafts
    (wants,) = view
    made = view[wants]

    class Lying:
        def propose(self, slots: torch.Tensor, lengths: torch.Tensor, k: int) -> Any:
            return torch.zeros(len(slots), k, dtype=torch.int64), torch.full_like(lengths, k + 1)

    view[wants] = lambda step: made(step)._replace(drafter=Lying())
    with pytest.raises(RuntimeError, match="right that lies"):
        drafted_answers(loop, rounds, 20)
    loop.close()
    view[wants] = made
    assert_account_is_empty(model)
    assert_same(model, seed, DRAWN, "right")


def test_loops_that_begin_at_once_look_in_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, both_allocate = wrapped(), threading.Barrier(2)
    runner = model.compiled.model_runner()

    def free(device: torch.device) -> int:
        with suppress(threading.BrokenBarrierError):
            both_allocate.wait(timeout=0.3)
        return 1 << 30

    monkeypatch.setattr(texts, "free_bytes", free)
    made = [start(lambda: texts.texts_of(runner)) for _ in range(2)]
    assert made[0].result(PATIENCE) is made[1].result(PATIENCE)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, None])
def test_the_rule_drafts_where_drafts_are_right(
    kind: Kind | None, asynchronous: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same steps each time, and few that draft where none is right."""
    monkeypatch.setattr(GenerateLoop, "asynchronous", asynchronous)
    model, prompts, new = wrapped(), prompts_of(seed), 60
    expected = plain_answers(model, prompts, new, DRAWN)
    steps: list[list[int]] = []
    for _ in range(2):
        loop, rounds = drafting(model, prompts, new, DRAWN, kind, expected, sizes=None)
        with monkeypatch.context() as patch:
            ran = note_calls(patch, Launch, "__call__", lambda own: own.new_tokens * (own.key.phase == "decode"))
            assert drafted_answers(loop, rounds, new) == expected
        steps.append([size for size in ran if size])
    if kind == "right":
        assert len(steps[1]) < 20
    if kind == "wrong":
        assert sum(size > 1 for size in steps[1]) <= 12
        assert len(steps[1]) <= new + 2
        assert steps[1].count(8) == 0
    loop, rounds = drafting(model, prompts, new, DRAWN, kind, expected, sizes=None)
    with monkeypatch.context() as patch:
        ran = note_calls(patch, Launch, "__call__", lambda own: own.new_tokens * (own.key.phase == "decode"))
        drafted_answers(loop, rounds, new)
    assert [size for size in ran if size] == steps[1], "counts decide, not clocks"
    assert_account_is_empty(model)


def test_trials_become_rarer_as_they_fail_and_go_on_once_one_does_not() -> None:
    rule, row = Rule(lambda rows: [1, 2, 4, 8], Costs(16 << 30, on_cuda=True)), Row(PagePool(2, 4), 0)
    rows = [row]

    def run(steps: int, right: bool) -> list[int]:
        sizes = []
        for _ in range(steps):
            sizes.append(rule.size(rows))
            if sizes[-1] > 1:
                rule.note(rows, sizes[-1], [sizes[-1] - 1], [(sizes[-1] - 1) * right])
        return sizes

    sizes = run(3000, right=False)
    trials = [at for at, size in enumerate(sizes) if size > 1 and sizes[at - 1] == 1]
    gaps = np.diff(trials)
    assert (gaps[:3] > 16).all()
    assert (gaps[1:] >= gaps[:-1] - 8).all()
    assert gaps[-1] >= 256
    cost = sum(Costs(16 << 30, on_cuda=True).of(size, 1) - 1 for size in sizes)
    assert cost / len(sizes) < 0.01
    assert run(400, right=True)[-100:] == [8] * 100
    assert 1 in run(60, right=False)[20:]


def test_a_row_whose_drafts_are_wrong_has_none_while_others_have_all() -> None:
    """But for trials of its own, which become rarer, until some are right."""
    said = list[int]()
    rule = Rule(lambda rows: [1, 2, 4, 8], Costs(16 << 30, on_cuda=True), changed=lambda: said.append(1))
    rows = [Row(PagePool(2, 4), 0) for _ in range(3)]
    tried = list[int]()
    for step in range(800):
        size, limits = rule.size(rows), [min(7, rule.limit(row)) for row in rows]
        assert size > 1, "the others' are right"
        tried += [step] * (limits[0] > 0)
        offered = [min(size - 1, limit) for limit in limits]
        rule.note(rows, size, offered, [0, offered[1], offered[2] // 2])
    assert limits[1:] == [7, 7]
    assert tried[:16] == [*range(16)]
    trials = [step for step, before in zip(tried[1:], tried, strict=False) if step > before + 1]
    assert (np.diff(trials) >= 32).all()
    assert np.diff(trials)[-1] >= 256
    assert len(said) < 2 * len(trials) + 3, "the device is told of what changes alone"
    for _ in range(400):
        rule.note(rows, 8, [rule.limit(row) for row in rows], [rule.limit(row) for row in rows])
    assert [rule.limit(row) for row in rows] == [7, 7, 7]


@pytest.mark.whole
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_device_is_told_how_many_drafts_each_row_may_have(
    asynchronous: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is repeated is made anew for it, and nobody waits."""
    monkeypatch.setattr(GenerateLoop, "asynchronous", asynchronous)
    model, prompts, new = wrapped(), prompts_of(seed), 300
    expected = plain_answers(model, prompts, new, GREEDY)
    for number in range(2):  # what has to be compiled first is
        loop, rounds = drafting(model, prompts, new, GREEDY, "wrong for one row", expected, sizes=None)
        noted = note_calls(monkeypatch, Rule, "note", lambda own, rows, new, offered, accepted: offered)
        waits = note_calls(monkeypatch, Speculation, "sync", lambda own: own.unread) if number else []
        assert drafted_answers(loop, rounds, new) == expected
    assert not any(waits), "it was read when its turn came"
    offered = [own for own in noted if len(own) == len(prompts)]
    assert [own[0] > 0 for own in offered[:16]] == [True] * 16
    assert [own[0] for own in offered[18:30]] == [0] * 12
    assert median(own[1] for own in offered[:30]) == 7
    assert_account_is_empty(model)


class Counted(TorchDispatchMode):
    """The operators of repeated steps that are in no CUDA graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count, self._replaying = 0, False
        replay, run = StandIn.launch, DecodeStep.run

        def ran(*args: Any) -> Any:
            with self:
                return run(*args)

        def replayed(graph: StandIn) -> None:
            self._replaying = True
            replay(graph)
            self._replaying = False

        monkeypatch.setattr(DecodeStep, "run", ran)
        monkeypatch.setattr(StandIn, "launch", replayed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not self._replaying
        return func(*args, **(kwargs or {}))


class Steady(Rule):
    """Does all that the rule does, and always says the same."""

    def __init__(self, size: int) -> None:
        super().__init__(lambda rows: [1, 2, 4, 8], Costs(16 << 30, on_cuda=True))
        self._steady = size

    def size(self, rows: Sequence[Row]) -> int:
        super().size(rows)
        return self._steady


def costs_of_steps(model: Any, size: int, patch: pytest.MonkeyPatch) -> tuple[float, float]:
    """Return how many operators most steps of two rows call, and how often they call functions of ours at least."""
    prompts, new = [[10, 3, 4, 5], [11, 7, 8]], 40
    expected = plain_answers(model, prompts, new, [None] * 2)
    operators, calls = list[int](), list[int]()
    for number in range(3):  # all is captured after two
        loop, rounds = drafting(model, prompts, new, [None] * 2, "right now and then", expected, rule=Steady(size))
        if number == 2:
            round_of, counted = rounds._round, Counted(patch)

            def measured(round_of: Any = round_of, counted: Counted = counted) -> None:
                before, walk = counted.count, Walk()
                walk.of(round_of)
                operators.append(counted.count - before)
                calls.append(len(walk.legs[0]))

            patch.setattr(rounds, "_round", measured)
        drafted_answers(loop, rounds, new)
    return median(operators), min(calls[5:-5])


@pytest.mark.whole
def test_a_repeated_step_that_drafts_costs_the_host_what_a_plain_one_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows go back by what does not count, and leave the pages that they have entered; the rule is asked, and told."""
    let_a_cpu_capture(monkeypatch)
    monkeypatch.setattr(GenerateLoop, "asynchronous", True)
    model = uncompiled(monkeypatch)
    found = []
    for size in (1, 4):
        with monkeypatch.context() as patch:
            found.append(costs_of_steps(model, size, patch))
    (operators, calls), (more_operators, more_calls) = found
    print(f"plain: {operators} operators, {calls} calls; with drafts: {more_operators}, {more_calls}")
    assert 0 < more_operators <= operators + 1
    assert more_calls <= calls + 10
