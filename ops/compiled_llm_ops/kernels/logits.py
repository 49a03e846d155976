"""What becomes of logits in Triton kernels: they are capped, weighed, and changed by functions that are handed in."""

# A kernel takes such functions as constants of its compilation, so that any kernel which has a tile of logits can call
# any, and one without has none of this in its code.
# Shapes: M queries of a tile (query heads of one kv head), N keys of a tile.

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class LogitsTransform(NamedTuple):
    """What becomes of logits, and which keys are visible, as kernels take it."""

    # a device function of logits ``[M, N]``, rows, query heads, numbers of queries in the batch, positions of queries
    # and of keys, which broadcast, then of ``tensors`` and ``sizes``; None if logits stay as they are
    logits: Any
    visible: Any  # one of the arguments after the first, returns int1; None if all keys are visible
    tensors: tuple[Tensor, ...]  # contiguous
    sizes: tuple[int, ...]  # of their axes by head and by position
    softmax: bool  # whether weights are the softmax of logits

    @property
    def arguments(self) -> tuple[tuple[Tensor, ...] | None, tuple[int, ...] | None]:
        """The kernel's arguments ``tensors`` and ``sizes``."""
        return self.tensors or None, self.sizes or None

    def factor(self, scale: float) -> float:
        """What products of queries and keys are multiplied with: ``logits`` has them without log2(e)."""
        return scale if self.logits is not None or not self.softmax else scale * math.log2(math.e)

    @property
    def constants(self) -> dict[str, Any]:
        """The kernel's constants."""
        return {"LOGITS": self.logits, "VISIBLE": self.visible, "SUMMED": not self.softmax, "TRANSFORMED": True}


@triton.jit
def capped(logits, cap):
    """``cap * tanh(logits)``."""
    return cap - 2.0 * cap / (tl.exp2(logits * 2.8853900817779268) + 1.0)  # 2 / ln 2


@triton.jit
def base_of(largest, BLIND: tl.constexpr):
    """Return the numbers that exponents are taken relative to: finite if a query has seen no key yet, too."""
    # That can only be if BLIND: the only query of a row that reads all its pages sees a key in each block.
    if not BLIND:
        return largest
    return tl.where(largest == -float("inf"), 0.0, largest)


@triton.jit
def weighed(logits, largest, BLIND: tl.constexpr):
    """Return weights of logits ``[M, N]``, the factor of earlier sums ``[M]``, and the largest logits ``[M]`` now."""
    # ``largest`` are those of earlier keys; all are in base 2. If BLIND, a query may have seen no key yet.
    larger = tl.maximum(largest, tl.max(logits, 1))
    base = base_of(larger, BLIND)
    return tl.exp2(logits - base[:, None]), tl.exp2(largest - base), larger


@triton.jit
def transformed(
    logits, seen, row, head, query, query_position, key_position, tensors, sizes,
    LOGITS: tl.constexpr, VISIBLE: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """Return logits ``[M, N]`` as LOGITS makes them, times log2(e), and minus infinity where a key is not seen."""
    # If SUMMED, they are weights: not multiplied, and 0 where a key is not seen. ``seen`` is None if all are. Without
    # LOGITS, they come multiplied; see ``LogitsTransform.factor``.
    if LOGITS is not None:
        logits = LOGITS(logits, row, head, query, query_position, key_position, tensors, sizes)
        if not SUMMED:
            logits *= 1.4426950408889634
    hidden = 0.0 if SUMMED else -float("inf")
    if VISIBLE is not None:
        logits = tl.where(VISIBLE(row, head, query, query_position, key_position, tensors, sizes), logits, hidden)
    return logits if seen is None else tl.where(seen, logits, hidden)


@triton.jit
def floor_div(number, divisor: tl.constexpr):
    """Divide integers by a constant as Python does, rounding down."""
    quotient = number // divisor
    against = number > 0 if divisor < 0 else number < 0
    return quotient - (against & (quotient * divisor != number)).to(tl.int32)


@triton.jit
def floor_mod(number, divisor: tl.constexpr):
    """What remains of ``floor_div``."""
    return number - floor_div(number, divisor) * divisor
