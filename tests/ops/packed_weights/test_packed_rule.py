"""Which kernel multiplies with a packed weight, and that each of them is launched as chosen.

Shapes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import pytest
import torch

from compiled_llm_ops.packed.formats import PackedWeight
from compiled_llm_ops.packed.linear import DTYPES
from compiled_llm_ops.packed.rule import Library, can_be_rounded, choose
from compiled_llm_ops.packed.tilings import FewRowsTiling, PackedLinearTiling
from support.ops.packed_weights import FORMATS

SIZES = ((6144, 4096), (24576, 4096), (4096, 12288), (96, 160), (40, 33))


def described(name: str, n: int, k: int) -> PackedWeight:
    """A weight without numbers."""
    format = FORMATS[name][0]
    scales = torch.empty(-(-n // (format.outputs or n)), -(-k // (format.inputs or k)), device="meta")
    return PackedWeight(format, torch.empty(0, device="meta"), scales, None, (n, k))


@pytest.mark.parametrize("name", FORMATS)
def test_every_choice_can_be_launched(name: str) -> None:
    for n, k in SIZES:
        weight = described(name, n, k)
        for m in (1, 2, 3, 8, 9, 64, 65, 128, 129, 256, 257, 5000):
            choice = choose(m, weight, torch.bfloat16, 132)
            if isinstance(choice, PackedLinearTiling):
                group = weight.format.inputs
                assert choice.inputs >= 32
                assert not group or group % choice.inputs == 0, "a block has one scale"
                assert all(size & (size - 1) == 0 for size in choice[:3])
                assert 1 <= choice.splits <= -(-k // choice.inputs)
            elif isinstance(choice, FewRowsTiling):
                assert m <= 2
                assert weight.format.bits == 8
            elif choice is Library.ROUNDED:
                assert can_be_rounded(weight)


def test_products_that_are_left_to_cublas() -> None:
    weight = described("compressed-tensors int4", 6144, 4096)
    for m in (1, 64, 4096):
        assert choose(m, weight, torch.float32, 132) is Library.UNPACKED
        assert choose(m, weight, torch.bfloat16, 0) is Library.UNPACKED
    assert choose(4096, weight, torch.bfloat16, 132) is Library.UNPACKED
    assert torch.float32 in DTYPES


def test_rows_are_rounded_only_where_the_library_s_formula_does_so() -> None:
    weight = described("FP8Linear", 6144, 4096)
    assert choose(1024, weight, torch.bfloat16, 132) is Library.ROUNDED
    assert choose(1024, weight, torch.float16, 132) is Library.UNPACKED
    assert choose(1, weight, torch.bfloat16, 132) is not Library.ROUNDED
    for other in (
        weight._replace(format=weight.format._replace(may_round=False)),
        weight._replace(scales=weight.scales.t().contiguous().t()),
        described("FP8Linear", 6144, 4096 + 128),
        described("FP8Linear", 6144 + 8, 4096),
        described("torchao float8 by row", 6144, 4096),
    ):
        assert choose(1024, other, torch.bfloat16, 132) is Library.UNPACKED
