"""Decode with weights of 4 and 8 bits, beside the same model in 16 bits: tokens a second of `generate`.

python tools/bench/quantised.py --model qwen3-8b --formats int4-g128,nf4,fp8-block,int8 --rows 1,2,4,8,16,32,64,128,256
python tools/bench/quantised.py --model tiny --device cpu --dtype float32 --rows 1,2 --new 4      # anywhere
python tools/bench/quantised.py --at-once --json FILE       # compiles all formats at once, times them in turns
python tools/bench/quantised.py --load FOLDER --rows 1,8    # a quantised model: our kernels, its library's, HuggingFace
python tools/bench/quantised.py --library torchao-int4,bitsandbytes-nf4 --at-once  # the same, of random weights

Weights are random, and packed as libraries do; with `--library` a library packs them, and with `--load` they are those
of a model: then the library is needed. What it sets in torch is its own process's alone with `--at-once`.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from quantised_models import FORMATS, LIBRARIES, random_model
from transformers import AutoModelForCausalLM

import compiled_llm

PROMPT = 32
ROUNDS, RUNS = 3, 2
"""Turns that each takes, and runs of each in a turn, after one that does not count."""
WAYS = ("ours", "library", "huggingface")


def main() -> None:
    options = _options()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    found: dict[str, dict[str, Any]] = {}
    for name, measured in (_at_once if options.at_once else _in_turn)(options, device):
        found[name] = measured
        _print(name, found)
        if options.json:
            Path(options.json).write_text(json.dumps(found, indent=1))
    if failed := [name for name, measured in found.items() if "failed" in measured]:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _in_turn(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in _contenders(options):
        yield name, _tried(name, options, device, range(ROUNDS))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _at_once(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure each in a process of its own, which compiles beside the others, and has the device alone in its turns."""
    # A device's speed changes within a minute: those that take turns see the same of it.
    names, context = _contenders(options), multiprocessing.get_context("spawn")
    ready, ended = context.Barrier(len(names)), [context.Event() for _ in range(ROUNDS * len(names))]
    with ProcessPoolExecutor(len(names), context, _begin, (ready, ended)) as pool:
        jobs = [pool.submit(_measured_in_turn, name, number, options, device) for number, name in enumerate(names)]
        for name, job in zip(names, jobs, strict=True):
            yield name, job.result()


_others: dict[str, Any] = {}
"""Of a process: the barrier that all pass when they are ready, and an event for each turn that ends."""


def _begin(ready: Any, ended: Any) -> None:
    _others.update(ready=ready, ended=ended)


def _measured_in_turn(name: str, number: int, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measure one whenever it is its turn; for one that fails the others do not wait."""
    turns = _turns(number)
    measured = _tried(name, options, device, turns)
    for _ in turns:
        pass
    return measured


def _turns(number: int) -> Iterator[None]:
    """Yield when it is the turn of a process among all, which ends when the next one is asked for."""
    ended = _others["ended"]
    _others["ready"].wait()
    for turn in range(number, len(ended), len(ended) // ROUNDS):
        if turn:
            ended[turn - 1].wait()
        yield
        ended[turn].set()


def _contenders(options: argparse.Namespace) -> list[str]:
    """Return names, which end in a way if there are several; a model's format comes first, if it is random."""
    if options.load:
        return [*WAYS]
    if options.library:
        return ["bfloat16", *(f"{format} {way}" for format in options.library.split(",") for way in WAYS)]
    return ["bfloat16", *options.formats.split(",")]


def _tried(name: str, options: argparse.Namespace, device: torch.device, turns: Iterable[object]) -> dict[str, Any]:
    """Return what is measured of one, or why that failed: the others go on."""
    try:
        return _measured(name, options, device, turns)
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}


