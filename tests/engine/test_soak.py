"""Thousands of calls from eight threads: nothing hangs, nothing leaks, and afterwards all is as it was."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import compiled_llm
from compiled_llm import Engine
from support.engine.soak import Soak
from support.in_threads import start
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

FEW, MANY = 120, 6000
PATIENCE = 500.0
GROWTH = 32 * 2**20
"""Bytes that host memory may grow by in the last two thirds of many calls: what the allocator keeps in fragments."""


def memory(engine: Engine) -> tuple[int, int]:
    """Return the bytes of host and device that are taken while the model is asleep.

    Awake, it has CUDA graphs, each with memory of the host's, and how many is up to the calls that happened to come.
    """
    gc.collect()
    engine.sleep()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    device = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    engine.wake()
    return pages * os.sysconf("SC_PAGE_SIZE"), device


@pytest.mark.slow
@pytest.mark.parametrize(
    ("calls", "mode"),
    [
        (FEW, "eager"),
        *(
            pytest.param(MANY, mode, marks=[pytest.mark.whole, pytest.mark.timeout(1800)])
            for mode in ("eager", "compile")
        ),
        pytest.param(MANY, "cuda-graphs", marks=[pytest.mark.gpu, pytest.mark.timeout(600)], id="6000 on a GPU"),
    ],
)
def test_memory_stays_flat_and_every_page_comes_back(calls: int, mode: Any, tmp_path: Path, seed: int) -> None:
    on_gpu = mode == "cuda-graphs"
    plain = tiny_qwen3(eos_token_id=None, head_dim=64 if on_gpu else 16)
    plain.save_pretrained(tmp_path)
    if on_gpu:
        plain = plain.to("cuda", torch.bfloat16)
    options = {"kv_memory": "4096 tokens", "page_size": 16, "max_batch_size": 8, "progress": False}
    model = compiled_llm.wrap(plain, mode=mode, **options)
    prompt = {name: tensor.to(model.device) for name, tensor in mixed_prompts([27], 128, seed).items()}
    expected, threads = greedy(model, prompt, 12), threading.active_count()
    soak = Soak(model, tmp_path)
    soak.sleep_through_calls(seed)
    start(lambda: soak.run(calls // 3, seed)).result(PATIENCE)
    host, device = memory(soak.engines[0])
    start(lambda: soak.run(calls - calls // 3, seed + 1)).result(PATIENCE)
    after = memory(soak.engines[0])
    grown = after[0] - host, after[1] - device
    print(f"seed {seed}: {dict(soak.counts)}; grown by {grown} bytes of host and device memory")
    assert greedy(model, prompt, 12).equal(expected)
    soak.engines[0].reset_prefix_cache()
    assert_account_is_empty(model)
    soak.close()
    assert threading.active_count() <= threads + 1  # of those that wait for the next use, one is kept
    if calls == MANY:
        assert grown[0] < GROWTH
    assert grown[1] <= 2**20
