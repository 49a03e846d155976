"""Requests that arrive at random at several rates, and how long each waits: our engine in process, vLLM's `AsyncLLM`.

python tools/bench/online.py --model qwen3-0.6b --rates 4,16,64 --seconds 20
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer
from common import AlsoFp8, Commit, Contenders, DeviceName, Json, Model, Vllm, bench, integers
from engines import EngineContender, engines_of
from models import vocabulary_of

from compiled_llm.commands.bench.load import Lengths, Load, measure_all
from compiled_llm.commands.bench.timing import Workload


def main(
    model: Model = "qwen3-0.6b",
    rates: Annotated[str, typer.Option(help="Requests that arrive in a second, on average.")] = "4,16,64",
    seconds: Annotated[float, typer.Option(min=0.1, help="How long they arrive, at each rate.")] = 20.0,
    prompts: Annotated[str, typer.Option(help="Lengths of prompts, drawn uniformly, in tokens.")] = "64-512",
    answers: Annotated[str, typer.Option(help="Lengths of answers, likewise.")] = "32-256",
    system_prompt: Annotated[int, typer.Option(min=0, help="Tokens that all prompts begin with, before these.")] = 0,
    cascade: Annotated[bool, typer.Option("--cascade", help="Also ours with cascade off, vLLM with it on.")] = False,
    kv_dtype: AlsoFp8 = None,
    max_step_ms: Annotated[str, typer.Option(help="Of our engine: how long a step may take, auto or none.")] = "auto",
    contenders: Contenders = "compiled-llm:engine,vllm",
    runs: Annotated[int, typer.Option(min=1, help="Passes, whose times are put together.")] = 1,
    device: DeviceName = "auto",
    vllm: Vllm = "",
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Measure how long requests that arrive at random wait for their tokens, at several rates."""
    lengths = Lengths.parse("--prompts", prompts), Lengths.parse("--answers", answers)
    load = Load(*lengths, seconds=seconds, system_prompt=system_prompt, vocabulary=vocabulary_of(model))
    loads = [replace(load, rate=rate) for rate in integers(rates)]
    bounds = [
        Workload(max(1, round(rate * seconds)), system_prompt + lengths[0].most, max(2, lengths[1].most))
        for rate in integers(rates)
    ]
    limit = None if max_step_ms == "none" else max_step_ms if max_step_ms == "auto" else float(max_step_ms)
    fp8 = kv_dtype is not None
    chosen = engines_of(contenders, vllm, True, cascade, fp8, max_step_ms=limit)
    with bench(model, device, bounds, json, commit) as run:

        def measure(contender: EngineContender) -> None:
            with contender.engine(run.setup) as session:
                measure_all({contender.name: session.stream}, loads, runs, run.report, run.save, run.setup.log)

        run.each(chosen, measure)


if __name__ == "__main__":
    typer.run(main)
