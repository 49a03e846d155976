"""Our ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attention_ops.inputs import PAGE_SIZE, Inputs, Launch, Part
from attention_ops.large_pages import LARGE_PAGE, in_our_layout
from compiled_llm_ops import (
    Geometry,
    SharedRun,
    cascade_attention,
    cascade_tables,
    decode_attention,
    paged_attention,
    plan_paged_attention,
)
from compiled_llm_ops.backends import backend_for, backend_named
from compiled_llm_ops.protocol import Backend, CapturedLaunch


def decode(inputs: Inputs) -> Launch:
    """The Triton kernel of decode steps, which needs no plan; it writes the newest key and value of each row, too."""
    return _decode(inputs, inputs.whole)


def planned(inputs: Inputs) -> Launch | str:
    """All rows as one planned prefill."""
    return _planned(inputs, inputs.whole)


def planned_for_graphs(inputs: Inputs) -> Launch | str:
    """The same as the engine plans launches that are captured, of which only the batch may change."""
    return _planned(inputs, inputs.whole, in_graphs=True)


def by_triton(inputs: Inputs) -> Launch | str:
    """All rows by the backend `"triton"`, which plans nothing."""
    return _planned_by("triton", inputs)


def by_flash_attn(inputs: Inputs) -> Launch | str:
    """All rows by the backend `"flash-attn"`: what it writes for each launch counts, too."""
    return _planned_by("flash-attn", inputs)


def by_torch(inputs: Inputs) -> Launch | str:
    """All rows by the backend `"torch"`, likewise."""
    return _planned_by("torch", inputs)


def cascade(inputs: Inputs) -> Launch:
    """Rows of one new token, which read together what they share; it writes as `decode` does."""
    part, pages = inputs.whole, inputs.pages
    rows, (key, value), indices = len(part.rows), inputs.newest(part), inputs.with_room(part)
    on_cuda = inputs.device.type == "cuda"
    processors = torch.cuda.get_device_properties(inputs.device).multi_processor_count if on_cuda else 1
    runs = [SharedRun(tuple(range(rows)), 0, inputs.case.shared // PAGE_SIZE)]
    max_items, max_parts = max(128, 2 * rows), max(512, 8 * rows)
    sizes = (PAGE_SIZE, inputs.heads.query, inputs.heads.kv, processors, max_items, max_parts)
    made = cascade_tables(runs, part.host.indptr[:-1].tolist(), *sizes)
    tables = [torch.from_numpy(table).to(inputs.device) for table in made]
    starts = part.device.indptr[:-1]

    def launch(number: int) -> Sequence[Tensor]:
        table = (pages[number % len(pages)], starts, part.lengths, indices, *tables, max_parts)
        return (cascade_attention(part.query, key, value, *table, inputs.scale, overlap=True),)

    return launch


def decode_then_planned(inputs: Inputs) -> Launch | str:
    """Two launches: rows of one new token, then the chunk."""
    if inputs.one_each is None or inputs.others is None:
        return "it is for rows of one new token beside others"
    first, then = _decode(inputs, inputs.one_each), _planned(inputs, inputs.others)
    return then if isinstance(then, str) else lambda number: (*first(number), *then(number))


def _decode(inputs: Inputs, part: Part) -> Launch:
    (key, value), indices = inputs.newest(part), inputs.with_room(part)
    starts, pages = part.device.indptr[:-1], inputs.pages

    def launch(number: int) -> Sequence[Tensor]:
        table = (pages[number % len(pages)], starts, part.lengths, indices)
        return (decode_attention(part.query, key, value, *table, inputs.scale, overlap=True),)

    return launch


def needs_cuda(inputs: Inputs) -> bool:
    return inputs.device.type != "cuda"


def _planned_by(name: str, inputs: Inputs) -> Launch | str:
    if needs_cuda(inputs):
        return f"the backend {name} needs CUDA"
    return _planned(inputs, inputs.whole, backend_named(name))


def _planned(inputs: Inputs, part: Part, backend: Backend | None = None, in_graphs: bool = False) -> Launch | str:
    device = inputs.device
    backend = backend or backend_for("auto", device.type).backend
    if device.type == "cuda" and (problems := backend.installation.problems()):
        return "; ".join(problems)
    geometry = Geometry(*inputs.heads, PAGE_SIZE, -1, 0.0, inputs.dtype, inputs.dtype)
    pages, host, table = inputs.pages, part.host, part.device
    if backend.missing_kernel(geometry) is not None:
        geometry = geometry._replace(page_size=LARGE_PAGE)
        if reason := backend.missing_kernel(geometry):
            return reason
        pages, host, table = in_our_layout(inputs, part)
    tokens, rows = len(part.query), len(part.rows)
    sizes = [row.new for row in part.rows], [row.keys for row in part.rows]
    captured = CapturedLaunch(tokens, rows, backend.best_variant([geometry], *sizes, device)) if in_graphs else None
    workspace = backend.workspace(device, backend.workspace_bytes([geometry], device, captured))
    size = backend.plan_bytes([geometry], device, tokens, rows)
    plan = backend.new_plan(workspace, size)
    planned: tuple[Any, ...] = (host.qo_indptr, host.indptr, host.last_page_len, workspace.buffer, *geometry)
    how = () if captured is None else (captured.tokens, captured.variant)
    plan_paged_attention(plan.tensor, plan.numbers, *planned, *how)

    def launch(number: int) -> Sequence[Tensor]:
        copy = pages[number % len(pages)]
        return (paged_attention(part.query, copy, *table, plan.tensor, workspace.buffer, inputs.scale),)

    return launch
