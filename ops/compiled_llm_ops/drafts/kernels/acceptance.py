"""The CUDA kernel of ``accept_drafts``, in Triton."""

# Shapes: B rows, q tokens sampled in each.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm_ops.contracts.sampling import COUNTED, FOLLOWING, MAX_FOLLOWED
from compiled_llm_ops.drafts.contracts import NOT_ACCEPTED, NOT_DRAFTED, AcceptDrafts

_NOT_ACCEPTED, _NOT_DRAFTED = tl.constexpr(NOT_ACCEPTED), tl.constexpr(NOT_DRAFTED)
_COUNTED, _FOLLOWING, _MAX_FOLLOWED = tl.constexpr(COUNTED), tl.constexpr(FOLLOWING), tl.constexpr(MAX_FOLLOWED)
_MAX_COUNTED = tl.constexpr(2**15 - 1)


def accept_drafts(args: AcceptDrafts) -> Tensor:
    """Launch the kernel; ``args`` are checked."""
    sampled = args.sampled.contiguous()
    rows, new = sampled.shape
    tokens = torch.empty_like(sampled)
    given = (sampled, args.drafts.contiguous(), *(own.contiguous() for own in args[2:5]), *args[5:])
    _accept_drafts[(rows,)](*given, tokens, args.counts.shape[1], new, NEW=triton.next_power_of_2(new), num_warps=1)
    return tokens


@triton.jit
def _accept_drafts(
    sampled, drafts, offered, slots, positions, adjustments, next_token, counts, recent, tokens, vocabulary, new,
    NEW: tl.constexpr,
):  # fmt: skip
    """Keep the tokens of one row as far as drafts are right, and count and remember them; grid ``(B,)``."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, NEW)
    slot, count = tl.load(slots + row), tl.load(offered + row)
    own = tl.load(sampled + row * new + at, mask=at < new, other=-1)
    draft = tl.load(drafts + row * (new - 1) + at, mask=at < new - 1, other=-1)
    right = (draft == own) & (at < count) & (at < new - 1)
    accepted = tl.min(tl.where(right, NEW, at), axis=0)
    others = tl.where(at <= count, _NOT_ACCEPTED, _NOT_DRAFTED).to(tl.int64)
    tl.store(tokens + row * new + at, tl.where(at <= accepted, own, others), mask=at < new)
    last = tl.sum(tl.where(at == accepted, own, 0), axis=0)
    tl.store(next_token + slot, tl.maximum(last, 0))
    kinds, noted = tl.load(adjustments + slot), (at <= accepted) & (own >= 0)
    if (kinds & _COUNTED) != 0:
        # Whichever thread has a token writes the same count as others that have it.
        times = tl.sum(((own[:, None] == own[None, :]) & noted[None, :]).to(tl.int32), axis=1)
        place = counts + slot * vocabulary + own
        before = tl.load(place, mask=noted, other=0).to(tl.int32)
        after = tl.minimum(before + 2 * times, _MAX_COUNTED - 1 + (before & 1))
        tl.debug_barrier()  # read before other threads write it
        tl.store(place, after.to(tl.int16), mask=noted)
    if ((kinds // _FOLLOWING) & _MAX_FOLLOWED) != 0:
        place = recent + slot * (_MAX_FOLLOWED + 1) + ((tl.load(positions + row) + at) & _MAX_FOLLOWED)
        tl.store(place, own.to(tl.int32), mask=noted)
