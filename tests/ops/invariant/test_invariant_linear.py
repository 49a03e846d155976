"""Batch-invariant matmuls and sums on the CPU: right, and the same bits for a row in any place of any batch."""

from __future__ import annotations

import random
import re

import pytest
import torch

from compiled_llm_ops import invariant_bmm, invariant_linear, invariant_sum
from compiled_llm_ops.linear.invariant import CPU_ROWS

pytestmark = pytest.mark.core

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 7), (33, 64), (96, 96), (300, 577), (1000, 96)]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_rows_are_multiplied(outputs, inputs, dtype, has_bias, seed):
    rows, weight = torch.randn(3, 7, inputs).to(dtype), (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype)
    bias = torch.randn(outputs).to(dtype) if has_bias else None
    out = invariant_linear(rows, weight, bias)
    expected = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    assert (out.dtype, out.is_contiguous()) == (dtype, True)
    strided = invariant_linear(rows.transpose(0, 2).contiguous().transpose(0, 2), weight.T.contiguous().T, bias)
    torch.testing.assert_close(strided, out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "outputs", "inputs"), [(1, 7, 5), (3, 64, 33), (5, 96, 96)])
def test_rows_of_heads_have_the_same_bits_in_any_batch(heads, outputs, inputs, dtype, seed):
    rows, matrices = torch.randn(40, heads, inputs).to(dtype).transpose(0, 1), torch.randn(heads, inputs, outputs)
    matrices = (matrices * inputs**-0.5).to(dtype)
    whole = invariant_bmm(rows, matrices)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(whole.double(), rows.double() @ matrices.double(), rtol=tolerance, atol=tolerance)
    assert (whole.dtype, whole.is_contiguous()) == (dtype, True)
    rng = random.Random(seed)
    for count in (1, 2, CPU_ROWS, CPU_ROWS + 1, 33):
        places = rng.sample(range(40), count)
        assert torch.equal(invariant_bmm(rows[:, places], matrices), whole[:, places])
    torch.testing.assert_close(invariant_bmm(rows, matrices.mT.contiguous().mT), whole)


PLACED = [
    pytest.param(*shape, dtype, threads, marks=[pytest.mark.whole] * (threads == 2 and shape != (300, 577)))
    for shape in SHAPES
    for dtype in DTYPES
    for threads in (1, 2)
]


@pytest.mark.parametrize(("outputs", "inputs", "dtype", "threads"), PLACED)
def test_a_row_has_the_same_bits_in_any_place_of_any_batch(outputs, inputs, dtype, threads, seed):
    """Also where the number of rows is no multiple of what is multiplied at a time."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows, weight, bias = (torch.randn(*size).to(dtype) for size in ((64, inputs), (outputs, inputs), (outputs,)))
        alone = [invariant_linear(row[None], weight, bias)[0] for row in rows]
        sums = [invariant_sum(row[None])[0] for row in rows]
        rng = random.Random(seed)
        for count in (2, CPU_ROWS - 1, CPU_ROWS, CPU_ROWS + 1, 33, 64):
            places = rng.sample(range(64), count)
            assert torch.equal(invariant_linear(rows[places], weight, bias), torch.stack([alone[at] for at in places]))
            assert torch.equal(invariant_sum(rows[places]), torch.stack([sums[at] for at in places]))
        shifted = torch.empty(64 * inputs + 1, dtype=dtype)[1:].view(64, inputs).copy_(rows)  # aligned otherwise
        assert torch.equal(invariant_linear(shifted, weight, bias), torch.stack(alone))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(5,), (3, 1), (2, 40, 577), (0, 8)], ids=str)
def test_the_last_dimension_is_added(shape, dtype, seed):
    values = torch.randn(shape).to(dtype)
    out = invariant_sum(values)
    expected = values.double().sum(-1).to(dtype)
    torch.testing.assert_close(out, expected, rtol=2e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-4)


def test_what_does_not_fit_is_refused():
    rows, weight = torch.randn(2, 4), torch.randn(3, 4)
    for arguments in ((rows, weight.bfloat16()), (rows, weight.T), (rows, weight[0])):
        with pytest.raises(ValueError, match=re.escape("invariant_linear: rows must be [..., I] and weight [O, I]")):
            invariant_linear(*arguments)
    with pytest.raises(ValueError, match=re.escape("invariant_linear: bias must be (3,) torch.float32; got (4,)")):
        invariant_linear(rows, weight, rows[0])
    with pytest.raises(ValueError, match=re.escape("invariant_sum: values must be [..., I] of a floating dtype")):
        invariant_sum(torch.ones(3, dtype=torch.int64))
