"""Our ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attention_ops.inputs import PAGE_SIZE, Inputs, Launch, Part
from compiled_llm_ops import Geometry, decode_attention, paged_attention, plan_paged_attention
from compiled_llm_ops.backends import backend_for
from compiled_llm_ops.protocol import CapturedLaunch


def decode(inputs: Inputs) -> Launch:
    """The Triton kernel of decode steps, which needs no plan; it writes the newest key and value of each row, too."""
    return _decode(inputs, inputs.whole)


def planned(inputs: Inputs) -> Launch | str:
    """All rows as one planned prefill."""
    return _planned(inputs, inputs.whole)


def planned_for_graphs(inputs: Inputs) -> Launch | str:
    """The same as the engine plans launches that are captured, of which only the batch may change."""
    return _planned(inputs, inputs.whole, in_graphs=True)


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


def _planned(inputs: Inputs, part: Part, in_graphs: bool = False) -> Launch | str:
    backend, device = backend_for("auto", inputs.device.type).backend, inputs.device
    if device.type == "cuda" and (problems := backend.installation.problems()):
        return "; ".join(problems)
    geometry = Geometry(*inputs.heads, PAGE_SIZE, -1, 0.0, inputs.dtype, inputs.dtype)
    tokens, rows = len(part.query), len(part.rows)
    sizes = [row.new for row in part.rows], [row.keys for row in part.rows]
    captured = CapturedLaunch(tokens, rows, backend.best_variant([geometry], *sizes, device)) if in_graphs else None
    workspace = backend.workspace(device, backend.workspace_bytes([geometry], device, captured))
    size = backend.plan_bytes([geometry], device, tokens, rows)
    plan, host, pages = backend.new_plan(workspace, size), part.host, inputs.pages
    planned: tuple[Any, ...] = (host.qo_indptr, host.indptr, host.last_page_len, workspace.buffer, *geometry)
    how = () if captured is None else (captured.tokens, captured.variant)
    plan_paged_attention(plan.tensor, plan.numbers, *planned, *how)

    def launch(number: int) -> Sequence[Tensor]:
        copy = pages[number % len(pages)]
        return (paged_attention(part.query, copy, *part.device, plan.tensor, workspace.buffer, inputs.scale),)

    return launch
