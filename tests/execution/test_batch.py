"""A batch has rows that decode, new tokens of others, or both; chunks end in no token; sampling may be deferred."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from compiled_llm import OutOfPagesError
from compiled_llm.compilation.programs import Programs
from compiled_llm.execution.batch import Extension
from compiled_llm.execution.prefill.launches import PrefillLaunches
from compiled_llm.execution.prefill.prefill import Prefill
from compiled_llm.execution.steps.launch import BoundProgram
from compiled_llm.kvcache.row import Row
from support.execution.batches import WIDTH, Batches, ids_of, let_a_cpu_capture_sampling
from support.execution.model_changes import other_attribute
from support.execution.stand_in_cuda_graphs import StandIn, let_a_cpu_capture
from support.parity import assert_account_is_empty

pytestmark = pytest.mark.core


class RandomBatches(Batches):
    """Rows of all kinds come, in chunks, end and come again; another loop runs between launch and sampling."""

    def begin(self, rng: np.random.Generator, beside: Batches | None = None) -> RandomBatches:
        self.rng, self.rest, self.beside = rng, dict[Row, NDArray[np.int64]](), beside
        return self

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def come(self, prompt: NDArray[np.int64], constrained: bool, penalised: bool) -> None:
        self.rest[self.admit(prompt, constrained, penalised)] = prompt

    def end(self, row: Row, comes_again: bool = False) -> None:
        text = [*self.twins[row].fed, *self.texts[row][-1:]] if row in self.twins else []
        row.free()
        self.rest.pop(row, None)
        if comes_again and text:
            self.come(np.array(text), row in self.constrained, row in self.penalised)

    @property
    def rows(self) -> list[Row]:
        return [row for row in self.texts if row.slot is not None]

    def anything(self) -> None:
        if not self.rows or (len(self.rows) < 4 and self.chance(0.5)):
            self.come(self.rng.integers(3, WIDTH, self.rng.integers(1, 10)), self.chance(0.5), self.chance(0.5))
        decode = [row for row in self.rows if row not in self.rest]
        if decode and self.chance(0.15):
            self.rng.shuffle(decode)
        extend = []
        for row, ids in list(self.rest.items()):
            count = len(ids) if self.chance(0.5) else int(self.rng.integers(1, len(ids) + 1))
            extend.append(Extension.of(row, ids[:count], is_last=count == len(ids)))
            self.rest[row] = ids[count:]
            if count == len(ids):
                del self.rest[row]
        self.run(decode, extend, changes=self.chance(0.2), mixed=self.chance(0.5))
        if isinstance(self.beside, RandomBatches) and self.chance(0.3):
            self.beside.anything()
        if self.rows and self.chance(0.1):
            self.end(self.rows[self.rng.integers(len(self.rows))])
            self.come(self.rng.integers(3, WIDTH, 4), self.chance(0.5), self.chance(0.5))  # takes the slot
        if self.persistent.deferred:
            self.sample()
        for row in [row for row in self.rows if len(self.texts[row]) > 20 or self.chance(0.02)]:
            self.end(row, comes_again=len(self.texts[row]) <= 20)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("mode", ["eager", pytest.param("compile", marks=pytest.mark.whole)])
@pytest.mark.parametrize("captured", [False, True], ids=["sampling is launched", "sampling is captured"])
def test_rows_of_all_kinds_get_their_own_tokens_in_random_batches(mode, captured, seed, whole, monkeypatch):
    if captured:
        let_a_cpu_capture_sampling(monkeypatch)
    rng = np.random.default_rng(seed)
    first = RandomBatches(mode=mode, kv_memory="900 tokens")
    first.call(first.model_runner.prepare_deferred, [2, 4])
    first.begin(rng, RandomBatches(first).begin(rng))
    for _ in range(150 if whole else 80):
        first.anything()
    for row in [*first.rows, *first.beside.rows]:
        row.free()
    assert_account_is_empty(first.model)


@pytest.mark.parametrize("mixed", [False, True], ids=["two launches", "mixed"])
@pytest.mark.parametrize("full", ["the prompt finds no pages", "a row that decodes finds none"])
def test_a_step_of_both_parts_that_finds_no_pages_changes_nothing(seed, full, mixed):
    batches = Batches(kv_memory="60 tokens")
    rows = [batches.admit(ids_of(6, seed), constrained=False) for _ in range(2)]
    batches.run(extend=[Extension.of(row, ids_of(6, seed)) for row in rows])  # both enter a page next
    pool, new = batches.model_runner.pool, Row(batches.model_runner.pool, 0)
    left = pool.available
    pages = left if full == "a row that decodes finds none" else left + 1
    before = [(list(row.pages), row.exact_length, row.exact_position) for row in rows]
    with pytest.raises(OutOfPagesError):
        batches.run(decode=rows, extend=[Extension.of(new, ids_of(3 * pages, seed))], mixed=mixed)
    assert [(row.pages, row.exact_length, row.exact_position) for row in rows] == before
    assert (new.exact_length, new.pages, pool.available) == (0, [], left)
    for _ in range(3):
        batches.run(decode=rows)


def test_a_mixed_step_is_one_launch_of_both(seed, monkeypatch):
    batches = Batches(kv_memory="300 tokens")
    rows = [batches.admit(ids_of(4 + at, seed), constrained=False) for at in range(2)]
    batches.run(extend=[Extension.of(row, ids_of(4 + at, seed)) for at, row in enumerate(rows)])
    launched: list[str] = []
    for owner, method, name in ((Programs, "prefill", "prefill"), (BoundProgram, "__call__", "decode")):
        program = getattr(owner, method)
        monkeypatch.setattr(
            owner, method, lambda *args, name=name, program=program: launched.append(name) or program(*args)
        )
    new = batches.admit(ids_of(9, seed), constrained=False)
    batches.run(rows, [Extension.of(new, ids_of(9, seed)[:4], is_last=False)], mixed=True)
    batches.run(rows, [Extension.of(new, ids_of(9, seed)[4:])], mixed=True)
    assert launched == ["prefill", "prefill"]
    for _ in range(3):
        batches.run([*rows, new])
    assert {*launched[2:]} == {"decode"}


def test_what_does_not_fit_in_one_launch_is_not_mixed(seed):
    batches = Batches(kv_memory="300 tokens", prefill_tokens=6)
    row = batches.admit(ids_of(4, seed), constrained=False)
    batches.run(extend=[Extension.of(row, ids_of(4, seed))])
    new = Row(batches.model_runner.pool, 0)
    can_mix = batches.model_runner.can_mix
    assert can_mix([row], [Extension.of(new, ids_of(5, seed))])
    assert not can_mix([row], [Extension.of(new, ids_of(6, seed))])
    assert not can_mix([row], [])
    assert not can_mix([], [Extension.of(new, ids_of(5, seed))])


def test_a_mixed_step_that_fails_leaves_no_row_a_token_that_may_be_wrong(seed, monkeypatch):
    batches = Batches()
    row, new = (batches.admit(ids_of(5, seed), constrained=False) for _ in range(2))
    batches.run(extend=[Extension.of(row, ids_of(5, seed))])
    with monkeypatch.context() as broken:
        broken.setattr(Prefill, "run", lambda self, *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            batches.run([row], [Extension.of(new, ids_of(5, seed))], mixed=True)
    assert (row.exact_length, row.has_next, new.exact_length) == (5, False, 0)
    with pytest.raises(RuntimeError, match="the rows have no next tokens"):
        batches.run([row], [Extension.of(new, ids_of(5, seed))], mixed=True)


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.either("penalised")
@pytest.mark.parametrize("penalised", [False, True])
def test_a_mixed_step_of_a_model_that_has_changed_is_replayed_only_if_it_can_run_again(
    penalised: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a running row feeds in is kept for that; what its penalties have counted is not, so guards come first."""
    let_a_cpu_capture(monkeypatch)
    ran: list[str] = []
    replay, launch = StandIn.launch, PrefillLaunches._launch
    monkeypatch.setattr(StandIn, "launch", lambda self: ran.append("replayed") or replay(self))
    monkeypatch.setattr(PrefillLaunches, "_launch", lambda self, inputs: ran.append("launched") or launch(self, inputs))
    batches = Batches(mode="compile", kv_memory="300 tokens")
    row, *others = (batches.admit(ids_of(4 + at, seed), False, penalised and not at) for at in range(3))
    batches.run(extend=[Extension.of(row, ids_of(4, seed))])
    for _ in range(3):
        batches.run([row])  # tokens to be counted
    for at, other in enumerate(others, 1):
        ran.clear()
        batches.run([row], [Extension.of(other, ids_of(4 + at, seed))], mixed=True)
        unchanged, changed = ["replayed"], ["launched"] if penalised else ["replayed", "launched"]
        assert ran == (unchanged if at == 1 else changed)
        other.free()
        for model in (batches.model, batches.plain):
            other_attribute(model)  # only guards see it
    assert batches.model.compiled.stats().recompiles
    for _ in range(6):
        batches.run([row])
    row.free()
    assert_account_is_empty(batches.model)
