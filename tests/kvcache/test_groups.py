"""Two groups of layers, each with page numbers of its own: the same tokens as one group and as HuggingFace, and pages
of both groups are counted, shared, copied, kept and given back.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import compiled_llm
from compiled_llm import Engine
from compiled_llm.engine.steps import scheduler
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.kvcache import specs
from compiled_llm.kvcache.pool import NULL_PAGE, PagePool
from compiled_llm.kvcache.prefix_tree import PrefixTree
from compiled_llm.kvcache.releasable_memory import ReleasableMemory
from compiled_llm.kvcache.row import Row
from compiled_llm.kvcache.specs import FullAttentionSpec, allocate_pages, page_bytes, page_size_bytes, sharing_memory
from compiled_llm.kvcache.table import build_table
from compiled_llm.model.layer_probe import Layer
from compiled_llm_ops.reference.backend import Reference
from support.engine import tiny_engines
from support.execution.schedule import Schedule, assert_fed
from support.huggingface.families import FAMILIES, make
from support.parity import FEW_PAGES, assert_account_is_empty, greedy, mixed_prompts, next_turn
from support.tiny_models import tiny_qwen3

SIZE = 4
CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-4}


def by_window(layers: Sequence[Layer]) -> list[int]:
    """Layers with a window are a group of their own."""
    return [int(layer.window_left >= 0) for layer in layers]


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "layer_groups", by_window)


MODELS: dict[str, dict[str, Any]] = {
    "Gemma3": {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "GptOss": {"num_hidden_layers": 2},  # one layer of each kind; sinks need the log-sum-exp
}


def pair(family: str, seed: int, mode: Any = "eager", **options: Any) -> tuple[PreTrainedModel, Any]:
    config = {**FAMILIES[family], **MODELS[family]}
    plain, model = (make(family, config, seed) for _ in range(2))
    return plain, compiled_llm.wrap(model, mode=mode, **{**FEW_PAGES, **options})


def assert_two_groups(model: Any) -> None:
    state = model.compiled.model_runner().state
    assert sorted({spec.group for spec in state.specs}) == [0, 1]
    assert (state.pool.groups, len(state.slots.pages)) == (2, 2)


# ---- rows, pool and tree


EACH = 16
"""Pages for each group: rows often find too few."""


class Walk:
    """Rows that come, grow, fork, forget, are kept and go at random, with a memory that says who wrote a page."""

    def __init__(self, seed: int, groups: int) -> None:
        self.random, self.groups = random.Random(seed), groups
        self.pool = PagePool(1 + EACH * groups, SIZE, groups=groups)
        self.tree = PrefixTree(self.pool)
        self.memory: dict[int, tuple[int, list[int]]] = {}  # of a page: its group, and tokens
        self.rows: dict[Row, list[int]] = {}

    def write(self, row: Row, tokens: list[int]) -> None:
        if self.pool.pages_for(len(tokens)) + self.groups > self.pool.available:
            return
        start = row.length
        for source, target in row.grow(len(tokens)):
            group, held = self.memory[source]
            self.memory[target] = group, list(held)
        for number, page in enumerate(row.pages):
            if number // self.groups >= -(-start // SIZE):
                self.memory[page] = number % self.groups, [-1] * SIZE
        self.rows[row] += tokens
        for at in range(start, row.length):
            for page in row.pages[at // SIZE * self.groups :][: self.groups]:
                self.memory[page][1][at % SIZE] = self.rows[row][at]

    def begin(self) -> None:
        text = [self.random.randrange(2) for _ in range(self.random.randint(1, 20))]
        row = Row(self.pool, 0)
        row.begin_from(self.tree.match(np.array(text, dtype=np.int64)).pages)
        self.rows[row] = text[: row.length]
        self.write(row, text[row.length :])

    def step(self) -> None:
        row = self.random.choice([*self.rows]) if self.rows else None
        act = 7 if len(self.rows) > 5 else self.random.randrange(8)
        if row is None or act < 2:
            self.begin()
        elif act == 2:
            self.write(row, [self.random.randrange(2) for _ in range(self.random.randint(1, 9))])
        elif act == 3:
            fork = row.fork()
            self.rows[fork] = list(self.rows[row])
        elif act == 4:
            row.rewind(self.random.randint(0, row.length))
            del self.rows[row][row.length :]
        elif act == 5:
            self.reserve_and_list(row)
        elif act == 6:
            row.settle()
        else:
            self.tree.insert(np.array(self.rows[row], dtype=np.int64), row.pages)
            row.free()
            del self.rows[row]
        self.check()

    def reserve_and_list(self, row: Row) -> None:
        wanted = row.length + self.random.randint(0, 12)
        if row.missing(wanted) <= self.pool.available:
            row.reserve(wanted)
        first, new = row.list_pages(2 * self.groups)
        assert [*row.pages, *row.ahead][first:] == new
        assert len(row.ahead) % self.groups == 0

    def check(self) -> None:
        account = self.pool.account()
        assert account.used + account.free + account.cached == account.total == EACH * self.groups
        owned = {page for row in self.rows for page in (*row.pages, *row.ahead)}
        assert (account.used, NULL_PAGE in owned) == (len(owned), False)
        assert account.free % self.groups == account.cached % self.groups == 0
        for row, tokens in self.rows.items():
            assert len(row.pages) == self.pool.pages_for(row.length)
            for at, token in enumerate(tokens):
                for group, page in enumerate(row.pages[at // SIZE * self.groups :][: self.groups]):
                    owner, held = self.memory[page]
                    assert (owner, held[at % SIZE]) == (group, token)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_pages_of_all_groups_are_counted_shared_copied_kept_and_given_back(groups: int, seed: int) -> None:
    walk = Walk(seed, groups)
    for _ in range(1500):
        walk.step()
    for row in walk.rows:
        row.free()
    walk.tree.clear()
    account = walk.pool.account()
    assert (account.used, account.cached, walk.pool.available) == (0, 0, account.total)


def test_a_page_table_has_numbers_for_each_group() -> None:
    pool = PagePool(31, SIZE, groups=2)
    rows = [Row(pool, 0), Row(pool, 0)]
    for row, length in zip(rows, (9, 4), strict=True):
        row.grow(length)
    table = build_table(rows, [1, 4], SIZE, 3, groups=2)
    one, other = rows
    assert table.indices.tolist() == [[*one.pages[g::2], *other.pages[g::2], NULL_PAGE] for g in range(2)]
    assert table.indptr.tolist() == [0, 3, 4, 5]
    assert table.last_page_len.tolist() == [1, 4, 1]
    assert all(row.flags.c_contiguous for row in table.indices)


# ---- memory


def spec(group: int, head_dim: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(2, head_dim, 16, SIZE, torch.float32, group)


def test_layers_of_two_groups_share_memory_page_by_page() -> None:
    """The third layer shares with none."""
    layers = [spec(0), spec(1), spec(0)]
    assert sharing_memory(layers) == [[0, 1], [2]]
    assert page_bytes(layers) == 2 * page_size_bytes(spec(0))
    first, second, third = allocate_pages(layers, 5, ReleasableMemory(torch.device("cpu")))
    assert first.shape == second.shape == (5, 2, 2, SIZE, 16)
    second[3] = 7
    assert (first == 7).flatten(1).all(1).tolist() == [False, False, False, True, False]
    assert not third.any()
    assert not any(memory._is_view() for memory in (first, second, third))


def test_layers_that_leave_other_parts_of_a_page_zero_share_no_memory() -> None:
    with pytest.raises(ValueError, match=r"must have equal pages; got 0: Full.*head_dim=16.*, 1: Full.*head_dim=12"):
        sharing_memory([spec(0), spec(1, 12)])


# ---- models


@pytest.mark.usefixtures("grouped")
@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("Gemma3", "eager"),
        pytest.param("Gemma3", "Dynamo", marks=pytest.mark.whole),
        pytest.param("Gemma3", "Inductor", marks=[pytest.mark.slow, pytest.mark.whole]),
        ("GptOss", "eager"),
        pytest.param("GptOss", "Inductor", marks=[pytest.mark.slow, pytest.mark.whole]),
    ],
)
def test_tokens_are_huggingfaces_and_those_of_one_group(
    family: str, how: str, seed: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Alone and in batches, on and beside page boundaries; rows end early."""
    plain, model = pair(family, seed, "eager" if how == "eager" else "compile")
    monkeypatch.undo()
    if how == "Dynamo":  # what Inductor makes of two groups is with --whole
        request.getfixturevalue("without_inductor")
    one_group = pair(family, seed)[1]
    greedy(one_group, mixed_prompts([3], 128, seed), 2)
    monkeypatch.setattr(specs, "layer_groups", by_window)
    for lengths in ([5], [5, 19, 11, 16])[how == "Dynamo" :]:  # which traces a program for one row by itself
        inputs = mixed_prompts(lengths, 128, seed)
        expected = greedy(plain, inputs, 12)
        torch.testing.assert_close(greedy(model, inputs, 12), expected)
        assert torch.equal(greedy(one_group, inputs, 12), expected)
        early = {"eos_token_id": int(expected[0, -8]), "pad_token_id": 0}
        torch.testing.assert_close(greedy(model, inputs, 12, **early), greedy(plain, inputs, 12, **early))
    assert_two_groups(model)
    assert model.compiled.stats().recompiles == 0
    assert one_group.compiled.model_runner().pool.groups == 1
    assert_account_is_empty(model)


