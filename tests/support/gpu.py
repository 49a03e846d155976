"""What GPU tests share: seeds, dtypes and how close results have to be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

SEED = 20240607
DTYPES = [torch.bfloat16, torch.float16]

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
seeded = pytest.mark.parametrize("seed", [SEED], ids="seed={}".format)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def close(actual: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    torch.testing.assert_close(
        actual, expected, atol=tolerance, rtol=tolerance, msg=lambda difference: f"{name}: {difference}"
    )
