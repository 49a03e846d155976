"""Run as a program: starts with a folder of artifacts, and writes as JSON what it has generated and built."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

import compiled_llm
from compiled_llm.compat.torch.triton import kernels_built

PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13]]
NEW_TOKENS = 6


def answers(model: Any, *ways: str) -> dict[str, list[list[int]]]:
    """What a model answers to one prompt, to two, and to embeddings, or in some of these ways."""
    one, two = torch.tensor(PROMPTS[:1]), torch.tensor([PROMPTS[0][:3], PROMPTS[1]])
    one, two = one.to(model.device), two.to(model.device)
    prompts = {
        "one": {"input_ids": one, "attention_mask": torch.ones_like(one)},
        "two": {"input_ids": two, "attention_mask": torch.ones_like(two)},
        "embeddings": {"inputs_embeds": model.get_input_embeddings()(one), "attention_mask": torch.ones_like(one)},
    }
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    return {way: model.generate(**prompts[way], **options).tolist() for way in ways or prompts}


def main(model_folder: str, artifacts: str, device: str, dtype: str) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model_folder, dtype=getattr(torch, dtype)).to(device)
    environment = dict(os.environ)
    model = compiled_llm.wrap(loaded, artifacts=artifacts, progress=False)
    said = answers(model)
    stats = model.compiled.stats()
    changed = {name for name in {*os.environ, *environment} if os.environ.get(name) != environment.get(name)}
    result = {
        "answers": said,
        "graphs": stats.graphs,
        "programs": stats.programs,
        "tracing_seconds": stats.tracing_seconds,
        "builds": stats.builds,
        "built by Triton": kernels_built(),
        "compiled": {
            "Inductor": counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"],
            "AOTAutograd": counters["aot_autograd"]["autograd_cache_miss"],
        },
        "changed variables": sorted(changed),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
