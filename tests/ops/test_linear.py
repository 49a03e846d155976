"""`skinny_linear` on the CPU.

Shapes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import pytest
import torch

from compiled_llm_ops import skinny_linear

pytestmark = pytest.mark.core


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 9, 33])
@pytest.mark.parametrize("outputs", [1, 48, 8200])
def test_skinny_linear_equals_a_product_in_double_precision(rows, outputs, seed):
    x, weight = torch.randn(rows, 96), torch.randn(outputs, 96)
    expected = (x.double() @ weight.double().T).float()
    for rows_given in (x, x.T.contiguous().T):
        torch.testing.assert_close(skinny_linear(rows_given, weight), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "weight",
    [torch.zeros(3, 4), torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(5)],
    ids=["inputs", "dtype", "1-D"],
)
def test_skinny_linear_names_shapes_that_do_not_fit(weight):
    with pytest.raises(ValueError, match=r"skinny_linear: rows must be \[M, I\].*got \(2, 5\)"):
        skinny_linear(torch.zeros(2, 5), weight)
