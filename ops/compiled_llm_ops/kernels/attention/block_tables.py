"""The Triton kernel that writes a packed page table as a block table, one line of equal width for each row."""

# Shapes: B rows, N entries of the page table, S page size, W most pages of a row.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


# One kernel for all batches: neither sizes nor addresses that come with a batch make another one of it.
@triton.jit(
    do_not_specialize=["rows", "width"],
    do_not_specialize_on_alignment=["indptr", "indices", "last_page_len", "lengths", "starts", "table"],
)
def _block_tables(
    indptr, indices, last_page_len, lengths, starts, table, rows, width, PAGE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write one row's line of the table, its tokens, and those of all rows before it."""
    row, offsets = tl.program_id(0), tl.arange(0, BLOCK)
    start = 0
    for first in range(0, row, BLOCK):
        other = first + offsets
        before = other < row
        begin, end = tl.load(indptr + other, mask=before, other=0), tl.load(indptr + other + 1, mask=before, other=0)
        tokens = (end - begin - 1) * PAGE + tl.load(last_page_len + other, mask=before, other=0)
        start += tl.sum(tl.where(end > begin, tokens, 0), 0)
    begin, end = tl.load(indptr + row), tl.load(indptr + row + 1)
    length = tl.where(end > begin, (end - begin - 1) * PAGE + tl.load(last_page_len + row), 0)
    tl.store(lengths + row, length)
    tl.store(starts + row, start)
    if row == rows - 1:
        tl.store(starts + rows, start + length)
    line = table + row.to(tl.int64) * width
    for first in range(0, end - begin, BLOCK):
        page = first + offsets
        own = page < end - begin
        tl.store(line + page, tl.load(indices + begin + page, mask=own, other=0), mask=own)


def write_block_tables(
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    page_size: int,
    lengths: Tensor,
    starts: Tensor,
    table: Tensor,
    block: int = BLOCK,
) -> None:
    """Launch what writes ``lengths`` ``[B]``, ``starts`` ``[B + 1]`` and ``table`` ``[B, W]``, all int32."""
    # W is at least the pages of any row; as many of each line as its row has are written. ``block``, a power of two, is
    # how many page numbers are copied, and rows whose tokens are added up, at a time.
    rows, width = table.shape
    if rows:
        _block_tables[(rows,)](
            indptr, indices, last_page_len, lengths, starts, table, rows, width,
            PAGE=page_size, BLOCK=block, num_warps=4,
        )  # fmt: skip
