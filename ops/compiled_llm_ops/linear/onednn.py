"""Products of float32 matrices by oneDNN, which ``torch.mm`` leaves to BLAS."""

# | private part of torch | for | ends when |
# | --- | --- | --- |
# | ``torch.ops.mkldnn._linear_pointwise`` | oneDNN on AMD's processors | ``torch.mm`` chooses it there |

from __future__ import annotations

import torch
from torch import Tensor


def is_available() -> bool:
    """Whether this torch has the product, which Inductor calls in its own graphs."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(rows: Tensor, weight: Tensor) -> Tensor:
    """Return ``rows`` ``[M, I]`` times the transpose of ``weight`` ``[O, I]``, both float32 on a CPU: ``[M, O]``."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
    return product
