"""Run as a program: one first use of a wrapped model, in a thread that is not the main one; writes tokens as JSON.

The main thread loads nothing and calls nothing. Afterwards it uses CUDA graphs of its own, as before.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

import compiled_llm
from support.in_threads import in_thread
from support.tiny_models import tiny_qwen3

PROMPT = [5, 6, 7, 8, 9]
NEW_TOKENS = 6
POOL = 8
PATIENCE = 500.0
"""Seconds; on a fresh machine kernels are compiled first."""

Use = Callable[[Any], list[list[int]]]


def generated(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    return out[0, len(PROMPT) :].tolist()


def forwarded(model: Any) -> list[int]:
    """Greedy tokens, each by one call of ``forward``."""
    ids: Tensor = torch.tensor([PROMPT], device=model.device)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(dim=-1)], dim=1)
    return ids[0, len(PROMPT) :].tolist()


def warmed_up(model: Any) -> list[list[int]]:
    model.compiled.warmup([1])
    return [generated(model)]


def by_an_engine(model: Any) -> list[list[int]]:
    with compiled_llm.Engine(model) as engine:
        (output,) = engine.generate([PROMPT], compiled_llm.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS))
    return [list(output.outputs[0].token_ids)]


def in_a_pool(model: Any) -> list[list[int]]:
    with ThreadPoolExecutor(POOL) as pool:
        return list(pool.map(generated, [model] * POOL))


USES: dict[str, Use] = {
    "generate": lambda model: [generated(model)],
    "forward": lambda model: [forwarded(model)],
    "warmup": warmed_up,
    "engine": by_an_engine,
    "asyncio.to_thread": lambda model: [asyncio.run(asyncio.to_thread(generated, model))],
    "a pool of 8": in_a_pool,
}


def a_users_own_graphs_work() -> bool:
    """Whether the main thread's own compiled function gets CUDA graphs and right results."""

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def double(x: Tensor) -> Tensor:
        return 2 * x

    results = []
    for number in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        results.append(double(torch.full((8,), float(number), device="cuda")).tolist() == [2.0 * number] * 8)
    return all(results)


def main(mode: str, use: str, device: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    options: dict[str, Any] = {"page_size": 16, "kv_memory": "4096 tokens", "max_batch_size": POOL, "progress": False}

    def first_use() -> list[list[int]]:
        model = tiny_qwen3(eos_token_id=None, head_dim=64).to(device=device, dtype=dtype)
        return USES[use](compiled_llm.wrap(model, mode=mode, **options))

    tokens = in_thread(first_use, patience=PATIENCE)
    # Before torch 2.13 the thread that first imports cudagraph trees keeps them; in this mode that is the one above.
    kept = device == "cuda" and (mode != "reduce-overhead" or torch.__version__ >= "2.13")
    print(json.dumps({"tokens": tokens, "own graphs": a_users_own_graphs_work() if kept else True}))


if __name__ == "__main__":
    main(*sys.argv[1:])
