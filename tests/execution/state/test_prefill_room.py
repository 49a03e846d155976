"""Page tables and plans have room for every prefill, in one piece or many, also on a CPU that captures as CUDA does."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import compiled_llm
from compiled_llm.execution.batch import Extension
from compiled_llm.execution.plans import Planner
from compiled_llm.execution.prefill.packing import chunks
from compiled_llm.execution.state.prefill_room import PrefillRoom
from compiled_llm.kvcache.table import HostTable, Span
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.usefixtures("one_thread")

Sizes = tuple[int, int, int, int]
"""Positions, rows, tokens of a page, tokens of a chunk."""

SEEN_TO_FAIL: list[Sizes] = [(4096, 1, 16, 8192), (2048, 1, 16, 8192), (1024, 2, 16, 8192), (8, 1, 16, 8192)]
EDGES: list[Sizes] = [(1, 1, 1, 1), (1, 3, 16, 1), (2, 1, 1, 8192), (2, 9, 64, 2), (17, 1, 16, 16), (300, 1, 512, 40)]


def drawn(count: int) -> list[Sizes]:
    """Always the same ones, or tests would change their names."""
    draw = random.Random(0)
    return [
        (draw.randint(1, 600), draw.choice([1, 1, 2, 3, 5, 8, 9]), draw.choice([1, 3, 4, 16, 64]), draw.randint(1, 700))
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    "sizes", [*SEEN_TO_FAIL, *EDGES, *(pytest.param(sizes, marks=pytest.mark.whole) for sizes in drawn(20))], ids=str
)
@pytest.mark.either("cuda_graph")
@pytest.mark.parametrize("cuda_graph", [False, True], ids=["as they come", "captured"])
def test_every_prefill_fits_and_gives_huggingfaces_tokens(
    sizes: Sizes, cuda_graph: bool, seed: int, monkeypatch
) -> None:
    positions, rows, page_size, chunk = sizes
    if cuda_graph:
        let_a_cpu_capture(monkeypatch)
    most = noted_room(monkeypatch)
    options: dict[str, Any] = {"page_size": page_size, "max_batch_size": rows, "prefill_tokens": chunk}
    reference, model = (
        tiny_qwen3(num_hidden_layers=1, eos_token_id=None, max_position_embeddings=positions) for _ in range(2)
    )
    compiled_llm.wrap(
        model, mode="eager", kv_memory=f"{rows * (positions + page_size)} tokens", progress=False, **options
    )
    model.compiled.warmup()
    lengths = [positions] * rows, [positions], [1] * rows, [max(1, positions // 2)] * rows
    for prompts in lengths:
        inputs, new = mixed_prompts(list(prompts), 128, seed), min(3, positions - max(prompts))
        if new:
            torch.testing.assert_close(greedy(model, inputs, new), greedy(reference, inputs, new))
        with torch.no_grad():
            logits = [wrapped(**inputs, use_cache=False, logits_to_keep=1).logits for wrapped in (model, reference)]
        torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    assert most
    assert_account_is_empty(model)


def noted_room(monkeypatch: pytest.MonkeyPatch) -> list[PrefillRoom]:
    """Note what each prefill takes, and check that plans are allocated for that many rows and tokens."""
    taken: list[PrefillRoom] = []
    room: list[PrefillRoom] = []
    own_init, own_plan = Planner.__init__, Planner.plan_prefill

    def init(self: Planner, *args: Any, **options: Any) -> None:
        room.append(options["room"])
        own_init(self, *args, **options)

    def plan(self: Planner, table: HostTable, *shape: Any) -> None:
        taken.append(PrefillRoom(int(table.qo_indptr[-1]), len(table.last_page_len), len(table.indices)))
        assert all(needed <= most for needed, most in zip(taken[-1], room[-1], strict=True)), (taken[-1], room[-1])
        own_plan(self, table, *shape)

    monkeypatch.setattr(Planner, "__init__", init)
    monkeypatch.setattr(Planner, "plan_prefill", plan)
    return taken


# ---- pieces of long prompts


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
def test_pieces_do_not_recompile(seed):
    wrapped = compiled_llm.wrap(tiny_qwen3(num_hidden_layers=1), page_size=4, prefill_tokens=9, progress=False)
    wrapped.compiled.warmup([1, 4])
    with torch.compiler.set_stance("fail_on_recompile"):
        for lengths in ([9], [10], [1], [27, 4], [30, 1, 1]):
            greedy(wrapped, mixed_prompts(lengths, 128, seed), 4)
    assert wrapped.compiled.graphs["prefill"] == 1


def test_pieces_hold_every_token_once_and_no_more_than_the_budget(seed):
    lengths = [5, 1, 12, 3]
    batch = []
    for number, length in enumerate(lengths):
        ids = np.arange(length) + 100 * number
        batch.append(Extension(Span(list(range(1, 9)), 10 + length), ids, ids))
    pieces = list(chunks(batch, 6, 4))
    assert [sum(len(part.ids) for part in chunk) for chunk in pieces] == [6, 6, 6, 3]
    assert np.array_equal(
        np.concatenate([part.ids for chunk in pieces for part in chunk]), np.concatenate([row.ids for row in batch])
    )
    for chunk in pieces:
        for part in chunk:
            whole = batch[part.ids[0] // 100]
            assert part.row.exact_length == whole.row.exact_length - whole.ids[-1] + part.ids[-1]
            assert len(part.row.pages) == -(-part.row.exact_length // 4) or part.row is whole.row
