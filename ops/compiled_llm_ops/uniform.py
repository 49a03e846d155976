"""Random numbers that a seed and a position decide, by a counter-based generator.

Shapes: B rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from compiled_llm_ops.contracts import UniformNumbers
from compiled_llm_ops.library import define

_MASK = 0xFFFFFFFF
_MULTIPLIER = 0xD256D193
_WEYL = 0x9E3779B9
_ROUNDS = 10


def uniform_numbers(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return a number for each seed and position; nothing else decides.

    Args:
        seeds: ``[B]`` int64, not negative.
        positions: ``[B]`` int64, not negative.

    Returns:
        ``[B]`` float64 in [0, 1).

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        Philox2x32-10: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011),
        https://doi.org/10.1145/2063384.2063405.
    """
    numbers: Tensor = _uniform_numbers(seeds, positions)
    return numbers


def uniform_of(seeds: Tensor, positions: Tensor) -> Tensor:
    """As ``uniform_numbers``, in operations of PyTorch, which a compiler fuses into one kernel."""
    # The generator has a key of 32 bits: the seed's upper half goes into the counter.
    high, low = philox(positions & _MASK, seeds >> 32, seeds & _MASK)
    return ((high << 21) | (low >> 11)).double() * 2.0**-53


def philox(low: Tensor, high: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two words of Philox2x32-10 of the counter ``(low, high)`` under ``key``; all words in int64."""
    for _ in range(_ROUNDS):
        # A product of two 32-bit words in pieces of 16 bits, since 64 signed bits do not hold it.
        below = (low & 0xFFFF) * _MULTIPLIER
        above = (low >> 16) * _MULTIPLIER
        product_high = (above + (below >> 16)) >> 16
        product_low = (below + ((above & 0xFFFF) << 16)) & _MASK
        low, high = product_high ^ key ^ high, product_low
        key = (key + _WEYL) & _MASK
    return low, high


def _check_uniform(args: UniformNumbers) -> None:
    seeds, positions = args
    if seeds.shape != positions.shape or not seeds.dtype == positions.dtype == torch.int64:
        raise ValueError(
            f"uniform_numbers: seeds and positions must be int64 of one shape; got {seeds.dtype} {list(seeds.shape)} "
            f"and {positions.dtype} {list(positions.shape)}"
        )


def _uniform_cpu(args: UniformNumbers) -> Tensor:
    _check_uniform(args)
    seed, low = (tensor.numpy().astype(np.uint64) for tensor in args)
    key, high, low = seed & np.uint64(_MASK), seed >> np.uint64(32), low & np.uint64(_MASK)
    for _ in range(_ROUNDS):
        product = low * np.uint64(_MULTIPLIER)
        low, high = (product >> np.uint64(32)) ^ key ^ high, product & np.uint64(_MASK)
        key = (key + np.uint64(_WEYL)) & np.uint64(_MASK)
    bits = (low << np.uint64(21)) | (high >> np.uint64(11))
    return torch.from_numpy(np.asarray(bits.astype(np.float64) * 2.0**-53))


def _uniform_cuda(args: UniformNumbers) -> Tensor:
    from compiled_llm_ops.kernels import uniform as triton_uniform

    _check_uniform(args)
    with torch.cuda.device_of(args.seeds):
        return triton_uniform.uniform_numbers(args)


_uniform_numbers = define(
    "uniform_numbers",
    UniformNumbers,
    fake=lambda args: args.seeds.new_empty(args.seeds.shape, dtype=torch.float64),
    cpu=_uniform_cpu,
    cuda=_uniform_cuda,
)