def _measured(name: str, options: argparse.Namespace, device: torch.device, turns: Iterable[object]) -> dict[str, Any]:
    """Return milliseconds of a decode step by rows and of a prompt by tokens, of the middle runs, and its memory.

    The runs are made in turns, once everything is compiled and captured.
    """
    prompts = [int(tokens) for tokens in options.prompts.split(",")]
    dtype, rows = getattr(torch, options.dtype), [int(count) for count in options.rows.split(",")]
    way = name.split()[-1]
    new = min(options.new, options.hf_new) if way == "huggingface" else options.new
    start = time.perf_counter()
    if options.load:
        model = AutoModelForCausalLM.from_pretrained(options.load, dtype=dtype, device_map=device).eval()
    else:
        model = random_model(options.model, name.split()[0], options.layers, dtype, device)
    loaded = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of what was packed, for the processes beside
        torch.cuda.reset_peak_memory_stats()
    if way != "huggingface":
        tokens = max(max(rows) * (PROMPT + options.new + 64), *(prompt + 64 for prompt in prompts))
        packed = False if way == "library" else "auto"
        compiled_llm.wrap(
            model, max_batch_size=max(rows), kv_memory=f"{tokens} tokens", packed=packed, mode=options.mode
        )
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    if way != "huggingface":
        model.compiled.warmup(rows)  # what is captured between steps would be timed with them
    for count in rows:
        _seconds(model, _prompt(model, count, device), 4, device)
    for tokens in prompts:
        _seconds(model, _prompt(model, 1, device, tokens), 1, device)
    ready = time.perf_counter() - start
    print(
        f"{name}: ready after {ready:.0f} s, {loaded / 2**20:,.0f} MiB loaded, {peak / 2**20:,.0f} at most", flush=True
    )
    steps, first = {count: list[float]() for count in rows}, {count: list[float]() for count in prompts}
    for _ in turns:
        for count, took in steps.items():
            took += _step_runs(model, count, new, device)
        for count, took in first.items():
            took += _prompt_runs(model, count, device)
    weights = model.compiled.stats().weights if way != "huggingface" else {}
    middle = ({count: statistics.median(took) for count, took in all_runs.items()} for all_runs in (steps, first))
    figures = dict(zip(("ms", "prompt_ms"), middle, strict=True))
    return {**figures, "loaded": loaded, "peak": peak, "weights": weights, "ready_s": ready}


def _step_runs(model: Any, rows: int, new: int, device: torch.device) -> list[float]:
    """Return milliseconds of a step in each run: what tokens after the second take."""
    inputs = _prompt(model, rows, device)
    runs = ([_seconds(model, inputs, count, device) for count in (2, 2 + new)] for _ in range(RUNS + 1))
    return [(long - short) / new * 1e3 for short, long in runs][1:]


def _prompt_runs(model: Any, tokens: int, device: torch.device) -> list[float]:
    """Return milliseconds of a prompt of one row and its first token, in each run."""
    inputs = _prompt(model, 1, device, tokens)
    return [_seconds(model, inputs, 1, device) * 1e3 for _ in range(RUNS + 1)][1:]


def _seconds(model: Any, inputs: dict[str, torch.Tensor], new: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _prompt(model: Any, rows: int, device: torch.device, tokens: int = PROMPT) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, model.config.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(rows))
    return {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}


def _print(name: str, found: dict[str, dict[str, Any]]) -> None:
    """Print figures, their speed over the first's, and that of ours over them if they are of another way."""
    if "failed" in found[name]:
        print(f"{name} failed: {found[name]['failed']}", flush=True)
        return
    own, ours = found[name], found.get(" ".join([*name.split()[:-1], "ours"]), {})
    print(f"{name} {own['weights']}", flush=True)
    for kind, figures in (("rows", "ms"), ("prompts", "prompt_ms")):
        first = next(one[figures] for one in found.values() if "failed" not in one)
        beside = ((count, took, first[count] / took) for count, took in own[figures].items())
        print(
            f"  {kind} {'; '.join(f'{count}: {took:.3f} ms ({over:.2f}x)' for count, took, over in beside)}", flush=True
        )
        if ours is not own and figures in ours:
            over_it = (f"{count}: {took / ours[figures][count]:.2f}x" for count, took in own[figures].items())
            print(f"  ours over it, {kind} {'; '.join(over_it)}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b", help="a shape of shapes.py")
    parser.add_argument("--load", help="a quantised model in place of random weights: a folder or hub id")
    parser.add_argument("--formats", default="int4-g128,nf4,fp8-block,int8", help=f"of {', '.join(FORMATS)}")
    parser.add_argument("--library", help=f"formats that a library packs, in place of these: {','.join(LIBRARIES)}")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--prompts", default="128,512,1024,8192", help="tokens of prompts of one row")
    parser.add_argument("--layers", type=int, help="how many of the shape's layers; all by default")
    parser.add_argument("--new", type=int, default=64, help="steps that are timed in a run")
    parser.add_argument("--hf-new", type=int, default=16, help="as many at most of HuggingFace, whose steps are slow")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device")
    parser.add_argument("--mode", default="cuda-graphs")
    parser.add_argument("--at-once", action="store_true", help="compile all at once, in processes that take turns")
    parser.add_argument("--json", help="a file for all figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
