"""flash-attn 2 over pages of 256 tokens, the smallest that it takes: the same keys and values in another order."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from cold_launches import copies_of
from torch import Tensor

from attention_ops.inputs import MOST_COPIES, Inputs, Launch, Part
from compiled_llm_ops.plain_attention import gather

LARGE_PAGE = 256


def with_table(inputs: Inputs) -> Launch | str:
    """`flash_attn_with_kvcache` if all rows have one new token, and `flash_attn_varlen_func` otherwise."""
    if needs_cuda(inputs):
        return "flash-attn needs CUDA"
    try:
        flash_attn = importlib.import_module("flash_attn")
    except ImportError as error:
        return f"flash-attn does not import: {error}"
    pages, table = large_pages(inputs, inputs.whole)
    copies = copies_of(pages, most=MOST_COPIES)
    attend = _decode if inputs.others is None else _varlen
    return attend(flash_attn, inputs, copies, table)


def needs_cuda(inputs: Inputs) -> bool:
    return inputs.device.type != "cuda"


def _decode(flash_attn: Any, inputs: Inputs, copies: list[Tensor], table: Tensor) -> Launch:
    query, lengths = inputs.whole.query[:, None], inputs.whole.lengths
    given = {"cache_seqlens": lengths, "block_table": table, "softmax_scale": inputs.scale, "causal": True}

    def launch(number: int) -> Sequence[Tensor]:
        out = flash_attn.flash_attn_with_kvcache(query, *copies[number % len(copies)], **given)
        return (out[:, 0],)

    return launch


def _varlen(flash_attn: Any, inputs: Inputs, copies: list[Tensor], table: Tensor) -> Launch:
    part = inputs.whole
    ends = list(accumulate((row.keys for row in part.rows), initial=0))
    given = {
        "cu_seqlens_q": part.device.qo_indptr,
        "cu_seqlens_k": torch.tensor(ends, dtype=torch.int32, device=inputs.device),
        "max_seqlen_q": max(row.new for row in part.rows),
        "max_seqlen_k": max(row.keys for row in part.rows),
        "softmax_scale": inputs.scale,
        "causal": True,
        "block_table": table,
    }
    return lambda number: (flash_attn.flash_attn_varlen_func(part.query, *copies[number % len(copies)], **given),)


def large_pages(inputs: Inputs, part: Part) -> tuple[Tensor, Tensor]:
    """Return keys and values ``[2, P', 256, K, D]``, and the page numbers of rows ``[B, n]`` int32, 0 where unused."""
    counts = [-(-row.keys // LARGE_PAGE) for row in part.rows]
    first, dim, indptr = 0, inputs.heads.dim, part.host.indptr.tolist()
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).to(inputs.device)
    size = (2, sum(counts), LARGE_PAGE, inputs.heads.kv, dim)
    pages = torch.zeros(size, dtype=inputs.dtype, device=inputs.device)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=inputs.device)
    for row, count in enumerate(counts):
        own = order[first : first + count]
        numbers = part.device.indices[indptr[row] : indptr[row + 1]]
        both = torch.stack(gather(inputs.pages[0], numbers, dim, inputs.dtype)).transpose(1, 2)  # [2, L', K, D]
        padded = torch.nn.functional.pad(both, (0, 0, 0, 0, 0, count * LARGE_PAGE - both.shape[1]))
        pages[:, own] = padded.unflatten(1, (count, LARGE_PAGE))
        table[row, :count] = own
        first += count
    return pages, table
