"""Thousands of calls from eight threads: nothing hangs, nothing leaks, and afterwards all is as it was."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import compiled_llm
from compiled_llm import Engine
from support.engine.soak import FAMILY, Soak
from support.huggingface.vision import make
from support.in_threads import start
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

FEW, MANY = 60, 6000
PATIENCE = 500.0
GROWTH = 32 * 2**20
"""Bytes that host memory may grow by in the last two thirds of many calls: what the allocator keeps in fragments."""


class Memory(NamedTuple):
    """Bytes that are taken while the model is asleep; the last three, parts of the host's, tell where it grows."""

    host: int
    device: int
    malloced: int
    private: int  # pages of no file, malloc's among them, as the driver's
    pinned: int


class _MallInfo(ctypes.Structure):
    """What ``mallinfo2`` returns, as glibc's `malloc.h` has it."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "free", "keepcost")
    )


def memory(engine: Engine) -> Memory:
    """Return what is taken while the model is asleep.

    Awake, it has CUDA graphs, each with memory of the host's, and how many is up to the calls that happened to come.
    """
    gc.collect()
    engine.sleep(graphs=True)
    libc, on_gpu = ctypes.CDLL(None), torch.cuda.is_available()
    libc.malloc_trim(0)
    libc.mallinfo2.restype = _MallInfo
    info = libc.mallinfo2()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    host, private = (int(status[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon"))
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if on_gpu else 0
    if on_gpu:
        torch._C._cuda_clearCublasWorkspaces()  # one for each handle and stream that ever met
    device = torch.cuda.memory_allocated() if on_gpu else 0
    engine.wake()
    return Memory(host, device, info.used + info.hblkhd, private, pinned)


@pytest.fixture
def without_cudnn_attention() -> Iterator[None]:
    """While a model sleeps, HuggingFace's own attention runs. Of cuDNN's, torch keeps a plan for each shape for good.

    Each takes some hundred KiB of host memory, for each thread anew; shapes are drawn here, so there is no end of them.
    """
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    yield
    torch.backends.cuda.enable_cudnn_sdp(enabled)


@pytest.mark.slow
@pytest.mark.usefixtures("without_cudnn_attention")
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
    both = plain, make(FAMILY, head_dim=64 if on_gpu else 16)
    if on_gpu:
        both = both[0].to("cuda", torch.bfloat16), both[1].to("cuda", torch.bfloat16)
    options = {"kv_memory": "4096 tokens", "page_size": 16, "max_batch_size": 8, "progress": False}
    model, seeing = (compiled_llm.wrap(each, mode=mode, **options) for each in both)
    prompt = {name: tensor.to(model.device) for name, tensor in mixed_prompts([27], 128, seed).items()}
    expected, threads = greedy(model, prompt, 12), threading.active_count()
    soak = Soak(model, tmp_path, seeing)
    soak.sleep_through_calls(seed)
    start(lambda: soak.run(calls // 3, seed)).result(PATIENCE)
    before, captures = memory(soak.engines[0]), model.compiled.cuda_graphs.captures
    start(lambda: soak.run(calls - calls // 3, seed + 1)).result(PATIENCE)
    after = memory(soak.engines[0])
    grown = Memory(*(now - then for now, then in zip(after, before, strict=True)))
    captures = model.compiled.cuda_graphs.captures - captures  # the driver keeps host memory for each, perhaps for good
    print(f"seed {seed}: {dict(soak.counts)}; grown by {grown}, {captures} CUDA graphs captured meanwhile")
    assert greedy(model, prompt, 12).equal(expected)
    soak.engines[0].reset_prefix_cache()
    assert_account_is_empty(model)
    assert_account_is_empty(seeing)
    soak.close()
    assert threading.active_count() <= threads + 1  # of those that wait for the next use, one is kept
    if calls == MANY:
        assert grown.host < GROWTH
    assert grown.device <= 2**20
