"""The CUDA kernel of ``write_texts``, in Triton."""

# Shapes: B rows.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from compiled_llm_ops.drafts.contracts import WriteTexts


def write_texts(args: WriteTexts) -> None:
    """Launch the kernel; ``args`` are checked."""
    rows, count = args.tokens.shape
    given = (args.texts, args.slots, args.starts, args.tokens.contiguous())
    _write_texts[(rows,)](*given, args.texts.shape[1], count, COUNT=triton.next_power_of_2(count), num_warps=1)


@triton.jit
def _write_texts(texts, slots, starts, tokens, length, count, COUNT: tl.constexpr):
    """Write one row's tokens; grid ``(B,)``."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, COUNT)
    place = tl.load(starts + row) + at
    token = tl.load(tokens + row * count + at, mask=at < count, other=0).to(tl.int32)
    inside = (at < count) & (place >= 0) & (place < length)
    tl.store(texts + tl.load(slots + row) * length + place, token, mask=inside)
