"""Page tables and plans have room for every prefill, on a CPU that captures as CUDA does."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import compiled_llm
from compiled_llm.execution.plans import Planner
from compiled_llm.execution.state.prefill_room import PrefillRoom
from compiled_llm.kvcache.table import HostTable
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
