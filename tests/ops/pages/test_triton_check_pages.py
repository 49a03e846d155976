"""The kernel that checks tags of pages, under Triton's interpreter on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.ops.interpreting import interpreted, needs_triton
from support.ops.page_tags import CHAIN_ADOPTED
from support.ops.tagged_rows import rows_that_begin_alike, some_rows


@pytest.mark.drawn
@interpreted
@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("packed", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize("block", [8, 512])
def test_the_kernel_does_as_the_op_on_a_cpu(
    packed: bool, block: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.ops import check_pages_kernel as kernels
    from support.ops.check_pages import check_pages

    for number in range(6):
        rows = rows_that_begin_alike() if packed and number == 0 else some_rows(seed + number, packed)
        rng = np.random.default_rng(seed + number)
        if number % 3:
            rows.tags[rng.choice(rows.pages[0]), rng.integers(rows.size), rng.integers(2)] += 1
        if number % 4 == 3:
            rows.pages[-1][rng.integers(len(rows.pages[-1]))] = int(rng.choice([-3, 10_000]))
        if number % 5 == 4:
            rows.chains[1] = CHAIN_ADOPTED + len(rows.tokens[0]) - rows.new[0] + int(rng.integers(2))
        expected, args = rows.arguments(packed), rows.arguments(packed)
        check_pages(*expected)
        kernels.check(args, kernels.DIVISION._replace(slots=block))
        for name in ("tags", "chains", "faults"):
            assert torch.equal(getattr(args, name), getattr(expected, name)), (name, seed + number)
