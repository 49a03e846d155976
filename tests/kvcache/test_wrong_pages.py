"""A row that reads what is not its own is named with the page and the position, by the tap that tests install."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedModel

import compiled_llm
from compiled_llm import Engine, SamplingParams
from compiled_llm.execution.decode.decode_step import DecodeStep
from compiled_llm.execution.decode.persistent_batch import PersistentBatch
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.execution.state.slots import Slots
from compiled_llm.kvcache.row import Row
from support.execution.page_checks import PageCheck, PageTags, WrongPageError, check_pages, wrong_tags
from support.execution.schedule import Schedule
from support.parity import assert_account_is_empty
from support.tiny_models import WINDOWS, tiny_qwen3

SIZE = 4
OPTIONS: dict[str, Any] = {"mode": "eager", "page_size": SIZE, "max_batch_size": 9, "progress": False}
OVERRIDES: dict[str, Any] = {"eos_token_id": None, "num_hidden_layers": 1}
FIRST, SECOND = [5, 9, 3, 7, 11, 4, 6, 8, 21, 30, 14, 15, 2], [44, 2, 6, 7, 19, 3, 13, 12, 10, 40]


def checked(plain: PreTrainedModel | None = None, **options: Any) -> PreTrainedModel:
    """A wrapped copy."""
    model = tiny_qwen3(**OVERRIDES) if plain is None else copy.deepcopy(plain)
    return check_pages(compiled_llm.wrap(model, **{**OPTIONS, "kv_memory": "400 tokens", **options}))


class Scene:
    """Two rows of a loop that decode."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.patch, self.model = monkeypatch, checked(**options)
        self.forked: GenerateLoop | None = None
        self.loop = self.model.compiled.generate_loop()
        self.first, self.second = (self.loop.admit(prompt, 30) for prompt in (FIRST, SECOND))
        for _ in range(4):
            self.loop.step()

    @property
    def state(self) -> RunnerState:
        return self.loop.model_runner.state

    @property
    def tags(self) -> Tensor:
        (tap,) = self.state.taps
        assert isinstance(tap.inputs, PageTags)
        return tap.inputs.tags

    def listed(self, row: Row) -> Tensor:
        """The row's page numbers on the device."""
        assert row.slot is not None
        each = self.state.slots.pages_each
        return self.state.slots.pages[row.slot * each : (row.slot + 1) * each]

    def buffer(self, name: str) -> Tensor:
        """A column of the decode buffers; the first row is at 0."""
        return self.state.arena[f"decode_{name}"]

    def put_back(self, row: Row, position: int, tag: Tensor) -> None:
        self.tags[row.pages[position // SIZE], position % SIZE] = tag


class Planted(NamedTuple):
    """Where a fault is to be seen in the next step, in a page that may be taken only then."""

    row: Row
    page: int | None
    position: int

    @property
    def message(self) -> str:
        page = self.row.pages[self.position // SIZE] if self.page is None else self.page
        return f"row {self.row.number} (of a call) has read page {page} at position {self.position},"


def stale_slot(scene: Scene) -> Planted:
    """A slot keeps what a row has left there that had its page before."""
    row, last = scene.first, scene.first.exact_length - 1
    scene.put_back(row, last, scene.tags[scene.second.pages[0], 0])
    return Planted(row, row.pages[-1], last)


def freed_page(scene: Scene) -> Planted:
    """A page is free while a row still reads it, and another row writes there."""
    row, page = scene.first, scene.first.pages[1]
    scene.loop.model_runner.pool.give_back([page])
    other = scene.loop.model_runner.pool.take_reserved
    scene.patch.setattr(scene.loop.model_runner.pool, "take_reserved", lambda count: [page, *other(count - 1)])
    scene.loop.admit(SECOND[::-1][:3], 1)
    scene.loop.step()
    scene.patch.undo()
    return Planted(row, page, SIZE)


def wrong_position(scene: Scene) -> Planted:
    """The device writes a row's next token over its last."""
    scene.buffer("length")[0] -= 1
    last = scene.first.exact_length - 2
    return Planted(scene.first, scene.first.pages[last // SIZE], last)


def another_rows_page(scene: Scene) -> Planted:
    scene.listed(scene.first)[2] = scene.second.pages[1]
    return Planted(scene.first, scene.second.pages[1], 2 * SIZE)


def stale_table(scene: Scene) -> Planted:
    """A CUDA graph that was evicted would read the place of a table that another row has by now."""
    scene.buffer("start")[0] = scene.buffer("start")[1]
    at = scene.second.exact_length + 1  # it has one more token in that step
    return Planted(scene.first, int(scene.listed(scene.second)[at // SIZE]), at)


def swapped_pages(scene: Scene) -> Planted:
    listed = scene.listed(scene.first)
    listed[0], listed[1] = listed[1].item(), listed[0].item()
    return Planted(scene.first, scene.first.pages[1], 0)


def shifted_table(scene: Scene) -> Planted:
    scene.buffer("start")[0] += 1
    return Planted(scene.first, scene.first.pages[1], 0)


def length_too_long(scene: Scene) -> Planted:
    scene.buffer("length")[0] += 1
    length = scene.first.exact_length
    return Planted(scene.first, int(scene.listed(scene.first)[length // SIZE]), length)


def rewound_on_the_host_alone(scene: Scene) -> Planted:
    """The device goes on after tokens that the row has forgotten."""
    scene.patch.setattr(PersistentBatch, "_has", lambda *_: True)
    last = scene.first.exact_length - 1
    page = scene.first.pages[last // SIZE]
    scene.first.rewind(scene.first.exact_length - 1)
    return Planted(scene.first, page, last)


def rewound_and_not_rewritten(scene: Scene) -> Planted:
    """A row forgets a token, and the one in its place is not written."""
    row, last = scene.first, scene.first.exact_length - 1
    before = scene.tags[row.pages[last // SIZE], last % SIZE].clone()
    row.rewind(last)
    scene.loop.step(fed={row: 99})
    scene.put_back(row, last, before)
    return Planted(row, row.pages[last // SIZE], last)


def page_not_copied(scene: Scene) -> Planted:
    """A row that stops sharing a page, to write into it, gets one that holds nothing."""
    scene.patch.setattr(RunnerState, "copy_pages", lambda *_: None)
    scene.forked = scene.loop.fork()
    assert scene.first.exact_length % SIZE == 0, "it enters another page"
    return Planted(scene.second, None, scene.second.exact_length // SIZE * SIZE)


def prefix_of_other_tokens(scene: Scene) -> Planted:
    """The prefix tree finds pages under tokens that are not theirs."""
    prefixes = scene.loop.model_runner.prefixes
    wrong = np.array([*FIRST[:6], 77, *FIRST[7:12]])
    prefixes.insert(wrong, scene.first.pages[:3])
    row = scene.loop.add_row(0)
    row.begin_from(prefixes.match(np.append(wrong, 1)).pages)
    row.identify(wrong)
    scene.loop.resume(row, np.array([1, 2]), 4)
    return Planted(row, scene.first.pages[2], 11)


def fault_of_position(scene: Scene) -> Planted:
    """A token is stored where the one before it belongs."""
    row, last = scene.second, scene.second.exact_length - 1
    pages = [row.pages[at // SIZE] for at in (last - 1, last)]
    scene.put_back(row, last, scene.tags[pages[0], (last - 1) % SIZE])
    return Planted(row, pages[1], last)


FAULTS: list[Callable[[Scene], Planted]] = [
    stale_slot,
    freed_page,
    wrong_position,
    another_rows_page,
    stale_table,
    swapped_pages,
    shifted_table,
    length_too_long,
    rewound_on_the_host_alone,
    rewound_and_not_rewritten,
    page_not_copied,
    prefix_of_other_tokens,
    fault_of_position,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_named(plant: Callable[[Scene], Planted], monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    planted = plant(scene)
    with pytest.raises(WrongPageError) as raised:
        scene.loop.step()
    assert planted.message in str(raised.value)
    scene.patch.undo()
    if scene.forked is not None:
        scene.forked.close()
    if plant is freed_page:  # two rows would give it back
        return
    scene.loop.close()
    assert_works(scene.model)


def assert_works(model: PreTrainedModel) -> None:
    """All pages are back, and a call is what it is without checks."""
    model.compiled.model_runner().prefixes.clear()
    assert_account_is_empty(model)
    ids = torch.tensor([FIRST])
    expected = tiny_qwen3(**OVERRIDES).generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)
    assert_account_is_empty(model)


class Untouched(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        return scores


CALLS: dict[str, dict[str, Any]] = {
    "fast loop": {},
    "processed loop": {"logits_processor": LogitsProcessorList([Untouched()])},
    "compiled forward": {"num_beams": 2},
}


@pytest.mark.parametrize("path", [*CALLS, "forward"])
def test_a_call_looks_before_it_returns(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, what its last steps find is known only then."""
    model, ids = checked(), torch.tensor([FIRST])

    def found(watch: PageCheck) -> None:
        watch.inputs.faults.copy_(torch.tensor([1, 0], device="cpu"))

    call = functools.partial(
        model, inputs_embeds=model.get_input_embeddings()(ids).detach(), use_cache=False
    )  # in pages
    if path in CALLS:
        call = functools.partial(model.generate, ids, max_new_tokens=4, do_sample=False, **CALLS[path])
    monkeypatch.setattr(PageCheck, "inspect", found)
    with torch.no_grad(), pytest.raises(WrongPageError, match="row 0 "):
        call()
    monkeypatch.undo()
    if path in CALLS:
        assert {*model.compiled.stats().generate_calls} == {path}
    assert_works(model)


def test_an_engine_names_the_request_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, times = checked(), iter(range(100))
    list_pages = Slots.list_pages

    def listed(slots: Slots, rows: list[Row]) -> bool:
        changed = list_pages(slots, rows)
        if next(times) == 3:
            slots._arena.flush()
            for row in rows[:1]:
                assert row.slot is not None
                slots.pages[row.slot * slots.pages_each] = 60
        return changed

    monkeypatch.setattr(Slots, "list_pages", listed)
    monkeypatch.setattr(DecodeStep, "is_valid_for", lambda *_: False)  # steps that repeat do not list pages
    settings = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with Engine(model) as engine:
        failed = []
        for handle in [engine.submit(prompt, settings) for prompt in (FIRST, SECOND)]:
            with pytest.raises(WrongPageError) as raised:
                handle.result()
            failed.append(str(raised.value))
        for message in failed:
            assert re.search(r"row \d+ \(request \d+\) has read page 60 at position 0,", message), message
        monkeypatch.undo()
        outputs = engine.generate([FIRST, SECOND], settings)
        assert {output.finish_reason for output in outputs} == {"length"}
    assert_works(model)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("config", [{}, WINDOWS])
def test_a_random_schedule_is_silent(config: dict[str, Any], seed: int) -> None:
    """Rows come, go, fork, rewind, extend, and feed in tokens that do not count."""
    plain = tiny_qwen3(**{**OVERRIDES, **config})
    model = checked(kv_memory="4000 tokens", plain=plain)
    rng = np.random.default_rng(seed)
    schedule = Schedule(model.compiled.generate_loop(), plain, rng)
    for _ in range(60):
        schedule.anything()
    assert schedule.drafted or schedule.drafts is None
    schedule.close()
    assert wrong_tags(model) == 0
    assert_account_is_empty(model)


@pytest.mark.parametrize("change", ["none", "rewound", "extended", "forked"])
def test_a_row_that_changes_while_it_waits_for_a_slot_is_silent(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    row, slots = scene.first, scene.state.slots
    slots._make_room(slots.padding, set())  # as rows of other loops do
    assert row.slot is None
    assert row.exact_length > 2
    if change == "rewound":
        row.rewind(row.exact_length - 2)
    if change == "extended":
        scene.loop.extend([row], [np.array([7, 8])], [np.arange(row.exact_length, row.exact_length + 2)])
    if change == "forked":
        scene.forked = scene.loop.fork()
    for tokens in ([9, 10], [11, 12]):
        scene.loop.step(torch.tensor(tokens))
    assert wrong_tags(scene.model) == 0
    if scene.forked is not None:
        scene.forked.step(torch.tensor([9, 10]))
        scene.forked.close()
    scene.loop.close()
    assert_works(scene.model)


def test_rows_that_begin_from_caches_and_embeddings_are_silent() -> None:
    model, plain = checked(), tiny_qwen3(**OVERRIDES)
    ids = torch.tensor([FIRST, FIRST[::-1]])
    theirs = DynamicCache(config=plain.config)
    plain(ids, past_key_values=theirs)
    more = torch.cat([ids, torch.tensor([[3, 4], [5, 6]])], 1)
    expected = plain.generate(more, max_new_tokens=7, do_sample=False)
    ours = model.generate(more, past_key_values=theirs, max_new_tokens=7, do_sample=False)
    assert torch.equal(ours, expected)
    for options in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"num_return_sequences": 2, "do_sample": True}):
        model.generate(ids[:1], max_new_tokens=9, **options)
    embeddings = plain.get_input_embeddings()(ids)
    model.generate(inputs_embeds=embeddings, max_new_tokens=5, do_sample=False)
    kept = model.generate(ids, max_new_tokens=5, return_dict_in_generate=True).past_key_values
    kept.crop(-3)
    assert torch.isfinite(model(ids[:, :3], past_key_values=kept).logits).all()
    assert wrong_tags(model) == 0


def test_nothing_is_checked_by_default() -> None:
    model = compiled_llm.wrap(tiny_qwen3(**OVERRIDES), **OPTIONS, kv_memory="400 tokens")
    state = model.compiled.model_runner().state
    assert not state.taps
    assert "chain" not in state.arena._columns