@pytest.mark.usefixtures("grouped", "without_inductor")
@pytest.mark.parametrize("mode", ["eager", pytest.param("compile", marks=pytest.mark.whole)])
def test_decode_that_is_planned(mode: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reference, "decode_ops", lambda self, device: None)
    plain, model = pair("Gemma3", seed, mode)
    inputs = mixed_prompts([5, 19, 11], 128, seed)
    torch.testing.assert_close(greedy(model, inputs, 20), greedy(plain, inputs, 20))
    assert_two_groups(model)
    assert_account_is_empty(model)


@pytest.mark.usefixtures("grouped")
def test_beams_fork_and_copy_pages_of_both_groups(seed: int) -> None:
    plain, model = pair("Gemma3", seed)
    inputs = mixed_prompts([6, 9], 128, seed)
    torch.testing.assert_close(greedy(model, inputs, 14, num_beams=3), greedy(plain, inputs, 14, num_beams=3))
    assert_two_groups(model)
    assert_account_is_empty(model)


def alternately(layers: Sequence[Layer]) -> list[int]:
    return [number % 2 for number in range(len(layers))]


@pytest.mark.parametrize("planned", [False, True])
def test_rows_feed_in_several_tokens(seed: int, planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "layer_groups", alternately)
    if planned:
        monkeypatch.setattr(Reference, "decode_ops", lambda self, device: None)
    plain, model = tiny_qwen3(eos_token_id=None), tiny_qwen3(eos_token_id=None)
    compiled_llm.wrap(model, mode="eager", **FEW_PAGES)
    loop = model.compiled.generate_loop()
    assert_fed(loop, plain, np.random.default_rng(seed), [3, 4, 9], 3)
    loop.close()
    assert_two_groups(model)
    assert_account_is_empty(model)


