"""`torch.nn.attention.varlen` of torch 2.13, over pages of 256 tokens."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from cold_launches import copies_of
from torch import Tensor

from attention_ops.inputs import MOST_COPIES, Inputs, Launch
from attention_ops.large_pages import large_pages
from compiled_llm_ops.backends import backend_named


def with_table(inputs: Inputs) -> Launch | str:
    """`varlen_attn`, which splits rows only where all have one new token: parts of others are not added up rightly."""
    if needs_cuda(inputs):
        return "torch.nn.attention.varlen needs CUDA"
    if problems := backend_named("torch").installation.problems():
        return "; ".join(problems)
    varlen, part = importlib.import_module("torch.nn.attention.varlen"), inputs.whole
    pages, table = large_pages(inputs, part)
    copies = copies_of(pages, most=MOST_COPIES)
    ends = list(accumulate((row.keys for row in part.rows), initial=0))
    most = max(row.new for row in part.rows), max(row.keys for row in part.rows)
    starts = part.device.qo_indptr, torch.tensor(ends, dtype=torch.int32, device=inputs.device)
    single = inputs.others is None
    given: dict[str, Any] = {
        "scale": inputs.scale,
        "window_size": (-1, -1) if single else (-1, 0),  # without one, query heads are folded into the one token
        "enable_gqa": True,
        "seqused_k": part.lengths,
        "block_table": table,
        "num_splits": None if single else 1,
    }

    def launch(number: int) -> Sequence[Tensor]:
        return (varlen.varlen_attn(part.query, *copies[number % len(copies)], *starts, *most, **given),)

    return launch


def needs_cuda(inputs: Inputs) -> bool:
    return inputs.device.type != "cuda"
