"""Products with tiles of 4 bits by torch's own kernel, for which torchao lays weights out so."""

# | private part of torch | for | ends when |
# | --- | --- | --- |
# | ``torch.ops.aten._weight_int4pack_mm`` | few rows with tiles in groups of 32 or 64 | ours reads these, too |

# Shapes: M rows, N outputs, K inputs.

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.packed.formats import TILE_INPUTS, TILE_OUTPUTS, PackedWeight

GROUPS = (32, 64, 128, 256)  # inputs that share a scale, as it takes them


def is_taken(weight: PackedWeight) -> bool:
    """Whether torch's kernel takes a weight: whole tiles, and scales that lie beside zeros, as torchao has them."""
    format, codes, scales, zeros, (n, k), _ = weight
    if format.layout != "tiles" or format.code != "uint4" or format.inputs not in GROUPS or format.outputs != 1:
        return False
    if zeros is None or scales.dtype is not torch.bfloat16 or zeros.dtype is not torch.bfloat16:
        return False
    beside = zeros.data_ptr() - scales.data_ptr() == scales.itemsize
    whole = codes.shape[:2] == (n // TILE_OUTPUTS, k // TILE_INPUTS) and not n % TILE_OUTPUTS and not k % TILE_INPUTS
    return whole and beside and scales.stride() == zeros.stride() == (2, 2 * n)


def multiply(rows: Tensor, weight: PackedWeight) -> Tensor:
    """Return ``rows @ weight.T``, ``[M, N]``, for rows ``[M, K]``, contiguous, of bfloat16, and a weight it takes."""
    n, k = weight.shape
    both = weight.scales.as_strided((k // weight.format.inputs, n, 2), (2 * n, 2, 1))
    product: Tensor = torch.ops.aten._weight_int4pack_mm(rows, weight.codes, weight.format.inputs, both)
    return product
