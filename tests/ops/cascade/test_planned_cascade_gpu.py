"""Cascade attention by FlashInfer's plans on a GPU: as each row alone, and one captured launch for all groupings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm_ops import plan_paged_attention, planned_cascade_attention, planned_cascade_attention_lse
from compiled_llm_ops.backends import backend_named
from compiled_llm_ops.contracts import PlannedCascadeAttention
from support.gpu import by_dtype, close, needs_cuda, seeded
from support.ops.cascade_rows import CascadeRows
from support.ops.fp8_pages import fp8_cascade, fp8_written, scales_of

pytestmark = [pytest.mark.gpu, needs_cuda]

MANY = [(range(70), 40), (range(35), 20), (range(35, 70), 9), (range(4, 9), 33), (range(71, 73), 100)]
TAILS = [1 + 37 * row % 300 for row in range(76)]
SIZES: list[dict[str, int]] = [
    {"group": 1, "head_dim": 128},
    {"group": 4, "head_dim": 64},
    {"group": 7, "head_dim": 96, "padded": 128},
    {"group": 2, "head_dim": 256},
    {"group": 3, "head_dim": 128, "page_size": 1},
]
WHOLE, SPLIT = 0, 1


class Planned:
    """FlashInfer's two plans, of rows and of runs, made through the op."""

    def __init__(self, args: PlannedCascadeAttention, *variants: int) -> None:
        """With `variants`, of rows and of runs, for captured launches."""
        self.backend, self.device = backend_named("flashinfer"), torch.device("cuda", torch.cuda.current_device())
        self.variants, self.geometry = variants, args.of_rows.geometry
        self.workspace = self.backend.workspace(self.device, 256 * 2**20)
        tokens, rows = len(args.members), max(len(args.query), len(args.run_last_page_len))
        nbytes = self.backend.plan_bytes([self.geometry], self.device, tokens, rows)
        self.owners = [self.backend.new_plan(self.workspace, nbytes) for _ in range(2)]

    def plan(self, args: PlannedCascadeAttention) -> None:
        """Plan arguments that lie on the host."""
        tables = (
            (args.qo_indptr, args.indptr, args.last_page_len),
            (args.run_qo_indptr, args.run_indptr, args.run_last_page_len),
        )
        for number, (owner, table, causal) in enumerate(zip(self.owners, tables, (True, False), strict=True)):
            captured = (int(table[0][-1]), self.variants[number]) if self.variants else (-1, -1)
            given = (owner.tensor, owner.numbers, *table, self.workspace.buffer)
            plan_paged_attention(*given, *self.geometry, *captured, causal)

    def on_gpu(self, args: PlannedCascadeAttention) -> PlannedCascadeAttention:
        moved = (value.cuda() if isinstance(value, Tensor) else value for value in args)
        of_rows, of_runs = (owner.tensor for owner in self.owners)
        return PlannedCascadeAttention(*moved)._replace(plan=of_rows, run_plan=of_runs, workspace=self.workspace.buffer)


def rows_of(seed: int, dtype: torch.dtype, runs: Any = MANY, tails: Any = TAILS, **sizes: int) -> CascadeRows:
    return CascadeRows(runs, tails, dtype=dtype, seed=seed, **{"page_size": 16, **sizes})


@seeded
@by_dtype
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
def test_each_row_has_what_it_has_alone(soft_cap: float, sizes: dict[str, int], dtype: torch.dtype, seed: int) -> None:
    rows = rows_of(seed, dtype, **sizes)
    args = rows.planned_arguments()._replace(logits_soft_cap=soft_cap)
    made = Planned(args)
    made.plan(args)
    on_device = made.on_gpu(args)
    out, lse = planned_cascade_attention_lse(*on_device)
    expected, expected_lse = rows.expected(soft_cap=soft_cap)
    close(out.float().cpu(), expected, 4e-3 if dtype is torch.float16 else 2.5e-2, "out")
    close(lse.cpu(), expected_lse, 1e-2, "lse")
    assert torch.equal(planned_cascade_attention(*on_device), out)


@seeded
@by_dtype
@pytest.mark.parametrize("kind", ["none", "both"])
def test_shared_pages_may_be_of_fp8(kind: str, dtype: torch.dtype, seed: int) -> None:
    scales = scales_of(kind, 2)
    rows, read = fp8_cascade(rows_of(seed, dtype, head_dim=128), scales)
    given = {name: scales.given[name] for name in ("key_scale", "value_scale")}
    pages = fp8_written(rows, scales).view(torch.float8_e4m3fn)
    args = rows.planned_arguments()._replace(pages=pages, **given)
    made = Planned(args)
    made.plan(args)
    out, lse = planned_cascade_attention_lse(*made.on_gpu(args))
    expected, expected_lse = read.expected()
    close(out.float().cpu(), expected, 1e-2 if dtype is torch.float16 else 4e-2, "out")
    close(lse.cpu(), expected_lse, 2e-2 if dtype is torch.float16 else 6e-2, "lse")


@seeded
@pytest.mark.parametrize("variants", [(WHOLE, SPLIT), (SPLIT, SPLIT), (WHOLE, WHOLE)], ids=str)
def test_a_captured_launch_holds_for_all_groupings_and_lengths(variants: tuple[int, int], seed: int) -> None:
    """Also where there were no runs when it was captured; there are more runs than have room in one of them."""
    groupings = [
        ([], TAILS),
        (MANY, TAILS),
        ([(range(76), 300)], [1 + row % 5 for row in range(76)]),
        ([(range(row, row + 2), 3 + row % 7) for row in range(0, 76, 2)], [1 + row * 3 for row in range(76)]),
        ([(range(10, 20), 7), (range(12, 18), 1), (range(13, 15), 90)], [9] * 76),
    ]
    batches = [rows_of(seed, torch.bfloat16, runs, tails, head_dim=128) for runs, tails in groupings]
    hosts = [rows.planned_arguments() for rows in batches]
    largest = {name: max(len(getattr(args, name)) for args in hosts) for name in ("pages", "indices", "run_indices")}

    def padded(args: PlannedCascadeAttention) -> PlannedCascadeAttention:
        """Of equal sizes in all groupings."""
        whole = {}
        for name, size in largest.items():
            value = getattr(args, name)
            whole[name] = torch.cat([value, value.new_zeros(size - len(value), *value.shape[1:])])
        return args._replace(**whole)

    made = Planned(hosts[0], *variants)
    made.plan(hosts[0])
    static = made.on_gpu(padded(hosts[0]))
    planned_cascade_attention_lse(*static)  # loaded and compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = planned_cascade_attention_lse(*static)
    ours = {"plan", "run_plan", "workspace"}
    for rows, args in [*zip(batches, hosts, strict=True)][::-1]:
        made.plan(args)
        for name, value in padded(args)._asdict().items():
            if isinstance(value, Tensor) and name not in ours:
                getattr(static, name).copy_(value)
        for result in captured:
            result.fill_(torch.nan)
        graph.replay()
        expected, expected_lse = rows.expected()
        close(captured[0].float().cpu(), expected, 2.5e-2, "out")
        close(captured[1].cpu(), expected_lse, 1e-2, "lse")
