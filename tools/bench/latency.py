"""`compiled-llm bench latency` with further contenders: hf-static and vllm.

python tools/bench/latency.py --model qwen3-0.6b --batches 1,8,32,64 --json latency.json
python tools/bench/latency.py --batches 1 --prompts 128,1024 --runs 100 --new 2      # first tokens
"""

from __future__ import annotations

import itertools
from typing import Annotated

import typer
from ceiling import read_bandwidth, step_bytes
from common import Commit, Contenders, DeviceName, Json, Model, Vllm, bench, integers
from peers import HFStatic, Peer

from compiled_llm.commands.bench import contenders as ours, latency
from compiled_llm.commands.bench.commands import DecodingOption
from compiled_llm.commands.bench.timing import Workload


def main(
    model: Model = "qwen3-0.6b",
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,8,32,64",
    prompts: Annotated[str, typer.Option(help="Prompt lengths, in tokens.")] = "128",
    new: Annotated[str, typer.Option(help="Output lengths, in tokens.")] = "256",
    decoding: DecodingOption = DecodingOption.greedy,
    contenders: Contenders = "hf-eager,hf-static,compiled-llm:cuda-graphs,vllm",
    runs: Annotated[int, typer.Option(min=1, help="Timed runs; from 100 on with the 99th percentile.")] = 5,
    device: DeviceName = "auto",
    vllm: Vllm = "",
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Measure the time to first token, decode and end to end, of all contenders side by side."""
    combinations = itertools.product(decoding.ways, integers(new), integers(prompts), integers(batches))
    asked = [Workload(batch, prompt, length, sampled) for sampled, length, prompt, batch in combinations]
    first, *rest = ours.ALL
    known = [first, HFStatic(), *rest, Peer(vllm)]
    with bench(model, device, asked, json, commit) as run:
        chosen, setup = ours.choose(contenders, run.setup.device.type, known), run.setup
        run.setup.log("measuring the read bandwidth")
        bandwidth = run.report.machine["read_bandwidth"] = read_bandwidth(setup.device, setup.dtype)
        nbytes = {work: step_bytes(setup.model(), work.context, work.batch) for work in asked}

        def save() -> None:
            """Compare the decode rate of the newest result with what the bandwidth allows."""
            result = run.report.results["latency"][-1]
            work = Workload(*(result[name] for name in ("batch", "prompt", "new", "sampled")))
            rate = result["figures"]["decode_tokens_per_s"]["median"]
            if (needed := nbytes[work]) is not None:
                result["figures"]["of_ceiling"] = rate * needed / (work.batch * bandwidth)
            run.save()

        latency.measure(chosen, setup, runs, run.report, save)


if __name__ == "__main__":
    typer.run(main)
