"""Rows of one loop that begin with the same pages, which each step reads once for all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.config import WrapConfig
from compiled_llm.execution.cascade import cascade as cascades
from compiled_llm.execution.cascade.tables import CascadeTable
from compiled_llm.kinds.refusals import UnsupportedModelError
from compiled_llm.kvcache.row import Row
from compiled_llm.model.checks import check_device
from support.execution.alone import Alone
from support.execution.schedule import Schedule, prompt_of
from support.parity import assert_account_is_empty
from support.tiny_models import WINDOWS, tiny_llama, tiny_qwen3

OPTIONS: dict[str, Any] = {"mode": "eager", "page_size": 3, "max_batch_size": 9, "progress": False}
OVERRIDES: dict[str, Any] = {"eos_token_id": None, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a page count, too."""
    monkeypatch.setattr(cascades, "LEAST_KEYS", 3)


class SharingSchedule(Schedule):
    """Some rows begin as another one does, whose pages they share."""

    def admit(self, length: int, new: int) -> None:
        whole = [row for row in self.twins if len(self.twins[row].fed) > 3 and not row.speculation.unread]
        if not whole or self._rng.random() < 0.2:
            super().admit(length, new)
            return
        other = whole[self._rng.integers(len(whole))]
        shared = int(self._rng.integers(3, len(self.twins[other].fed) + 1))
        prompt = self.twins[other].fed[:shared] + prompt_of(int(self._rng.integers(1, 6)), self._rng)
        row = self.generate_loop.add_row(len(prompt))
        begun = row.begin_as(other, shared)
        self.generate_loop.resume(row, np.array(prompt[begun:]), new)
        self.waiting[row], self.left[row] = prompt, new


@pytest.mark.whole
@pytest.mark.parametrize(
    ("make", "config"), [(tiny_qwen3, {}), pytest.param(tiny_llama, {}, marks=pytest.mark.whole), (tiny_qwen3, WINDOWS)]
)
def test_a_random_schedule_gives_every_row_huggingfaces_logits(
    make: Any, config: dict[str, Any], seed: int, whole: bool
) -> None:
    """Rows are rewound, fork, draft, and write into pages that others share; several loops take turns."""
    plain = make(**{**OVERRIDES, **config})
    model = compiled_llm.wrap(make(**{**OVERRIDES, **config}), **OPTIONS, kv_memory="5000 tokens", cascade=True)
    rng = np.random.default_rng(seed)
    schedules = [SharingSchedule(model.compiled.generate_loop(), plain, rng) for _ in range(2)]
    for _ in range(150 if whole else 30):
        for schedule in schedules:
            schedule.anything()
    assert model.compiled.stats().cascade_steps > (20 if whole else 4)
    for schedule in schedules:
        schedule.close()
    assert_account_is_empty(model)