@pytest.mark.parametrize("late", [False, True])
def test_rows_that_come_and_go_at_random(seed: int, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are admitted, forked, rewound and released; each step's logits are HuggingFace's."""
    monkeypatch.setattr(specs, "layer_groups", alternately)
    monkeypatch.setattr(GenerateLoop, "asynchronous", late)
    plain, model = tiny_qwen3(eos_token_id=None), tiny_qwen3(eos_token_id=None)
    compiled_llm.wrap(model, mode="eager", **{**FEW_PAGES, "max_batch_size": 9})
    schedule = Schedule(model.compiled.generate_loop(), plain, np.random.default_rng(seed))
    for _ in range(60):
        schedule.anything()
    schedule.close()
    assert_two_groups(model)
    assert_account_is_empty(model)


@pytest.mark.usefixtures("grouped")
def test_an_engine_keeps_preempts_and_describes_pages_of_both_groups(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_FIRST_GUESS", 1)  # so that requests begin which run out of pages
    plain, model = pair("Gemma3", seed, kv_memory="80 tokens", max_batch_size=4)
    prompts = [ids.tolist() for ids in torch.randint(3, 128, (4, 23), generator=torch.Generator().manual_seed(seed))]
    with Engine(model) as engine:
        for turn in range(2):
            outputs = engine.generate(prompts, tiny_engines.greedy(20))
            for prompt, output in zip(prompts, outputs, strict=True):
                expected = greedy(plain, {"input_ids": torch.tensor([prompt])}, 20)[0, len(prompt) :]
                assert output.token_ids == expected.tolist(), turn
            account = model.compiled.stats().pages
            assert account.used + account.free + account.cached == account.total
            assert account.cached
        assert engine.stats().preemptions
        again = engine.generate([prompts[-1]], tiny_engines.greedy(4))
        assert again[0].cached_tokens == 20
        described = engine.describe()
        assert (described.requests(20), described.requests(80)) == (4, 1)
        assert "80 (40 pages of 4, float32)" in str(described)
    assert_two_groups(model)
    assert_account_is_empty(model)


@pytest.mark.usefixtures("grouped")
def test_an_engine_sleeps_and_wakes_with_as_many_pages(seed: int) -> None:
    plain, model = pair("Gemma3", seed)
    inputs = mixed_prompts([7], 128, seed)
    with Engine(model) as engine:
        engine.generate([inputs["input_ids"][0].tolist()], tiny_engines.greedy(3))
        total = model.compiled.stats().pages.total
        assert total == 2 * 500
        engine.sleep()
        engine.wake()
        engine.generate([inputs["input_ids"][0].tolist()], tiny_engines.greedy(3))
        assert model.compiled.stats().pages.total == total
    assert torch.equal(greedy(model, inputs, 9), greedy(plain, inputs, 9))


@pytest.mark.usefixtures("grouped")
def test_caches_are_read_and_huggingfaces_are_read_in(seed: int) -> None:
    plain, model = pair("Gemma3", seed)
    inputs = mixed_prompts([7, 7], 128, seed)
    words = torch.randint(3, 128, (2, 3), generator=torch.Generator().manual_seed(seed))
    ours, theirs = (greedy(own, inputs, 6, return_dict_in_generate=True) for own in (model, plain))
    for layer, wanted in zip(ours.past_key_values.layers, theirs.past_key_values.layers, strict=True):
        kept = wanted.keys.shape[2]  # HuggingFace's drop what their window has left
        torch.testing.assert_close(layer.keys[:, :, -kept:], wanted.keys, **CLOSE)
        torch.testing.assert_close(layer.values[:, :, -kept:], wanted.values, **CLOSE)
    following = [greedy(own, next_turn(inputs, out, words), 6) for own, out in ((model, ours), (plain, theirs))]
    assert torch.equal(*following)
    answers: list[Tensor] = []
    for own in (plain, model):
        cache = DynamicCache(config=own.config)
        out = greedy(own, {"input_ids": inputs["input_ids"]}, 5, past_key_values=cache)
        answers.append(greedy(own, {"input_ids": torch.cat([out, words], dim=1)}, 5, past_key_values=cache))
    assert torch.equal(*answers)
    assert "original" not in model.compiled.stats().generate_calls
