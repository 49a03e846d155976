"""Packed weights on a GPU: logits as exact as their libraries', and steps in one CUDA graph that wait for nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import compiled_llm
from compiled_llm import Engine, SamplingParams
from support.execution.launches import assert_steps_return_while_the_device_sleeps, launches_of_steps
from support.execution.twins import Twins, assert_parity_together, forced_logits, parity
from support.gpu import needs_cuda
from support.packed_twins import PACKS, packed_twins
from support.parity import assert_account_is_empty

pytestmark = [pytest.mark.gpu, needs_cuda]

SIZES: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8}
MOST = 64
STEPS = 200


@pytest.fixture(scope="module", params=PACKS)
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    made = packed_twins(request.param, request.config.getoption("seed"), SIZES, max_batch_size=MOST)
    made.wrapped.compiled.warmup([1, 8, MOST])
    yield made
    compiled_llm.unwrap(made.wrapped)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("rows", [1, 8, MOST])
def test_logits_are_as_exact_as_the_library_s(twins: Twins, rows: int, seed: int) -> None:
    lengths = [1 + (number * 37 + 20) % 100 for number in range(rows)]
    assert_parity_together(parity(twins, lengths, STEPS, seed + rows))
    stats = twins.wrapped.compiled.stats()
    assert (stats.graph_breaks, stats.recompiles, stats.cudagraph_skips) == (0, 0, 0)


def test_the_same_steps_have_the_same_bits(twins: Twins, seed: int) -> None:
    vocabulary = twins.wrapped.config.vocab_size
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(vocabulary, (length,), generator=generator) for length in (5, 33, 90)]
    forced = torch.randint(vocabulary, (40, len(prompts)), generator=generator).to(twins.wrapped.device)
    first = forced_logits(twins.wrapped, prompts, forced)
    for _ in range(3):
        assert torch.equal(forced_logits(twins.wrapped, prompts, forced), first)


def loop_of(twins: Twins, rows: int) -> Any:
    """Rows that have been prefilled, and have decoded some tokens."""
    loop = twins.wrapped.compiled.generate_loop()
    for number in range(rows):
        loop.admit(np.full(3 + number % 20, 7), 120)
    for _ in range(4):
        loop.step()
    return loop


@pytest.mark.unchecked_pages
@pytest.mark.parametrize("rows", [1, 8, MOST])
def test_a_step_is_one_cuda_graph_and_waits_for_nothing(twins: Twins, rows: int) -> None:
    loop = loop_of(twins, rows)
    launches = launches_of_steps(twins.wrapped, loop, 4)
    assert launches in ([], ["cudaGraphLaunch"] * 4)
    loop.close()
    for _ in range(2):  # memory that is pinned for the first time may wait for the device
        loop = loop_of(twins, rows)
        for _ in range(40):
            loop.step()
        loop.close()
    loop = loop_of(twins, rows)
    assert_steps_return_while_the_device_sleeps(loop, 12)
    loop.close()
    assert twins.wrapped.compiled.stats().recompiles == 0
    assert_account_is_empty(twins.wrapped)


def test_weights_go_to_host_memory_and_come_back(twins: Twins) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    prompts = [[5, 6, 7, 8] * 9, [9, 10, 11] * 30, [3, 4]]
    with Engine(twins.wrapped, tokenizer=None, max_num_seqs=4) as engine:
        answers = [output.outputs[0].token_ids for output in engine.generate(prompts, params)]
        for _ in range(2):
            engine.reset_prefix_cache()
            taken = torch.cuda.memory_allocated()
            engine.sleep(weights=True)
            assert torch.cuda.memory_allocated() < taken
            engine.wake()
            assert [output.outputs[0].token_ids for output in engine.generate(prompts, params)] == answers
    assert twins.wrapped.compiled.stats().recompiles == 0