CALLS: dict[str, dict[str, Any]] = {
    "samples of each prompt": {"num_return_sequences": 4, "do_sample": True},
    "beams": {"num_beams": 4, "num_return_sequences": 2},
    "equal prompts": {"do_sample": False},
}


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize(
    ("call", "mode"),
    [
        *[(call, "eager") for call in CALLS],
        pytest.param("beams", "compile without Inductor", marks=pytest.mark.slow),
        *[pytest.param(call, "compile", marks=[pytest.mark.slow, pytest.mark.whole]) for call in CALLS],
    ],
)
def test_generate_gives_the_same_tokens(call: str, mode: str, seed: int, request: pytest.FixtureRequest) -> None:
    if mode == "compile without Inductor":
        request.getfixturevalue("without_inductor")
        mode = "compile"
    prompts = torch.randint(3, 128, (2, 20))
    if call == "equal prompts":
        prompts = prompts[:1].repeat(5, 1)
    outputs = []
    for cascade in (False, True):
        options = {**OPTIONS, "mode": mode if cascade else "eager", "kv_memory": "3000 tokens", "cascade": cascade}
        model = compiled_llm.wrap(tiny_qwen3(**OVERRIDES), **options)
        for _ in range(2):
            torch.manual_seed(seed)
            outputs.append(model.generate(prompts, max_new_tokens=12, **CALLS[call]))
        assert (model.compiled.stats().cascade_steps > 0) == cascade
        assert_account_is_empty(model)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_runs_follow_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three rows that begin alike, one leaves, and one is rewound to where it writes into what they shared."""
    found: list[list[tuple[tuple[int, ...], int, int]]] = []
    lay_out = CascadeTable.lay_out

    def note(self: CascadeTable, runs: Any, rows: Any, step: Any) -> None:
        found.append([tuple(run) for run in runs])
        lay_out(self, runs, rows, step)

    monkeypatch.setattr(CascadeTable, "lay_out", note)
    plain = tiny_qwen3(**OVERRIDES)
    model = compiled_llm.wrap(tiny_qwen3(**OVERRIDES), **OPTIONS, kv_memory="900 tokens", cascade=True)
    loop = model.compiled.generate_loop()
    prompts = [[*range(3, 15), last] for last in (20, 21, 22)]
    twins = dict(zip(rows_alike(loop, prompts), [Alone(plain, prompt) for prompt in prompts], strict=True))
    first, _, third = twins
    decode(loop, twins)
    assert found[-1] == [((0, 1, 2), 0, 4)]
    loop.release(first)
    del twins[first]
    decode(loop, twins)
    assert found[-1] == [((0, 1), 0, 4)]
    third.rewind(7)
    twins[third] = Alone(plain, twins[third].fed[:7])
    loop.step(fed={row: twin.next for row, twin in twins.items()})
    for twin in twins.values():
        twin.feed([twin.next])
    assert found[-1] == [((0, 1), 0, 2)], "it writes into a copy of the third page"
    decode(loop, twins)
    loop.close()


def test_a_run_grows_with_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last page of a row is not read together with others before the row has begun another one."""
    found: list[int] = []
    lay_out = CascadeTable.lay_out

    def note(self: CascadeTable, runs: Any, rows: Any, step: Any) -> None:
        found.extend(run.pages for run in runs)
        lay_out(self, runs, rows, step)

    monkeypatch.setattr(CascadeTable, "lay_out", note)
    model = compiled_llm.wrap(tiny_qwen3(**OVERRIDES), **OPTIONS, kv_memory="900 tokens", cascade=True)
    loop, prompts = model.compiled.generate_loop(), [[*range(3, 15)], [*range(3, 16)]]
    twins = dict(zip(rows_alike(loop, prompts), [Alone(tiny_qwen3(**OVERRIDES), ids) for ids in prompts], strict=True))
    for _ in range(12):
        loop.model_runner.expect_changes()  # so that each step is made anew
        decode(loop, twins)
    assert found == [3, 4], "and nothing is written when rows only go on"
    loop.close()


def rows_alike(loop: Any, prompts: list[list[int]]) -> list[Row]:
    """Rows that share the full pages of their prompts, which are computed."""
    rows = [loop.admit(prompts[0], 20)]
    loop.step()
    for prompt in prompts[1:]:
        row = loop.add_row(len(prompt))
        loop.resume(row, np.array(prompt[row.begin_as(rows[0], len(prompt)) :]), 20)
        rows.append(row)
    loop.step()
    return rows


def decode(loop: Any, twins: dict[Row, Alone]) -> None:
    """One step, with HuggingFace's logits for each row."""
    loop.step()
    for twin in twins.values():
        twin.feed([twin.next])
    expected = torch.stack([twin.logits for twin in twins.values()])
    torch.testing.assert_close(loop.logits(), expected, rtol=1e-3, atol=1e-3)


# ---- bad input


def test_options_that_cannot_be_are_refused() -> None:
    plain = tiny_qwen3(**OVERRIDES)
    with pytest.raises(ValueError, match="cascade='yes': must be True, False or"):
        compiled_llm.wrap(plain, cascade="yes")
    with pytest.raises(ValueError, match="cascade=True with max_batch_size=1: one row shares its pages with no other"):
        compiled_llm.wrap(plain, cascade=True, max_batch_size=1)


def test_flashinfer_reads_shared_pages_for_each_row() -> None:
    message = (
        r"^wrap: cascade=True: backend='flashinfer' has no decode kernel on cuda that reads pages which rows share "
        "once; wrap with backend='auto', or without cascade$"
    )
    with pytest.raises(ValueError, match=message):
        check_device("cuda", torch.bfloat16, WrapConfig(backend="flashinfer", cascade=True))


def test_too_many_query_heads_for_a_tile_are_refused() -> None:
    config = {**OVERRIDES, "num_attention_heads": 72, "num_key_value_heads": 1, "head_dim": 2, "hidden_size": 144}
    plain: PreTrainedModel = tiny_llama(**config)
    with pytest.raises(UnsupportedModelError, match="layer 0 has 72 query heads for each kv head, and at most 64"):
        compiled_llm.wrap(plain, cascade=True)
