"""flash-attn: version 2 over pages of 256 tokens, the smallest that it takes, and version 3 over views of our own."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from cold_launches import copies_of
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attention_ops.inputs import MOST_COPIES, Inputs, Launch
from attention_ops.large_pages import large_pages


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


def version_3(inputs: Inputs) -> Launch | str:
    """`flash_attn_with_kvcache` of flash-attn 3 for rows of any kind, which reads pages of any size and any strides."""
    if needs_cuda(inputs):
        return "flash-attn 3 needs CUDA"
    try:
        flash_attn = importlib.import_module("flash_attn_interface")
    except ImportError as error:
        return f"flash-attn 3 does not import: {error}"
    part = inputs.whole
    numbers = part.host.indices.split(part.host.indptr.diff().tolist())
    given = {
        "cache_seqlens": part.lengths,
        "page_table": pad_sequence(numbers, batch_first=True).to(inputs.device),
        "cu_seqlens_q": part.device.qo_indptr,
        "max_seqlen_q": max(row.new for row in part.rows),
        "softmax_scale": inputs.scale,
        "causal": True,
    }

    def launch(number: int) -> Sequence[Tensor]:
        keys, values = inputs.pages[number % len(inputs.pages)].transpose(2, 3).unbind(1)
        return (flash_attn.flash_attn_with_kvcache(part.query, keys, values, **given),)

    return launch


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
