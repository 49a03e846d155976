"""The check of pages in a decode step: `kernels/attention/check_pages.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from compiled_llm_ops.contracts.page_checks import CHAIN_KNOWN, CheckPages
from compiled_llm_ops.kernels.attention.check_pages_tiling import DIVISION, Division
from fitting.cases import PAGE_SIZE, Case, Machine, case_of
from fitting.measuring import captured


def page_check_cases(_: Machine, quick: bool) -> Iterator[Case]:
    """Steps of one token a row, over 32,768 tokens in all, and shorter ones."""
    sizes = (
        itertools.product((256, 512, 1024), (64, 128, 256), (16, 64))
        if quick
        else itertools.product((128, 256, 512, 1024, 2048), (64, 128, 256, 512), (8, 16, 32, 64))
    )
    divisions = [Division(*size) for size in sizes]
    shapes = [(1, 32_768), (8, 4096), (64, 512), (256, 128)]
    for rows, length in shapes if quick else [*shapes, (1, 1024), (8, 512), (64, 2048), (256, 1024)]:
        prepare = lambda given=(rows, length): check_timer(*given)  # noqa: E731
        yield case_of("page-checks", f"B={rows}, {length} tokens each", divisions, DIVISION, prepare)


def check_timer(rows: int, length: int) -> Callable[[Division], float]:
    """All tags are 0, as are the chains, which each launch sets anew: its time is part of every candidate's."""
    from compiled_llm_ops.kernels.attention.check_pages import check

    count = length // PAGE_SIZE + 1
    starts = torch.arange(rows, dtype=torch.int32, device="cuda") * count
    lengths = torch.full((rows,), length, dtype=torch.int32, device="cuda")
    indices = torch.randperm(rows * count, device="cuda").int()
    tags = torch.zeros(rows * count, PAGE_SIZE, 2, dtype=torch.int32, device="cuda")
    chains, faults = (torch.zeros(size, dtype=torch.int64, device="cuda") for size in (rows, 2))
    tokens, slots = torch.ones(rows, dtype=torch.int64, device="cuda"), torch.arange(rows, device="cuda")
    numbers = torch.arange(rows, dtype=torch.int32, device="cuda")
    args = CheckPages(tags, chains, faults, tokens, starts, lengths, indices, slots, numbers, None)

    def launch(division: Division) -> None:
        chains.fill_(CHAIN_KNOWN)
        check(args, division)

    return lambda division: captured(lambda _: launch(division))
