"""Backends as another package brings them: one whose decode steps need no plan, and one that plans them.

The first has a decode kernel of its own, in plain PyTorch, that shares no code with ours.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compiled_llm_ops.contracts import DecodeAttention, PlannedBatch
from compiled_llm_ops.library import define_op, kernel_of
from compiled_llm_ops.protocol import DecodeOps, EmptyWorkspace
from compiled_llm_ops.reference.backend import Reference, ReferencePlan

launched: list[int] = []
"""The rows of each launch of the decode kernel."""

planned: list[int] = []
"""The rows of each plan of ``PLANNED``."""


def _attend(args: DecodeAttention) -> tuple[Tensor, Tensor]:
    (rows, heads, head_dim), (kv_heads, page_size) = args.query.shape, args.pages.shape[2:4]
    launched.append(rows)
    assert args.cos is None, "norm and rotary embedding are left to others"
    out, lse = args.query.new_empty(args.query.shape), args.query.new_empty((rows, heads), dtype=torch.float32)
    for row, (start, length) in enumerate(zip(args.starts.tolist(), args.lengths.tolist(), strict=True)):
        tokens = torch.arange(length)
        page, slot = args.indices[start + tokens // page_size], tokens % page_size
        args.pages[page[-1], 0, :, slot[-1], :head_dim] = args.key[row]
        args.pages[page[-1], 1, :, slot[-1], :head_dim] = args.value[row]
        keys, values = (args.pages[page, part, :, slot, :head_dim] for part in (0, 1))
        query = args.query[row].view(kv_heads, heads // kv_heads, head_dim)
        logits = torch.einsum("kgd,nkd->kgn", query, keys) * args.scale
        if args.logits_soft_cap:
            logits = args.logits_soft_cap * torch.tanh(logits / args.logits_soft_cap)
        if args.window_left >= 0:
            logits[..., : max(0, length - 1 - args.window_left)] = -math.inf
        out[row] = torch.einsum("kgn,nkd->kgd", logits.softmax(-1), values).reshape(heads, head_dim)
        lse[row] = logits.logsumexp(-1).flatten() / math.log(2)
    return out, lse


_library = torch.library.Library("other_kernels", "DEF")


@define_op(DecodeAttention, writes=("pages", "saturated"), library=_library)
def decode(args: DecodeAttention) -> Tensor:
    return args.query.new_empty(args.query.shape)


@define_op(DecodeAttention, writes=("pages", "saturated"), library=_library)
def decode_lse(args: DecodeAttention) -> tuple[Tensor, Tensor]:
    return args.query.new_empty(args.query.shape), args.query.new_empty(args.query.shape[:2], dtype=torch.float32)


kernel_of(decode, "CPU")(lambda args: _attend(args)[0])
kernel_of(decode_lse, "CPU")(_attend)


class Unplanned(Reference):
    """Decodes with a kernel that needs no plan, and knows nothing of fp8."""

    kv_dtypes = frozenset()

    def decode_ops(self, device: str) -> DecodeOps:
        ops = torch.ops.other_kernels
        return DecodeOps(ops.decode.default, ops.decode_lse.default)


class NotedPlan(ReferencePlan):
    """Notes what is planned."""

    def decide(self, batch: PlannedBatch) -> None:
        super().decide(batch)
        planned.append(len(batch.last_page_len))


class Planned(Reference):
    """Plans decode steps, too."""

    def decode_ops(self, device: str) -> DecodeOps | None:
        return None

    def new_plan(self, workspace: EmptyWorkspace, nbytes: int) -> ReferencePlan:
        return NotedPlan(workspace.buffer.device)


UNPLANNED, PLANNED = Unplanned(), Planned()
