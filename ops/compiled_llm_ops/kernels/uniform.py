"""The CUDA kernel of ``uniform_numbers``, in Triton: where no compiler fuses its hundred operations.

Shapes: B rows.
"""

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm_ops.contracts import UniformNumbers

_BLOCK = 128
_MULTIPLIER = tl.constexpr(0xD256D193)
_WEYL = tl.constexpr(0x9E3779B9)
_WORD = tl.constexpr(0xFFFFFFFF)
_SCALE = tl.constexpr(2.0**-53)


def uniform_numbers(args: UniformNumbers) -> Tensor:
    """Launch the kernel.

    Args:
        args: as ``sampling.uniform_numbers`` takes them, checked.

    Returns:
        ``[B]`` float64.
    """
    seeds, positions = args.seeds.contiguous(), args.positions.contiguous()
    numbers = torch.empty(seeds.shape, dtype=torch.float64, device=seeds.device)
    count = seeds.numel()
    if count:
        _philox[(triton.cdiv(count, _BLOCK),)](seeds, positions, numbers, count, block=_BLOCK, num_warps=1)
    return numbers


@triton.jit(do_not_specialize=["count"])
def _philox(seeds, positions, numbers, count, block: tl.constexpr):
    """Write the numbers of a block of rows; grid ``(blocks,)``."""
    row = tl.program_id(0) * block + tl.arange(0, block)
    seed = tl.load(seeds + row, mask=row < count, other=0)
    low = tl.load(positions + row, mask=row < count, other=0) & _WORD
    high, key = seed >> 32, seed & _WORD
    for _ in tl.static_range(10):
        # A product of two 32-bit words in pieces of 16 bits, since 64 signed bits do not hold it.
        below = (low & 0xFFFF) * _MULTIPLIER
        above = (low >> 16) * _MULTIPLIER
        product_high = (above + (below >> 16)) >> 16
        product_low = (below + ((above & 0xFFFF) << 16)) & _WORD
        low, high = product_high ^ key ^ high, product_low
        key = (key + _WEYL) & _WORD
    bits = (low << 21) | (high >> 11)
    tl.store(numbers + row, bits.to(tl.float64) * _SCALE, mask=row < count)
