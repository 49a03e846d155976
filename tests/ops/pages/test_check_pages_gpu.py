"""Tags of pages on a GPU: as on a CPU, replayed, and over long rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.gpu import needs_cuda, seeded
from support.ops.check_pages import PageFault, check_pages, fault_of
from support.ops.page_tags import CHAIN_KNOWN, NO_FAULT
from support.ops.tagged_rows import TaggedRows, chains_of, some_rows

pytestmark = [pytest.mark.gpu, needs_cuda]


@seeded
@pytest.mark.parametrize("packed", [False, True], ids=["decode", "prefill"])
def test_on_a_gpu_as_on_a_cpu(packed: bool, seed: int) -> None:
    for number in range(30):
        rows = some_rows(seed + number, packed)
        rng = np.random.default_rng(seed + number)
        if number % 3:
            rows.tags[rng.choice(rows.pages[0]), rng.integers(rows.size), rng.integers(2)] += 1
        if number % 4 == 3:
            rows.pages[-1][rng.integers(len(rows.pages[-1]))] = int(rng.choice([-3, 10_000]))
        expected, args = rows.arguments(packed), rows.arguments(packed, "cuda")
        check_pages(*expected)
        check_pages(*args)
        for name in ("tags", "chains", "faults"):
            assert torch.equal(getattr(args, name).cpu(), getattr(expected, name)), (name, seed + number)


@seeded
def test_a_captured_check_follows_rows_that_grow(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(150_000, size=3000).tolist()
    rows = TaggedRows([tokens], [1], 16)
    args = rows.arguments(packed=False, device="cuda")
    check_pages(*args)  # loads the kernel
    args.chains.copy_(rows.chains)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        check_pages(*args)
    for length in range(2900, 3001):
        args.lengths[0] = length
        args.tokens[0] = tokens[length - 1]
        if length == 2900:
            args.chains[1] = CHAIN_KNOWN + chains_of(tokens)[2899]
        graph.replay()
    assert args.faults.tolist() == [0, NO_FAULT]
    assert int(args.chains[1]) == CHAIN_KNOWN + chains_of(tokens)[-1]
    args.tags[rows.pages[0][100], 3] += 1
    graph.replay()
    count, key = args.faults.tolist()
    assert count >= 2
    assert fault_of(key) == PageFault(101, rows.pages[0][100], 1603)
