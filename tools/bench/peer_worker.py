"""vLLM at the end of a pipe, as `processes.py` says; it runs in its own environment, so it imports nothing else.

With `"streams": true` vLLM's `AsyncLLM`, which its server runs on, answers requests when they arrive (`arrivals`), and
`times` are added: when each token of each request came, in seconds from the begin.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import IO, Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]
Say = Callable[..., None]


def load_vllm(job: dict[str, Any], say: Say) -> tuple[Answer, Callable[[], object]]:
    """vLLM's `LLM`, as it configures itself, with its engine in this process."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    vllm = imported(say)
    engine = vllm.LLM(**vllm_settings(job))

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        parameters = [vllm_parameters(vllm, new, asked["sampling"]) for new in asked["new"]]
        begin = time.perf_counter()
        outputs = engine.generate(prompts, parameters, use_tqdm=False)
        seconds = time.perf_counter() - begin
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        return {"seconds": seconds, "lengths": lengths, "cached": [output.num_cached_tokens for output in outputs]}

    return answer, lambda: None


def load_streams(job: dict[str, Any], say: Say) -> tuple[Answer, Callable[[], object]]:
    """vLLM's `AsyncLLM` with the defaults of its server."""
    streams = Streams(job, say)
    return streams.answer, streams.engine.shutdown


class Streams:
    """An asynchronous engine, and the loop that its tasks belong to."""

    def __init__(self, job: dict[str, Any], say: Say) -> None:
        self._vllm = imported(say)
        self._delta = importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        self.engine = self._loop.run_until_complete(self._load(vllm_settings(job)))

    async def _load(self, settings: dict[str, Any]) -> Any:
        arguments = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs(**settings, disable_log_stats=True)
        server = importlib.import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
        kind = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
        return kind.from_engine_args(arguments, usage_context=server)

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        times, cached = zip(*self._loop.run_until_complete(self._all(asked)), strict=True)
        return {
            "seconds": max(one[-1] for one in times),
            "lengths": [len(one) for one in times],
            "cached": cached,
            "times": times,
        }

    async def _all(self, asked: dict[str, Any]) -> list[tuple[list[float], int]]:
        begin = time.perf_counter()
        parameters = [vllm_parameters(self._vllm, new, asked["sampling"], self._delta) for new in asked["new"]]
        requests = zip(asked["prompts"], parameters, asked["arrivals"], strict=True)
        return await asyncio.gather(*(self._one(begin, *request) for request in requests))

    async def _one(self, begin: float, prompt: list[int], parameters: Any, arrival: float) -> tuple[list[float], int]:
        await asyncio.sleep(begin + arrival - time.perf_counter())
        times: list[float] = []
        cached = 0
        name = str(next(self._numbers))
        async for output in self.engine.generate({"prompt_token_ids": prompt}, parameters, name):
            times += [time.perf_counter() - begin] * len(output.outputs[0].token_ids)
            cached = max(cached, output.num_cached_tokens or 0)
        return times, cached


def imported(say: Say) -> Any:
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    vllm = importlib.import_module("vllm")
    say(mark="imported", versions={"vllm": vllm.__version__})
    return vllm


def vllm_settings(job: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": job["model"],
        "load_format": "dummy" if job["random"] else "auto",
        "skip_tokenizer_init": True,
        "dtype": job["dtype"],
        "max_model_len": job["length"],
        "gpu_memory_utilization": job["gpu_share"],
        "seed": 0,
        **({"disable_cascade_attn": False} if job["cascade"] else {}),
        **({"num_gpu_blocks_override": job["pages"]} if job["pages"] else {}),
        **({"kv_cache_dtype": "fp8"} if job["fp8"] else {}),
        **({"speculative_config": job["speculation"]} if job["speculation"] else {}),
    }


def vllm_parameters(vllm: Any, new: int, sampling: dict[str, Any], kind: Any = None) -> Any:
    """An answer of that length, greedy or sampled; `kind` of output, None for vLLM's own choice."""
    more = {} if kind is None else {"output_kind": kind}
    return vllm.SamplingParams(**sampling, max_tokens=new, ignore_eos=True, detokenize=False, **more)


def main() -> None:
    """Load the engine that the job names, then answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines log to stdout

    def say(**message: Any) -> None:
        send(answers, message)

    job = json.loads(sys.argv[1])
    answer, close = (load_streams if job["streams"] else load_vllm)(job, say)
    say(mark="loaded")
    for line in sys.stdin:
        send(answers, answer(json.loads(line)))
    close()
    sys.stderr.flush()
    os._exit(0)  # an engine's threads would keep this process alive


def send(answers: IO[str], message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
