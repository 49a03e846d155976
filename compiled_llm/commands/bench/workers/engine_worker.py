"""vLLM or SGLang at the end of a pipe; see `compiled_llm.commands.bench.peer`.

This file runs in the engine's own environment, so it imports nothing of compiled_llm.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import IO, Any, NamedTuple

Prompts = list[list[int]]


class Engine(NamedTuple):
    """An engine with its model.

    Attributes:
        generate: takes prompts, how many new tokens, and how to sample (None: greedy); returns how many came.
        close: ends processes that it started.
    """

    generate: Callable[[Prompts, int, dict[str, Any] | None], int]
    close: Callable[[], object]


def load_vllm(job: dict[str, Any]) -> Engine:
    """Load the model as vLLM does by itself, with its engine in this process."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    vllm = importlib.import_module("vllm")
    _mark("imported", vllm=vllm.__version__)
    engine = vllm.LLM(
        model=job["model"],
        load_format="dummy" if job["random"] else "auto",
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        max_model_len=job["length"],
        gpu_memory_utilization=job["gpu_share"],
        seed=0,
    )

    def generate(prompts: Prompts, new: int, sampled: dict[str, Any] | None) -> int:
        settings = sampled or {"temperature": 0.0}
        parameters = vllm.SamplingParams(**settings, max_tokens=new, ignore_eos=True, detokenize=False)
        ids = [{"prompt_token_ids": prompt} for prompt in prompts]
        return sum(len(out.outputs[0].token_ids) for out in engine.generate(ids, parameters, use_tqdm=False))

    return Engine(generate, lambda: None)


def load_sglang(job: dict[str, Any]) -> Engine:
    """Load the model as SGLang does by itself."""
    sglang = importlib.import_module("sglang")
    _mark("imported", sglang=sglang.__version__)
    engine = sglang.Engine(
        model_path=job["model"],
        load_format="dummy" if job["random"] else "auto",
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        context_length=job["length"],
        mem_fraction_static=job["gpu_share"],
        random_seed=0,
    )

    def generate(prompts: Prompts, new: int, sampled: dict[str, Any] | None) -> int:
        settings = {**(sampled or {"temperature": 0.0}), "max_new_tokens": new, "ignore_eos": True}
        return sum(len(out["output_ids"]) for out in engine.generate(input_ids=prompts, sampling_params=settings))

    return Engine(generate, engine.shutdown)


ENGINES = {"vllm": load_vllm, "sglang": load_sglang}


def answer(engine: Engine, request: dict[str, Any], vocabulary: int) -> dict[str, float]:
    """Run one request: a call for one token, then the whole one with prompts that no cache has seen."""
    sampled = request["sampled"]
    first_prompts, prompts = prompts_of(request, vocabulary, "first"), prompts_of(request, vocabulary, "whole")
    begin = time.perf_counter()
    engine.generate(first_prompts, 1, sampled)
    first = time.perf_counter() - begin
    _mark("first token")
    begin = time.perf_counter()
    tokens = engine.generate(prompts, request["new"], sampled)
    return {"first": first, "total": time.perf_counter() - begin, "tokens": tokens}


def prompts_of(request: dict[str, Any], vocabulary: int, call: str) -> Prompts:
    """Return random prompts, different for each request and call."""
    generator = random.Random(f"{request['batch']} {request['prompt']} {request['number']} {call}")
    return [[generator.randrange(1, vocabulary) for _ in range(request["prompt"])] for _ in range(request["batch"])]


def _mark(name: str, **versions: str) -> None:
    _send({"mark": name, "versions": versions})


def _send(message: dict[str, Any]) -> None:
    assert _answers is not None
    _answers.write(json.dumps(message) + "\n")
    _answers.flush()


_answers: IO[str] | None = None


def main() -> None:
    """Load the engine that the job names, then answer requests until stdin ends."""
    global _answers
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines log to stdout
    job = json.loads(sys.argv[1])
    engine = ENGINES[job["engine"]](job)
    _mark("loaded")
    for line in sys.stdin:
        _send(answer(engine, json.loads(line), job["vocabulary"]))
    engine.close()
    sys.stderr.flush()
    os._exit(0)  # an engine's threads would keep this process alive


if __name__ == "__main__":
    main()
