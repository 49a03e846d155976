"""Pages that rows share, read once: `attention/cascade/kernels/tiling.py` and `attention/cascade/rule.py`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm_ops.attention.cascade.contract import CascadeAttention
from compiled_llm_ops.attention.cascade.kernels.tiling import CascadeTiling, choose_cascade_tiling
from compiled_llm_ops.attention.cascade.rule import CascadeLayer, cascade_saves
from compiled_llm_ops.attention.cascade.tables import SharedRun, cascade_tables
from fitting.cases import HEAD_DIM, KV_HEADS, PAGE_SIZE, Case, Machine, case_of, pages_of, random
from fitting.measuring import captured

TOGETHER, ALONE = "together", "each row"


class Groups(NamedTuple):
    """Rows in groups, each of which begins with keys of its own."""

    groups: int  # how many
    rows: int  # of each group
    shared: int  # keys that the rows of a group share, a multiple of the page size
    own: int  # further keys of each row, at random from half to one and a half times as many
    heads: int  # query heads

    def __str__(self) -> str:
        return f"{self.groups} x {self.rows} rows, H={self.heads}, {self.shared} shared keys and {self.own}"

    @property
    def runs(self) -> list[SharedRun]:
        pages = self.shared // PAGE_SIZE
        return [SharedRun(tuple(range(at, at + self.rows)), 0, pages) for at in range(0, self.all_rows, self.rows)]

    @property
    def all_rows(self) -> int:
        return self.groups * self.rows

    @property
    def max_items(self) -> int:
        return max(128, 2 * self.all_rows)


def cascade_cases(machine: Machine, quick: bool) -> Iterator[Case]:
    """The kernel that reads runs, beside the one that reads the rows' own keys."""
    shapes = [(1, 64, 8192, 128), (8, 8, 1024, 300), (1, 16, 2048, 128), (1, 256, 1024, 300)]
    for heads, shape in itertools.product((16, 32), shapes[:2] if quick else shapes):
        groups = Groups(*shape, heads)
        chosen = choose_cascade_tiling(KV_HEADS, HEAD_DIM, groups.max_items, machine.processors, machine.shared_memory)
        prepare = functools.partial(cascade_timer, groups, machine.processors)
        yield case_of("cascade", str(groups), cascade_tilings(groups, machine, quick), chosen, prepare)


def cascade_tilings(groups: Groups, machine: Machine, quick: bool) -> list[CascadeTiling]:
    blocks = [(64, 3), (64, 4), (128, 3)] if quick else [*itertools.product((32, 64, 128), (2, 3, 4, 5))]
    return [
        CascadeTiling(max(1, min(groups.max_items, each * machine.processors // KV_HEADS)), block, stages, 4)
        for each, (block, stages) in itertools.product((1, 2), blocks)
        if 4 * block * HEAD_DIM * stages <= machine.shared_memory - 2**13
    ]


def cascade_rule_cases(machine: Machine, quick: bool) -> Iterator[Case]:
    """Whether rows read what they share together."""
    sizes = [(1, 2), (1, 8), (1, 64), (16, 4)] if quick else [(1, 2), (1, 4), (1, 16), (1, 64), (1, 256), (4, 4)]
    sizes += [] if quick else [(16, 2), (16, 4), (32, 2), (16, 16), (64, 4)]
    for heads, (count, rows), shared in itertools.product(
        (16, 32), sizes, (64, 512) if quick else (64, 256, 1024, 4096)
    ):
        for own in (128,) if quick else (32, 256):
            groups = Groups(count, rows, shared, own, heads)
            layer = CascadeLayer(heads, KV_HEADS, HEAD_DIM, 2, windowed=False)
            saves = cascade_saves(groups.runs, groups.all_rows, PAGE_SIZE, layer) > 0
            tiling = choose_cascade_tiling(
                KV_HEADS, HEAD_DIM, groups.max_items, machine.processors, machine.shared_memory
            )
            prepare = functools.partial(cascade_timer, groups, machine.processors)
            yield Case(
                "cascade-rule", str(groups), {TOGETHER: tiling, ALONE: None}, TOGETHER if saves else ALONE, prepare
            )


def cascade_timer(groups: Groups, processors: int) -> Callable[[CascadeTiling | None], float]:
    """None stands for rows that read all their keys by themselves."""
    from compiled_llm_ops.attention.cascade.attention import attend_by_kernels
    from compiled_llm_ops.attention.decode import attend_on_cuda

    chance, shared_pages = Random(0), groups.shared // PAGE_SIZE
    lengths, starts, indices, used = [], [], [], groups.groups * shared_pages
    for row in range(groups.all_rows):
        own = max(1, round(groups.own * chance.uniform(0.5, 1.5)))
        lengths.append(groups.shared + own)
        starts.append(len(indices))
        first, count = row // groups.rows * shared_pages, -(-own // PAGE_SIZE)
        indices += [*range(first, first + shared_pages), *range(used, used + count)]
        used += count
    max_parts = max(512, 8 * groups.all_rows)
    sizes = (PAGE_SIZE, groups.heads, KV_HEADS, processors, groups.max_items, max_parts)
    tables = [torch.from_numpy(table).cuda() for table in cascade_tables(groups.runs, starts, *sizes)]
    table = [torch.tensor(column, dtype=torch.int32, device="cuda") for column in (starts, lengths, indices)]
    pages = pages_of(used)
    query, (key, value) = (
        random(groups.all_rows, groups.heads, HEAD_DIM),
        random(2, groups.all_rows, KV_HEADS, HEAD_DIM),
    )

    def launch(tiling: CascadeTiling | None, number: int) -> Tensor | None:
        given = (query + 0, key, value, pages[number % len(pages)])
        args = CascadeAttention(*given, *table, *tables, max_parts, HEAD_DIM**-0.5, overlap=True)
        return (attend_on_cuda(args.whole_rows, False) if tiling is None else attend_by_kernels(args, tiling))[0]

    return lambda tiling: captured(lambda number: launch(tiling, number))
