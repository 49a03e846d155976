"""Sweep on this machine what the rules of kernels were fitted to, and see how well each rule chooses.

    python tools/fit_tilings.py                                    # all rules
    python tools/fit_tilings.py --only linear,attention --quick    # fewer shapes and fewer candidates
    python tools/fit_tilings.py --json fit.json

For each case it times every candidate and prints the best, the one that the rule chooses, and how much slower it is.
To fit a rule to another GPU: run this, change the rule's constants (they say what they stand for), run it again. All
but `cpu-linear` need a GPU, and `splitting` needs FlashInfer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from bench import cold_launches
from bench.cold_launches import LARGER_THAN_CACHES, LAUNCHES, NumberedLaunch, copies_of
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from compiled_llm.execution.graphs.captured_shapes import CapturedShapes
from compiled_llm_ops import normed_linear, paged_attention, plan_paged_attention, skinny_linear
from compiled_llm_ops.backends import backend_named
from compiled_llm_ops.contracts import DecodeAttention, Geometry, PageTable
from compiled_llm_ops.flashinfer.splitting import SPLIT, WHOLE, worth_splitting
from compiled_llm_ops.kernels.attention import decode_tiling
from compiled_llm_ops.kernels.attention.decode_tiling import AttentionTiling, choose_attention_tiling
from compiled_llm_ops.kernels.linear import chained_tiling, skinny_tiling
from compiled_llm_ops.kernels.linear.chained_tiling import HELD_BLOCK, ChainedTiling, MatmulTile, choose_chained_tiling
from compiled_llm_ops.kernels.linear.skinny_tiling import LinearTiling, choose_linear_tiling, choose_normed_tiling
from compiled_llm_ops.linear import linear, onednn
from compiled_llm_ops.protocol import CapturedLaunch

CLOSE = 0.03
"""How much slower than the best a choice may be to count as right."""

MODELS = {"0.6B": (1024, 2048, 1024, 3072), "8B": (4096, 4096, 1024, 12288)}
"""Qwen3: hidden size, columns of all query heads, of all kv heads, intermediate size."""

MOST_KEYS = 2**21
"""Keys of all rows, up to which two layers of them fit on the device: 8 GB each."""

VOCABULARY, PAGE_SIZE, HEAD_DIM, KV_HEADS = 151_936, 16, 128, 8


class Machine(NamedTuple):
    """What rules ask of a device; by default an H200's."""

    processors: int = 132
    shared_memory: int = 228 * 1024


class Case(NamedTuple):
    """One choice that a rule has to make.

    Attributes:
        rule: its name, as for `--only`.
        name: what there is to sample for.
        candidates: what could be sampled, by name.
        chosen: what the rule chooses, one of the names.
        prepare: allocates the inputs; returns what measures a candidate, in microseconds.
    """

    rule: str
    name: str
    candidates: dict[str, Any]
    chosen: str
    prepare: Callable[[], Callable[[Any], float]]


class Fit(NamedTuple):
    """A measured case; `times` are in microseconds, by candidate."""

    rule: str
    case: str
    best: str
    chosen: str
    slower: float
    times: dict[str, float]


def measure(case: Case) -> Fit:
    microseconds = case.prepare()
    times = {name: microseconds(candidate) for name, candidate in case.candidates.items()}
    best = min(times, key=times.__getitem__)
    return Fit(case.rule, case.name, best, case.chosen, times[case.chosen] / times[best] - 1, times)


def case_of(rule: str, name: str, candidates: Iterable[Any], chosen: Any, prepare: Any) -> Case:
    """A case whose candidates name themselves; the rule's choice is always among them."""
    return Case(rule, name, {str(one): one for one in [chosen, *candidates]}, str(chosen), prepare)


# ---- measuring


def captured(launch: NumberedLaunch) -> float:
    """Microseconds of a launch, captured many times in a row; infinite if the device has too little for a candidate."""
    from triton.runtime.errors import OutOfResources

    try:
        return cold_launches.captured(launch)
    except OutOfResources:
        return math.inf


def by_the_clock(run: Callable[[], object], synchronize: Callable[[], object], seconds: float = 0.2) -> float:
    """Microseconds of a run, launches of the host included: the best of as many runs as take so long."""
    run()
    best, end = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end:
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) / math.sqrt(shape[-1])


# ---- linear and normed: `kernels/linear/skinny_tiling.py`


