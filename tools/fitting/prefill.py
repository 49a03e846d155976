"""Prefills: `flashinfer/splitting.py` and `compilation/graphs/captured_shapes.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from compiled_llm.compilation.graphs.captured_shapes import CapturedShapes
from compiled_llm_ops import paged_attention, plan_paged_attention
from compiled_llm_ops.backends import backend_named
from compiled_llm_ops.contracts import Geometry, PageTable
from compiled_llm_ops.flashinfer.splitting import SPLIT, WHOLE, worth_splitting
from compiled_llm_ops.protocol import CapturedLaunch
from fitting.cases import HEAD_DIM, KV_HEADS, MODELS, PAGE_SIZE, Case, Machine, pages_of, random
from fitting.measuring import LAUNCHES, by_the_clock, captured

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
    pages = pages_of(rows * count)
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


# ---- captured: `compilation/graphs/captured_shapes.py`


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
