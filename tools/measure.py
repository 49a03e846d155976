"""How fast a random Qwen3 generates: HuggingFace, HuggingFace's static cache with its compile, and compiled-llm.

    python tools/measure.py --size 0.6B --json figures.json
    python tools/measure.py --size 8B --batches 1,8,32,64 --contenders compiled-llm --modes reduce-overhead --parity

Every run is a whole `generate` of greedy tokens, timed from the call to its return with the device idle before and
after. All contenders run one after the other in this process; compare nothing with figures of another machine or day.
Progress goes to stderr, a table to stdout, everything to the JSON file, which is rewritten after each contender.
`--size tiny` runs anywhere, and says nothing about speed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STARTED = time.perf_counter()


def log(message: str) -> None:
    print(f"[{time.perf_counter() - STARTED:7.1f} s] {message}", file=sys.stderr, flush=True)


log("importing torch and transformers")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from transformers.generation.streamers import BaseStreamer  # noqa: E402

import compiled_llm  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
}
PROFILED = 16
"""Decode steps under the profiler; one of them at least plans."""
CONTENDERS = ("hf-eager", "hf-static", "compiled-llm")
MODES = ("eager", "compile", "reduce-overhead")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="0.6B", help="shapes of the model")
    parser.add_argument("--batches", default="1", help="batch sizes, with commas between")
    parser.add_argument("--prompt", type=int, default=128, help="tokens in each prompt")
    parser.add_argument("--new", type=int, default=256, help="new tokens of each row")
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each contender")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="which of them, with commas between")
    parser.add_argument("--modes", default=",".join(MODES), help="modes of compiled-llm")
    parser.add_argument("--no-accounting", action="store_true", help="leave out where the time of a step goes")
    parser.add_argument("--parity", action="store_true", help="compare teacher-forced logits with float32 as well")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--commit", help="what to record where there is no git")
    options = parser.parse_args()
    options.batches = [int(size) for size in options.batches.split(",")]
    for name, known in (("contenders", CONTENDERS), ("modes", MODES)):
        chosen = getattr(options, name).split(",")
        if unknown := set(chosen) - set(known):
            parser.error(f"--{name}: no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        setattr(options, name, chosen)
    if options.new < 2 or options.runs < 1 or min(options.batches) < 1:
        parser.error("--new must be at least 2, --runs and --batches at least 1")
    return options


# ---- the machine


def command_output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> str | None:
    head = command_output("git", "rev-parse", "HEAD")
    if head is None:
        return None
    return f"{head} and changes" if command_output("git", "status", "--porcelain", "--untracked-files=no") else head


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def environment(options: argparse.Namespace) -> dict[str, Any]:
    packages = ("torch", "triton", "transformers", "flashinfer-python", "numpy")
    return {
        "command": shlex.join(["python", "tools/measure.py", *sys.argv[1:]]),
        "commit": options.commit or commit(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "device": torch.cuda.get_device_name() if CUDA else f"CPU, {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {name: package_version(name) for name in packages},
    }


def gpu_state() -> dict[str, str] | None:
    """Clocks, power and driver while the device is busy."""
    fields = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")
    query = ("nvidia-smi", f"--query-gpu=driver_version,{','.join(fields)}", "--format=csv,noheader", "--id=0")
    busy = torch.ones(2**28, device=DEVICE)
    try:
        asking = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None
    until = time.perf_counter() + 20
    while asking.poll() is None and time.perf_counter() < until:
        for _ in range(20):
            busy.sum()
        torch.cuda.synchronize()
    if asking.poll() != 0:
        asking.kill()
        return None
    answer = (asking.stdout.read() if asking.stdout else "").strip().splitlines()[:1]
    return dict(zip(("driver", *fields), answer[0].split(", "), strict=False)) if answer else None


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def read_bandwidth() -> float:
    """Bytes per second that the device reads at best: the larger of a sum and a matrix-vector product over 4 GiB."""
    size = 2**32 if CUDA else 2**26
    numbers = torch.randn(size // 4, device=DEVICE)
    matrix = torch.randn((size // 2 // 8192, 8192), device=DEVICE, dtype=torch.bfloat16)
    vector = torch.randn(8192, device=DEVICE, dtype=torch.bfloat16)
    best = 0.0
    for read in (lambda: numbers.sum(), lambda: torch.mv(matrix, vector)):
        best = max(best, size / min(device_seconds(read) for _ in range(12)))
    return best


def device_seconds(work: Callable[[], object]) -> float:
    if not CUDA:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


# ---- models and runs


def build(options: argparse.Namespace) -> Qwen3ForCausalLM:
    """A random model without an end token, made where it runs; bfloat16, float32 on a CPU."""
    config = Qwen3Config(
        **SIZES[options.size],
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(options.seed)
    with torch.device(DEVICE):
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16 if CUDA else torch.float32)
    return model.eval()


def prompts(options: argparse.Namespace, batch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(options.seed + batch)
    shape = (batch, options.prompt)
    ids = torch.randint(1, SIZES[options.size]["vocab_size"], shape, generator=generator).to(DEVICE)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Clock(BaseStreamer):
    """Keeps when each token came; `generate` puts the prompt first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to do."""


@dataclass
class Run:
    """One call of `generate`, in seconds."""

    total: float
    first: float  # from the call to the first token
    between: float  # from the first token to the last
    after: float  # from the last token to the return


def one_run(model: Any, options: argparse.Namespace, batch: int, **more: Any) -> Run:
    inputs, clock = prompts(options, batch), Clock()
    synchronize()
    start = time.perf_counter()
    out = model.generate(**inputs, max_new_tokens=options.new, do_sample=False, streamer=clock, **more)
    synchronize()
    end = time.perf_counter()
    assert out.shape == (batch, options.prompt + options.new), f"{tuple(out.shape)} tokens came back"
    first, last = clock.times[1], clock.times[-1]
    return Run(end - start, first - start, last - first, end - last)


def measured(name: str, model: Any, options: argparse.Namespace, batch: int, warm: int, **more: Any) -> dict[str, Any]:
    """Figures of one contender at one batch size."""
    start = time.perf_counter()
    for number in range(warm):
        log(f"{name}, batch {batch}: warm-up {number + 1} of {warm}")
        one_run(model, options, batch, **more)
    warm_seconds = time.perf_counter() - start
    runs = []
    for number in range(options.runs):
        runs.append(one_run(model, options, batch, **more))
        log(f"{name}, batch {batch}: run {number + 1} of {options.runs}: {runs[-1].total:.3f} s")
    tokens = batch * options.new
    return {
        "contender": name,
        "batch": batch,
        "tokens_per_s_best": tokens / min(run.total for run in runs),
        "tokens_per_s_median": tokens / statistics.median(run.total for run in runs),
        "first_token_ms": 1e3 * statistics.median(run.first for run in runs),
        "decode_tokens_per_s": batch * (options.new - 1) / statistics.median(run.between for run in runs),
        "warm_up_s": warm_seconds,
        "runs": [asdict(run) for run in runs],
    }


# ---- where the time of a decode step goes

KINDS = (
    ("memory copies", r"^mem(cpy|set)"),
    ("page append", r"append_?paged"),
    ("attention, merge of splits", r"merge_?states?|attentionsum"),
    ("attention", r"batch(decode|prefill)with|paged_attention|flash|fmha|attention"),
    ("argmax", r"argmax"),
    ("matrix products", r"gemm|gemv|nvjet|split_?k|cutlass|xmma|cublas|(^|_|::)(add|b)?mm(_|$)|mkl|linear|dot_"),
    ("norms, rotary, elementwise", r"."),
)


def kind_of(kernel: str) -> str:
    return next(kind for kind, pattern in KINDS if re.search(pattern, kernel.lower()))


def accounting(model: Any, options: argparse.Namespace, batch: int) -> dict[str, Any]:
    """What a decode step costs the host and the device, at the middle of the run that was measured."""
    paged, runner = model.compiled.paged(), model.compiled.runner()
    steps, warm = 64, max(2, options.new // 2 - 32)
    for prompt in prompts(options, batch)["input_ids"].cpu().numpy():
        runner.admit(prompt, warm + 2 * steps + 2 * PROFILED + 2)
    for _ in range(warm):
        runner.step()
    runner.drain()

    hosts = []
    for _ in range(steps):
        synchronize()
        start = time.perf_counter()
        paged.thread.call(runner._launch, None)
        hosts.append(time.perf_counter() - start)
        runner.drain()

    calls = []
    begin = time.perf_counter()
    for _ in range(steps):
        start = time.perf_counter()
        runner.step()
        calls.append(time.perf_counter() - start)
    runner.drain()
    synchronize()
    wall = (time.perf_counter() - begin) / steps

    log(f"profiling {PROFILED} steps")
    with profiler():
        synchronize()  # the profiler has to be started on this thread before any other

    def profiled() -> list[Any]:
        with profiler() as profile:
            for _ in range(PROFILED):
                runner.step()
            synchronize()
        return kernels_of(list(profile.events()))

    kernels = paged.thread.call(profiled) or profiled()  # on the thread that launches, or else on this one
    runner.close()
    return {
        "mode": model.compiled.config.mode,
        "batch": batch,
        "context": options.prompt + warm + 2 * steps,
        "step_us": 1e6 * wall,
        "host_launch_us": 1e6 * statistics.median(hosts),
        "host_launch_worst_us": 1e6 * max(hosts),
        "host_step_call_us": 1e6 * statistics.median(calls),
        **kernel_table(kernels, PROFILED),
    }


def profiler() -> Any:
    activity = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[activity.CUDA if CUDA else activity.CPU])


def kernels_of(events: list[Any]) -> list[Any]:
    """What ran on the device; operators where there is no device."""
    wanted = "CUDA" if CUDA else "CPU"
    return [event for event in events if event.device_type.name == wanted and not is_annotation(event)]


def kernel_table(kernels: list[Any], steps: int) -> dict[str, Any]:
    """Kernels by kind, for one step."""
    times: dict[str, list[float]] = defaultdict(list)
    names: dict[str, float] = defaultdict(float)
    for event in kernels:
        spent = event.time_range.elapsed_us() if CUDA else event.self_cpu_time_total
        times[kind_of(event.name)].append(spent)
        names[event.name] += spent
    spans = sorted((event.time_range.start, event.time_range.end) for event in kernels)
    busy, reached = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return {
        "measured": "kernels" if CUDA else "operators on the host",
        "kernels_per_step": len(kernels) / steps,
        "kinds": [
            {"kind": kind, "us": sum(times[kind]) / steps, "launches": len(times[kind]) / steps}
            for kind, _ in KINDS
            if kind in times
        ],
        "busy_us": busy / steps,
        "gaps_us_profiled": (reached - spans[0][0] - busy) / steps if spans else 0.0,
        "top": [{"kernel": name[:160], "us": names[name] / steps} for name in sorted(names, key=names.get)[:-31:-1]],
    }


def is_annotation(event: Any) -> bool:
    """Ranges that code was marked with, which enclose kernels."""
    marked = ("##", "ProfilerStep", "Torch-Compiled", "TorchDynamo", "CompiledFunction", "[pytorch|")
    return bool(getattr(event, "is_user_annotation", False)) or event.name.startswith(marked)


def bytes_per_step(model: Any, options: argparse.Namespace, batch: int) -> dict[str, int]:
    """What a decode step has to read: every weight once, and each row's keys and values at the middle of the run."""
    config = model.config
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    if not config.tie_word_embeddings:  # of the embedding, a step reads one line a row
        embedding = model.get_input_embeddings().weight
        weights -= embedding.numel() * embedding.element_size()
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    return {"weights": weights, "keys_values": batch * token * (options.prompt + options.new // 2)}


# ---- parity


def full_size_parity(model: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The parity test of `tests/test_model_gpu.py` on this very model: 8 rows, then one row."""
    sys.path.insert(0, str(ROOT / "tests"))
    import test_model_gpu as tests

    tests.DEVICE = DEVICE
    log("parity: copying the model to float32")
    twins = tests.twins_of(model)
    rows = []
    for lengths in ([1, 15, 16, 17, 33, 64, 100, 250], [100]):
        log(f"parity: 220 steps of {len(lengths)} rows")
        for row in tests.parity(twins, lengths, 220, options.seed):
            log(f"parity: batch {len(lengths)}, {row}")
            rows.append({"batch": len(lengths), **row._asdict(), "ratio": row.ours / row.huggingface})
    compiled_llm.unwrap(twins.wrapped)
    return rows


# ---- the report


def report(figures: dict[str, Any]) -> str:
    setup = figures["environment"]
    packages = ", ".join(f"{name} {number}" for name, number in setup["versions"].items() if number)
    lines = [
        f"Qwen3-{figures['size']} (random weights, {figures['dtype']}), {figures['prompt']}-token prompts, "
        f"{figures['new']} new tokens, greedy; {setup['device']}; {packages}, CUDA {setup['cuda']}; commit "
        f"{setup['commit']}.",
        f"`{setup['command']}`",
        "",
        "| | batch | tokens/s, best | median | first token, ms | decode, tokens/s | of the bandwidth bound |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in figures["results"]:
        bound = figures["bounds"].get(str(row["batch"]))
        lines.append(
            f"| {row['contender']} | {row['batch']} | {row['tokens_per_s_best']:,.1f} | "
            f"{row['tokens_per_s_median']:,.1f} | {row['first_token_ms']:.1f} | {row['decode_tokens_per_s']:,.1f} | "
            f"{row['decode_tokens_per_s'] / bound:.0%} |"
        )
    bounds = ", ".join(f"{bound:,.0f} at batch {batch}" for batch, bound in figures["bounds"].items())
    lines += [
        "",
        f"Read bandwidth, measured in this run: {figures['read_bandwidth'] / 1e12:.3f} TB/s. Reading weights and pages "
        f"at that rate, decode reaches (tokens/s): {bounds}.",
    ]
    for entry in figures["accounting"]:
        lines += ["", *account_of(entry)]
    if figures["parity"]:
        lines += ["", "| prompt | batch | RMS error, ours | HuggingFace's | ratio | flips | steps judged |"]
        lines += ["|---|---|---|---|---|---|---|"]
        lines += [
            f"| {row['prompt']} | {row['batch']} | {row['ours']:.4e} | {row['huggingface']:.4e} | {row['ratio']:.3f} | "
            f"{row['flips']} | {row['judged']} of {row['steps']} |"
            for row in figures["parity"]
        ]
    lines += ["", *(f"Failed: {failure}" for failure in figures["failures"])]
    return "\n".join(lines).rstrip()


def account_of(entry: dict[str, Any]) -> list[str]:
    if "run" not in entry:
        return []
    run, kernels = entry["run"], sum(kind["us"] for kind in entry["kinds"])
    return [
        f"One decode step of mode {entry['mode']} at batch {entry['batch']}, context about {entry['context']}: "
        f"{entry['step_us']:.0f} µs; a launch takes the host {entry['host_launch_us']:.0f} µs (worst "
        f"{entry['host_launch_worst_us']:.0f}), `runner.step()` returns after {entry['host_step_call_us']:.0f} µs.",
        "",
        f"| {entry['measured']} in one step | launches | µs | share of the step |",
        "|---|---|---|---|",
        *(
            f"| {kind['kind']} | {kind['launches']:.1f} | {kind['us']:.1f} | {kind['us'] / entry['step_us']:.0%} |"
            for kind in entry["kinds"]
        ),
        f"| the rest of the step: no kernel runs | | {entry['step_us'] - kernels:.1f} | "
        f"{1 - kernels / entry['step_us']:.0%} |",
        "",
        f"One call of `generate` (median): {1e3 * run['first']:.1f} ms to the first token, "
        f"{1e3 * run['between']:.1f} ms to the last, {1e3 * run['after']:.1f} ms to the return.",
    ]


def main() -> None:
    options = arguments()
    figures: dict[str, Any] = {
        "environment": environment(options),
        "size": options.size,
        "prompt": options.prompt,
        "new": options.new,
        "results": [],
        "accounting": [],
        "parity": [],
        "failures": [],
    }

    def save() -> None:
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(figures, indent=1))

    def attempt(what: str, work: Callable[[], None]) -> None:
        """What fails is reported, and does not take the other figures with it."""
        try:
            work()
        except Exception as error:
            log(f"{what} failed: {type(error).__name__}: {error}")
            figures["failures"].append(f"{what}: {type(error).__name__}: {error}"[:2000])
        save()

    log("measuring the read bandwidth")
    figures["read_bandwidth"] = read_bandwidth()
    figures["gpu"] = gpu_state() if CUDA else None
    log(f"{figures['read_bandwidth'] / 1e12:.3f} TB/s, {figures['gpu']}")
    log(f"building Qwen3-{options.size}")
    model: Any = build(options)
    figures["dtype"] = str(model.dtype).removeprefix("torch.")
    figures["bounds"] = {
        str(batch): batch * figures["read_bandwidth"] / sum(bytes_per_step(model, options, batch).values())
        for batch in options.batches
    }

    for name, warm, more in (("hf-eager", 1, {}), ("hf-static", 3, {"cache_implementation": "static"})):
        if name in options.contenders:
            for batch in options.batches:

                def huggingface(name: str = name, batch: int = batch, warm: int = warm, more: Any = more) -> None:
                    figures["results"].append(measured(name, model, options, batch, warm, **more))

                attempt(f"{name}, batch {batch}", huggingface)
    forget_huggingface(model)
    for mode in options.modes if "compiled-llm" in options.contenders else ():
        attempt(f"compiled-llm, {mode}", lambda mode=mode: ours(mode, model, options, figures, attempt))
        compiled_llm.unwrap(model)
        gc.collect()

    def parity() -> None:
        figures["parity"] = full_size_parity(model, options)

    if options.parity:
        attempt("parity", parity)
    save()
    print(report(figures))
    if figures["failures"]:
        raise SystemExit(1)


def forget_huggingface(model: Any) -> None:
    """Drop what `generate` left on the model: its compiled call, and with it the graphs."""
    for name in ("_compiled_call", "_last_compile_config", "_cache"):
        model.__dict__.pop(name, None)
    torch._dynamo.reset()
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def ours(mode: str, model: Any, options: argparse.Namespace, figures: dict[str, Any], attempt: Any) -> None:
    tokens = (max(options.batches) + 1) * (options.prompt + 2 * options.new + 512)
    compiled_llm.wrap(
        model, mode=mode, max_batch_size=max(options.batches), kv_memory=f"{tokens} tokens", progress=True
    )
    start = time.perf_counter()
    log(f"compiled-llm, {mode}: warm-up")
    model.compiled.warmup(options.batches)
    warm = time.perf_counter() - start
    name = f"compiled-llm, {mode}"
    for batch in options.batches:
        result = measured(name, model, options, batch, 1)
        result["warm_up_s"] += warm
        result["stats"] = {key: value for key, value in asdict(model.compiled.stats()).items() if key != "pages"}
        figures["results"].append(result)
        if not options.no_accounting:

            def account(batch: int = batch, runs: Any = result["runs"]) -> None:
                entry = accounting(model, options, batch)
                entry["run"] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
                figures["accounting"].append(entry)

            attempt(f"{name}, batch {batch}, accounting", account)


if __name__ == "__main__":
    main()
