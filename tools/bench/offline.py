"""Many requests at once, each with lengths of its own: by default exactly those of nano-vllm's benchmark.

python tools/bench/offline.py --model qwen3-0.6b --runs 3
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import typer
from common import AlsoFp8, Bench, Commit, Contenders, DeviceName, Json, Model, Vllm, bench
from engines import PAGE_SIZE, EngineContender, Served, engines_of
from models import vocabulary_of

from compiled_llm.commands.bench.commands import DecodingOption
from compiled_llm.commands.bench.load import VOCABULARY, Asked, Lengths
from compiled_llm.commands.bench.timing import Spread, Workload
from compiled_llm.explaining.profile.kernels import KernelProfiler, busy_us

TEMPERATURE = 0.6
STRIDE = 101
"""What is added to each token of a pass, so that no prefix cache knows it from the pass before."""
PROFILED, BEFORE = 1.0, 0.3
"""Seconds under the profiler, at most; and the part of a pass before it, which is also the most that is profiled."""
Pass = Callable[[], Served]


def drawn(
    requests: int, prompts: Lengths, answers: Lengths, vocabulary: int, number: int, system_prompt: int = 0
) -> list[Asked]:
    """The requests of pass `number`: equal lengths in each, and other tokens; in pass 0 those of nano-vllm.

    All prompts begin with ``system_prompt`` tokens.
    """
    generator = random.Random(0)
    tokens = [[generator.randint(0, VOCABULARY) for _ in range(generator.randint(*prompts))] for _ in range(requests)]
    lengths = [generator.randint(*answers) for _ in range(requests)]
    shared = [generator.randint(0, VOCABULARY) for _ in range(system_prompt)]
    shifted = [[(token + number * STRIDE) % vocabulary for token in shared + prompt] for prompt in tokens]
    return [Asked(prompt, new) for prompt, new in zip(shifted, lengths, strict=True)]


def pages_of(kv_memory: str, asked: Sequence[Asked]) -> int:
    """The pages of a share of the load, such as 0.75x of all that requests take at once."""
    try:
        share = float(kv_memory.removesuffix("x") if kv_memory.endswith("x") else "")
    except ValueError:
        raise SystemExit(f"--kv-memory={kv_memory}: give a share of the load, such as 0.75x") from None
    return math.ceil(share * sum(-(-(len(one.prompt) + one.new) // PAGE_SIZE) for one in asked))


def busy_share(one_pass: Pass, seconds: float, run: Bench) -> float:
    """How much of a stretch in the middle of one more pass any kernel ran."""
    with KernelProfiler(run.setup.device) as profiler, ThreadPoolExecutor(1) as another:
        running = another.submit(one_pass)
        time.sleep(BEFORE * seconds)
        profiler.start()
        time.sleep(min(PROFILED, BEFORE * seconds))
        profiler.stop()
        running.result()
    launches = profiler.launches
    begin, end = min(launch.start for launch in launches), max(launch.end for launch in launches)
    return busy_us(launches) / (end - begin)


def result_of(
    name: str, workload: str, asked: Sequence[Asked], served: Sequence[Served], ready: float
) -> dict[str, Any]:
    prompt_tokens, new_tokens = sum(len(one.prompt) for one in asked), sum(one.new for one in asked)
    seconds = [one.seconds for one in served]
    figures = {
        "tokens_per_s": Spread.of_rates(new_tokens / one for one in seconds)._asdict(),
        "prompt_tokens_per_s": Spread.of_rates(prompt_tokens / one for one in seconds)._asdict(),
        "seconds": Spread.of_times(seconds)._asdict(),
    }
    return {
        "contender": name,
        "workload": workload,
        "requests": len(asked),
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "seconds": seconds,
        "busy": None,
        "ready_s": ready,
        "figures": figures,
        "counts": {count: statistics.median(one.counts[count] for one in served) for count in served[0].counts},
    }


def main(
    model: Model = "qwen3-0.6b",
    requests: Annotated[int, typer.Option(min=1, help="How many, all at once.")] = 256,
    prompts: Annotated[str, typer.Option(help="Lengths of prompts, drawn uniformly, in tokens.")] = "100-1024",
    answers: Annotated[str, typer.Option(help="Lengths of answers, likewise.")] = "100-1024",
    system_prompt: Annotated[int, typer.Option(min=0, help="Tokens that all prompts begin with, before these.")] = 0,
    cascade: Annotated[bool, typer.Option("--cascade", help="Also ours with cascade off, vLLM with it on.")] = False,
    kv_memory: Annotated[str, typer.Option(help="0.75x: pages for three quarters of the load; else enough.")] = "",
    kv_dtype: AlsoFp8 = None,
    decoding: Annotated[DecodingOption, typer.Option(help="sampled: temperature 0.6.")] = DecodingOption.both,
    contenders: Contenders = "compiled-llm:engine,vllm",
    runs: Annotated[int, typer.Option(min=1, help="Timed passes, after one that is not.")] = 3,
    device: DeviceName = "auto",
    vllm: Vllm = "",
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Measure how fast engines answer many requests that come at once."""
    lengths = Lengths.parse("--prompts", prompts), Lengths.parse("--answers", answers)
    bounds = Workload(requests, system_prompt + lengths[0].most, max(2, lengths[1].most))
    begun = f"{system_prompt:,} shared and {lengths[0]}" if system_prompt else str(lengths[0])
    pages = pages_of(kv_memory, drawn(requests, *lengths, VOCABULARY, 0, system_prompt)) if kv_memory else None
    chosen = engines_of(contenders, vllm, False, cascade, kv_dtype is not None, pages)
    with bench(model, device, [bounds], json, commit) as run:
        vocabulary = vocabulary_of(model)

        def measure(contender: EngineContender) -> None:
            numbers, begin = itertools.count(), time.perf_counter()
            with contender.engine(run.setup) as session:
                prepared, results, passes = time.perf_counter() - begin, [], []
                for temperature in (TEMPERATURE * sampled for sampled in decoding.ways):
                    decoded = f"temperature {temperature:g}" if temperature else "greedy"
                    said = f"{requests} requests, prompts of {begun} tokens, answers of {lengths[1]}, {decoded}"
                    said += f", pages for {kv_memory[:-1]} of them" if kv_memory else ""
                    asked = [
                        drawn(requests, *lengths, vocabulary, next(numbers), system_prompt) for _ in range(runs + 1)
                    ]
                    run.setup.log(f"{contender.name}, {said}")
                    start = time.perf_counter()
                    session.all(asked[-1], temperature)
                    ready = prepared + time.perf_counter() - start
                    served = [session.all(one, temperature) for one in asked[:-1]]
                    results.append(result_of(contender.name, said, asked[0], served, ready))
                    passes.append((drawn(requests, *lengths, vocabulary, next(numbers), system_prompt), temperature))
                    run.add("offline", results[-1])
                if session.profiled and run.is_cuda:  # after all that is timed: a profiler leaves traces
                    for result, (asked_more, temperature) in zip(results, passes, strict=True):
                        seconds = result["figures"]["seconds"]["median"]
                        one_pass = lambda asked=asked_more, at=temperature: session.all(asked, at)  # noqa: E731
                        result["busy"] = busy_share(one_pass, seconds, run)

        run.each(chosen, measure)


if __name__ == "__main__":
    typer.run(main)
