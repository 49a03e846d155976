"""The kernel that writes block tables, under Triton's interpreter; it is compiled in `test_kernels_compile.py`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compiled_llm_ops.contracts import PagedAttention
from compiled_llm_ops.varlen.rows import BlockTables
from support.ops.interpreting import interpreted, needs_triton
from support.ops.varlen_packages import assert_block_tables, random_table

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]


def written(args: PagedAttention, block: int) -> BlockTables:
    """By the kernel, a block of so many numbers at a time."""
    from compiled_llm_ops.kernels.attention import block_tables

    rows = len(args.last_page_len)
    sizes = (rows,), (rows + 1,), (rows, len(args.indices))
    tables = BlockTables(*(torch.full(size, -1, dtype=torch.int32) for size in sizes))
    packed = (args.indptr, args.indices, args.last_page_len)
    block_tables.write_block_tables(*packed, args.pages.shape[3], *tables, block=block)
    return tables


@interpreted
@pytest.mark.parametrize("block", [4, 128])
def test_lines_are_those_of_the_packed_table(block: int, seed: int) -> None:
    """Rows without pages, and more rows and pages than are read at a time."""
    rng = np.random.default_rng(seed)
    for _ in range(3):
        args, lengths = random_table(rng)
        assert_block_tables(written(args, block), args, lengths)
