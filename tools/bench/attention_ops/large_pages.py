"""The same keys and values in pages of 256 tokens, the smallest that flash-attn 2 and PyTorch take."""

from __future__ import annotations

from itertools import accumulate

import torch
from cold_launches import copies_of
from torch import Tensor

from attention_ops.inputs import MOST_COPIES, Inputs, Part
from compiled_llm_ops.contracts import PageTable
from compiled_llm_ops.plain_attention import gather

LARGE_PAGE = 256


def large_pages(inputs: Inputs, part: Part) -> tuple[Tensor, Tensor]:
    """Return keys and values ``[2, P', 256, K, D]``, and the page numbers of rows ``[B, n]`` int32, 0 where unused."""
    counts, shared = [-(-row.keys // LARGE_PAGE) for row in part.rows], inputs.case.shared // LARGE_PAGE
    first, dim, indptr = shared, inputs.heads.dim, part.host.indptr.tolist()
    used = shared + sum(count - shared for count in counts)
    order = torch.randperm(used, generator=torch.Generator().manual_seed(0)).to(inputs.device)
    size = (2, used, LARGE_PAGE, inputs.heads.kv, dim)
    pages = torch.zeros(size, dtype=inputs.dtype, device=inputs.device)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=inputs.device)
    for row, count in enumerate(counts):
        own = torch.cat([order[:shared], order[first : first + count - shared]])
        numbers = part.device.indices[indptr[row] : indptr[row + 1]]
        both = torch.stack(gather(inputs.pages[0], numbers, dim, inputs.dtype)).transpose(1, 2)  # [2, L', K, D]
        padded = torch.nn.functional.pad(both, (0, 0, 0, 0, 0, count * LARGE_PAGE - both.shape[1]))
        pages[:, own] = padded.unflatten(1, (count, LARGE_PAGE))
        table[row, :count] = own
        first += count - shared
    return pages, table


def in_our_layout(inputs: Inputs, part: Part) -> tuple[list[Tensor], PageTable, PageTable]:
    """Return copies of pages ``[P', 2, K, 256, D]``, and their packed table on the host and on the device."""
    both, table = large_pages(inputs, part)
    counts = [-(-row.keys // LARGE_PAGE) for row in part.rows]
    indptr = torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32)
    last = torch.tensor([(row.keys - 1) % LARGE_PAGE + 1 for row in part.rows], dtype=torch.int32)
    numbers = torch.cat([own[:count] for own, count in zip(table, counts, strict=True)])
    host = PageTable(part.host.qo_indptr, indptr, numbers.cpu(), last)
    device = PageTable(*(column.to(inputs.device) for column in host))
    pages = both.permute(1, 0, 3, 2, 4).contiguous()
    return copies_of(pages, most=MOST_COPIES), host, device