def products(quick: bool) -> dict[str, tuple[int, int]]:
    """`(N, K)` of the matmuls of decode steps."""
    found: dict[str, tuple[int, int]] = {}
    for model, (hidden, query, kv, intermediate) in MODELS.items():
        found |= {
            f"{model} qkv": (query + 2 * kv, hidden),
            f"{model} out": (hidden, query),
            f"{model} gate, up": (2 * intermediate, hidden),
            f"{model} down": (hidden, intermediate),
        }
        if not quick:
            found[f"{model} vocabulary"] = (VOCABULARY, hidden)
    return found


def linear_cases(machine: Machine, quick: bool) -> Iterator[Case]:
    for name, (n, k) in products(quick).items():
        for m in (1, 2, 8, 32, 64, 128) if quick else (1, 2, 4, 8, 16, 32, 33, 48, 64, 96, 128, 192, 256, 384, 512):
            chosen = choose_linear_tiling(m, n, k, machine.processors)
            candidates = [*few_row_tilings(m, k), *tensor_core_tilings(m, k), None]
            yield case_of("linear", f"{name}, M={m}", candidates, chosen, lambda m=m, n=n, k=k: linear_timer(m, n, k))


def few_row_tilings(m: int, k: int) -> list[LinearTiling]:
    """Tilings without tensor cores, up to twice the registers that the rule allows for what is prefetched."""
    if m > 2 or k % 16:
        return []
    return [
        LinearTiling(m, outputs, 1, inputs, stages=1, prefetched=prefetched)
        for inputs in (skinny_tiling.WIDE_BLOCK, 2 * skinny_tiling.WIDE_BLOCK)
        for outputs in (2, 4, 8)
        for prefetched in sorted({1, -(-k // inputs)})
        if prefetched * outputs * inputs <= 2 * skinny_tiling.PREFETCHED_WEIGHTS
    ]


def tensor_core_tilings(m: int, k: int) -> list[LinearTiling]:
    if m < 2 or m > skinny_tiling.MAX_ROWS or k % skinny_tiling.BLOCK:
        return []
    rows = min(max(16, 1 << (m - 1).bit_length()), skinny_tiling.TILE_ROWS)
    found = []
    few = (64,) if rows < skinny_tiling.TILE_ROWS else (16, 32, 64)  # tensor cores take 64 rows of a tile
    for outputs in few if m <= skinny_tiling.TILE_ROWS else (64, 128):
        for tiles in range(1, skinny_tiling.MAX_TILES + 1):
            for inputs in (skinny_tiling.BLOCK, 2 * skinny_tiling.BLOCK):
                stages = skinny_tiling.stages_that_fit(rows, outputs * tiles, inputs)
                if stages >= 3:
                    found.append(LinearTiling(rows, outputs, tiles, inputs, stages, prefetched=0))
    return found


def linear_timer(m: int, n: int, k: int) -> Callable[[LinearTiling | None], float]:
    """Each matmul comes after a small kernel, whose time is part of every candidate's."""
    from compiled_llm_ops.kernels.linear.skinny import multiply

    rows, weights = random(m, k), copies_of(random(n, k))

    def launch(tiling: LinearTiling | None, number: int) -> Tensor:
        inputs, weight = rows + 0, weights[number % len(weights)]
        return inputs @ weight.T if tiling is None else multiply(inputs, weight, tiling, pdl=True)

    return lambda tiling: captured(lambda number: launch(tiling, number))


def normed_cases(machine: Machine, quick: bool) -> Iterator[Case]:
    """The matmuls of one row that come after a norm, SwiGLU included."""
    for name, (n, k) in products(quick).items():
        if name.endswith(("out", "down")):
            continue  # they read what attention and SwiGLU wrote
        gated = name.endswith("gate, up")
        plain = choose_linear_tiling(1, n, k, machine.processors)
        if plain is None:
            continue
        candidates: list[LinearTiling | None] = [None]
        if plain.prefetched * plain.inputs >= k:  # a program norms the whole row
            candidates += [plain._replace(outputs=plain.outputs * factor) for factor in (1, 2, 4)]
        chosen = choose_normed_tiling(n, k, machine.processors)
        prepare = lambda n=n, k=k, plain=plain, gated=gated: normed_timer(n, k, plain, gated)  # noqa: E731
        yield case_of("normed", f"{name}, M=1", candidates, chosen, prepare)


def normed_timer(n: int, k: int, plain: LinearTiling, gated: bool) -> Callable[[LinearTiling | None], float]:
    """None stands for two launches, the norm and then the matmul."""
    from compiled_llm_ops.kernels.linear.norm import add_rms_norm
    from compiled_llm_ops.kernels.linear.skinny import Normed, multiply_few

    states, update, norm, weights = random(1, k), random(1, k), random(k), copies_of(random(n, k))

    def launch(tiling: LinearTiling | None, number: int) -> Tensor:
        added, weight = update + 0, weights[number % len(weights)]
        if tiling is None:
            _, row = add_rms_norm(states, added, norm, 1e-6, pdl=True)
            return multiply_few(row, weight, plain, gated=gated, pdl=True)
        normed = Normed(added, norm, 1e-6, torch.empty_like(states))
        return multiply_few(states, weight, tiling, normed=normed, gated=gated, pdl=True)

    return lambda tiling: captured(lambda number: launch(tiling, number))


# ---- chained: `kernels/linear/chained_tiling.py`


def chained_cases(machine: Machine, quick: bool) -> Iterator[Case]:
    """What follows attention and what follows the gate, up to the next of them; None are separate kernels."""
    for model, (hidden, query, kv, intermediate) in MODELS.items():
        if query % HELD_BLOCK or intermediate > chained_tiling.HELD_INPUTS:
            continue
        pairs = {"out, gate and up": (query, intermediate, True), "down, qkv": (intermediate, query + 2 * kv, False)}
        for name, (k, next_n, gated) in pairs.items():
            for m in (2, 16, 64, 256) if quick else (2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256):
                chosen = choose_chained_tiling(m, hidden, k, next_n, gated, machine.processors)
                candidates = [None, *chained_tilings(chosen, m, gated)]
                prepare = lambda m=m, n=hidden, k=k, next_n=next_n, gated=gated: chained_timer(m, n, k, next_n, gated)  # noqa: E731
                yield case_of("chained", f"{model} {name}, M={m}", candidates, chosen, prepare)


def chained_tilings(chosen: ChainedTiling | None, m: int, gated: bool) -> Iterator[ChainedTiling]:
    """Return the chosen tiling with other tiles for the first or for the second matmul."""
    if chosen is None:
        return
    sizes = list(itertools.product((16, 32, 64, 128), (16, 32, 64, 128), (64, 128, 256)))
    tiles = [MatmulTile(*size, 0) for size in sizes if size[0] < 2 * max(m, 16) and max(size[:2]) >= 64]
    for tile in tiles:
        stages = min(6, skinny_tiling.stages_that_fit(tile.rows, tile.outputs, tile.inputs))
        if stages >= 3:
            yield chosen._replace(first=tile._replace(stages=stages))
        stages = min(6, skinny_tiling.stages_that_fit(tile.rows, tile.outputs * (2 if gated else 1), tile.inputs))
        if stages >= 3:
            yield chosen._replace(second=tile._replace(stages=stages))


def chained_timer(m: int, n: int, k: int, next_n: int, gated: bool) -> Callable[[ChainedTiling | None], float]:
    from compiled_llm_ops.kernels.linear.chained import multiply_and_add, multiply_scaled

    rows, states, norm, firsts = random(m, k), random(m, n), random(n), copies_of(random(n, k))
    seconds = copies_of(random(next_n * (2 if gated else 1), n))

    def launch(tiling: ChainedTiling | None, number: int) -> Tensor:
        given, first, second = rows + 0, firsts[number % len(firsts)], seconds[number % len(seconds)]
        if tiling is None:
            update = skinny_linear(given, first, overlap=True)
            return normed_linear(states, update, norm, 1e-6, second, gated, overlap=True)[1]
        scaled = multiply_and_add(given, first, states, norm, tiling, pdl=True)
        return multiply_scaled(scaled, second, 1e-6, tiling, gated=gated, pdl=True)

    return lambda tiling: captured(lambda number: launch(tiling, number))


# ---- attention: `kernels/attention/decode_tiling.py`


def attention_cases(machine: Machine, quick: bool) -> Iterator[Case]:
    max_keys = 40_960  # of Qwen3's rows
    for gqa in (2,) if quick else (2, 4, 8):
        for rows in (1, 8, 32) if quick else (1, 2, 4, 8, 16, 17, 32, 33, 64, 96, 128, 192, 256):
            chosen = choose_attention_tiling(rows, KV_HEADS, gqa, HEAD_DIM, max_keys, *machine)
            candidates = [*attention_tilings(rows, quick), chosen._replace(share_equal=not chosen.share_equal)]
            for name, lengths in row_lengths(rows, quick).items():
                prepare = lambda lengths=lengths, gqa=gqa: attention_timer(lengths, gqa, max_keys)  # noqa: E731
                yield case_of("attention", f"B={rows}, G={gqa}, {name}", candidates, chosen, prepare)


def row_lengths(rows: int, quick: bool) -> dict[str, list[int]]:
    """Rows of equal lengths, of random ones, and one long one among short ones."""
    lengths = (160, 1024, 4096) if quick else (100, 160, 600, 1024, 2048, 4096, 16_384, 32_768)
    found = {f"{length} keys": [length] * rows for length in lengths if rows * length <= MOST_KEYS}
    if rows > 1:
        found["8192 keys and 512"] = [8192] + [512] * (rows - 1)
        chance = Random(rows)
        found["100 to 2048 keys"] = [chance.randint(100, 2048) for _ in range(rows)]
    return found


def attention_tilings(rows: int, quick: bool) -> list[AttentionTiling]:
    """Blocks, pipelines, programs for a row and sizes of shares."""
    row_tile = -(-rows // -(-rows // decode_tiling.MAX_ROWS))
    shapes = [(2**13, 3, 2), (2**13, 5, 2), (2**14, 3, 4), (2**14, 5, 4)]
    found = []
    for values, stages, warps in shapes if quick else [*shapes, (2**13, 3, 4), (2**13, 5, 4)]:
        busy = decode_tiling.BUSY_VALUES // values
        for splits in (1, 4, 16) if quick else (1, 2, 4, 8, 16, 32):
            for unsplit, min_share in ((decode_tiling.ALONE, 1), (busy, busy)):
                sharing = (row_tile, row_tile * splits, unsplit, min_share)
                found.append(AttentionTiling(*sharing, values // HEAD_DIM, stages, warps))
    return found


def attention_timer(lengths: Sequence[int], gqa: int, max_keys: int) -> Callable[[AttentionTiling], float]:
    """One layer after the other, so many that no cache holds the keys of all."""
    from compiled_llm_ops.kernels.attention.decode import decode

    counts = [-(-length // PAGE_SIZE) for length in lengths]
    pages = copies_of(torch.zeros(sum(counts), 2, KV_HEADS, PAGE_SIZE, HEAD_DIM, device="cuda", dtype=torch.bfloat16))
    starts = torch.tensor([0, *torch.tensor(counts[:-1]).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    ends = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    indices = torch.zeros(len(lengths) * max_keys // PAGE_SIZE, dtype=torch.int32, device="cuda")
    indices[: sum(counts)] = torch.randperm(sum(counts), device="cuda")
    query = random(len(lengths), KV_HEADS * gqa, HEAD_DIM)
    key, value = random(2, len(lengths), KV_HEADS, HEAD_DIM)

    def launch(tiling: AttentionTiling, number: int) -> Tensor:
        table = (starts, ends, indices)
        args = DecodeAttention(query + 0, key, value, pages[number % len(pages)], *table, HEAD_DIM**-0.5)
        return decode(args, None, tiling=tiling, pdl=True)

    return lambda tiling: captured(lambda number: launch(tiling, number))


# ---- splitting: `flashinfer/splitting.py`


def splitting_cases(machine: Machine, quick: bool) -> Iterator[Case]:
    """Captured prefills of Qwen3-0.6B's heads: thread blocks share the keys of a row, or do not."""
    geometry = Geometry(16, KV_HEADS, HEAD_DIM, PAGE_SIZE, -1, 0.0, torch.bfloat16, torch.bfloat16)
    for rows in (1, 8):
        for tokens in (128, 1024) if quick else (16, 64, 128, 256, 512, 1024, 2048):
            for stored in (0, 512) if quick else (0, 128, 512, 1024, 2048):
                queries, lengths = [tokens] * rows, [tokens + stored] * rows
                chosen = "split" if worth_splitting(geometry, queries, lengths, machine.processors) else "whole"
                prepare = lambda given=(rows, tokens, stored): prefill_timer(geometry, *given)  # noqa: E731
                name = f"B={rows}, {tokens} new tokens after {stored}"
                yield Case("splitting", name, {"split": SPLIT, "whole": WHOLE}, chosen, prepare)


def prefill_timer(geometry: Geometry, rows: int, tokens: int, stored: int) -> Callable[[int], float]:
    backend, device = backend_named("flashinfer"), torch.device("cuda")
    count = -(-(tokens + stored) // PAGE_SIZE)
    columns = [
        [row * tokens for row in range(rows + 1)],
        [row * count for row in range(rows + 1)],
        list(range(rows * count)),
        [(tokens + stored - 1) % PAGE_SIZE + 1] * rows,
    ]
    host = PageTable(*(torch.tensor(column, dtype=torch.int32) for column in columns))
    table = [column.cuda() for column in host]
    pages = copies_of(torch.zeros(rows * count, 2, KV_HEADS, PAGE_SIZE, HEAD_DIM, device="cuda", dtype=torch.bfloat16))
    query = random(rows * tokens, geometry.query_heads, HEAD_DIM)

    def microseconds(variant: int) -> float:
        captured_as = CapturedLaunch(rows * tokens, rows, variant)
        workspace = backend.workspace(device, backend.workspace_bytes([geometry], device, captured_as))
        plan = backend.new_plan(workspace, backend.plan_bytes([geometry], device, rows * tokens, rows))
        planned = (host.qo_indptr, host.indptr, host.last_page_len, workspace.buffer, *geometry)
        plan_paged_attention(plan.tensor, plan.numbers, *planned, captured_as.tokens, variant)
        given = (*table, plan.tensor, workspace.buffer, HEAD_DIM**-0.5)
        return captured(lambda number: paged_attention(query, pages[number % len(pages)], *given))

    return microseconds


# ---- captured: `execution/graphs/captured_shapes.py`


def captured_cases(_: Machine, quick: bool) -> Iterator[Case]:
    """Prefills of one row: launched by the host as they are, or captured and padded to a multiple of something."""
    for model, (hidden, query, kv, intermediate) in MODELS.items():
        weights = hidden * (2 * query + 2 * kv + 3 * intermediate)
        shapes = CapturedShapes(8, weights, max_row_tokens=40_960, max_tokens=8192)
        for tokens in (20, 200, 1000) if quick else (10, 20, 40, 70, 130, 200, 300, 500, 700, 1000, 1500, 2500, 4000):
            shape = shapes.smallest(tokens, 2)
            padded = {-(-tokens // multiple) * multiple for multiple in (16, 64, 128, 256)}
            if shape is not None:
                padded.add(shape.tokens)
            candidates = {f"captured, T={size}": (size, True) for size in sorted(padded)}
            candidates["launched"] = (tokens, False)
            chosen = "launched" if shape is None else f"captured, T={shape.tokens}"
            prepare = lambda sizes=(hidden, query, kv, intermediate): layer_timer(*sizes)  # noqa: E731
            yield Case("captured", f"{model}, T={tokens}", candidates, chosen, prepare)


def layer_timer(hidden: int, query: int, kv: int, intermediate: int) -> Callable[[tuple[int, bool]], float]:
    """A stand-in for a layer with about as many launches as a compiled one, without rotary embedding and pages."""
    functional = torch.nn.functional
    qkv, out, norm = random(query + 2 * kv, hidden), random(hidden, query), random(hidden)
    gate_up, down = random(2 * intermediate, hidden), random(hidden, intermediate)

    def layer(states: Tensor) -> Tensor:
        heads = functional.linear(functional.rms_norm(states, (hidden,), norm), qkv)
        q, k, v = (part.unflatten(1, (-1, HEAD_DIM)).transpose(0, 1)[None] for part in heads.split([query, kv, kv], 1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        states = states + functional.linear(attended[0].transpose(0, 1).flatten(1), out)
        gate, up = functional.linear(functional.rms_norm(states, (hidden,), norm), gate_up).chunk(2, 1)
        return states + functional.linear(functional.silu(gate) * up, down)

    def microseconds(candidate: tuple[int, bool]) -> float:
        tokens, is_captured = candidate
        states = random(tokens, hidden)
        if is_captured:
            return captured(lambda _: layer(states))
        layers = range(LAUNCHES)
        return by_the_clock(lambda: [layer(states) for _ in layers], torch.cuda.synchronize) / LAUNCHES

    return microseconds


# ---- cpu-linear: `linear/linear.py`


def cpu_linear_cases(_: Machine, quick: bool) -> Iterator[Case]:
    """The rows or the weight as the left factor, in torch's BLAS, or oneDNN."""
    weights = [(576, 576), (1536, 576), (49_152, 576)]
    more_weights = [(960, 576), (576, 1536), (4096, 1024), (8192, 1024), (12_288, 4096)]
    products = (linear.rows_left, linear.weight_left, onednn.linear)
    for outputs, inputs in weights if quick else weights + more_weights:
        for count in (1, 4, 8, 16) if quick else (1, 2, 3, 4, 5, 6, 8, 12, 16, 64, 256):
            prepare = lambda given=(count, outputs, inputs): cpu_linear_timer(*given)  # noqa: E731
            name, chosen = f"N={outputs}, K={inputs}, M={count}", linear.product_on_cpu(count, inputs).__name__
            yield Case("cpu-linear", name, {product.__name__: product for product in products}, chosen, prepare)


def cpu_linear_timer(count: int, outputs: int, inputs: int) -> Callable[[Callable[[Tensor, Tensor], Tensor]], float]:
    rows, weight = torch.randn(count, inputs), torch.randn(outputs, inputs)
    copies = 1 + LARGER_THAN_CACHES // (weight.numel() * weight.element_size())
    weights = itertools.cycle([weight, *(weight.clone() for _ in range(copies - 1))])
    return lambda product: by_the_clock(lambda: product(rows, next(weights)), lambda: None, seconds=0.05)


SWEEPS: dict[str, Callable[[Machine, bool], Iterator[Case]]] = {
    "linear": linear_cases,
    "normed": normed_cases,
    "chained": chained_cases,
    "attention": attention_cases,
    "splitting": splitting_cases,
    "captured": captured_cases,
    "cpu-linear": cpu_linear_cases,
}


# ---- what is printed


def table_of(rule: str, fits: Sequence[Fit]) -> Table:
    """Cases, the worst choice first."""
    right = sum(fit.slower <= CLOSE for fit in fits)
    table = Table(title=f"{rule}: {right} of {len(fits)} choices within {CLOSE:.0%} of the best", title_justify="left")
    for column in ("case", "best", "µs", "chosen", "µs", "slower"):
        table.add_column(column, justify="right" if column in ("µs", "slower") else "left")
    for fit in sorted(fits, key=lambda fit: -fit.slower):
        best, chosen = (f"{fit.times[name]:.1f}" for name in (fit.best, fit.chosen))
        table.add_row(fit.case, fit.best, best, fit.chosen, chosen, f"{fit.slower:.1%}")
    return table


def machine_of_this_gpu() -> Machine:
    properties = torch.cuda.get_device_properties(0)
    return Machine(properties.multi_processor_count, properties.shared_memory_per_multiprocessor)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--only", default=",".join(SWEEPS), help=f"some of {','.join(SWEEPS)}")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, fewer candidates")
    parser.add_argument("--json", type=Path, help="write all times here")
    given = parser.parse_args(arguments)
    rules = given.only.split(",")
    if unknown := set(rules) - SWEEPS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: not among {', '.join(SWEEPS)}")
    if not torch.cuda.is_available() and rules != ["cpu-linear"]:
        parser.error("torch sees no CUDA device; without one there is --only cpu-linear")
    machine = machine_of_this_gpu() if torch.cuda.is_available() else Machine()
    fits = fits_of(rules, machine, given.quick)
    console = Console()
    for rule in rules:
        console.print(table_of(rule, [fit for fit in fits if fit.rule == rule]))
    if given.json is not None:
        content = {"machine": name_of(machine), "fits": [fit._asdict() for fit in fits]}
        given.json.write_text(json.dumps(content, indent=1))


def fits_of(rules: Sequence[str], machine: Machine, quick: bool) -> list[Fit]:
    cases = [case for rule in rules for case in SWEEPS[rule](machine, quick)]
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress, torch.inference_mode():
        task = progress.add_task("measuring", total=len(cases))
        fits = []
        for case in cases:
            progress.update(task, description=f"{case.rule}: {case.name}")
            fits.append(measure(case))
            progress.advance(task)
    return fits


def name_of(machine: Machine) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"gpu": gpu, "torch": torch.__version__, **machine._asdict()}


if __name__ == "__main__":
    main()
