"""Which kernel multiplies with a packed weight, and that each of them is launched as chosen.

Shapes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import pytest
import torch

from compiled_llm_ops.packed.linear import DTYPES
from compiled_llm_ops.packed.rule import JOINED, NESTED_NF4, NF4, Library, can_be_rounded, choose
from compiled_llm_ops.packed.tilings import (
    OUTPUTS_TOGETHER,
    FewRowsTiling,
    PackedLinearTiling,
    RoundedTiling,
    can_be_joined,
)
from support.ops.packed_weights import FORMATS, described

WORDS = ("words_by_input", "words_by_output", "tiles")
SIZES = ((6144, 4096), (24576, 4096), (4096, 12288), (96, 160), (40, 33))


@pytest.mark.parametrize("name", FORMATS)
def test_every_choice_can_be_launched(name: str) -> None:
    for n, k in SIZES:
        weight = described(name, n, k)
        for m in (1, 2, 3, 8, 9, 64, 65, 128, 129, 256, 257, 512, 513, 1024, 5000):
            choice = choose(m, weight, torch.bfloat16, 132)
            if isinstance(choice, PackedLinearTiling):
                group = weight.format.inputs
                assert choice.inputs >= 32
                several = choice.joined and weight.format.bits == 4 and choice.inputs % (group or 1) == 0
                assert not group or group % choice.inputs == 0 or several, "a block has one scale"
                assert all(size & (size - 1) == 0 for size in choice[:3])
                assert 1 <= choice.splits <= -(-k // choice.inputs)
            elif isinstance(choice, FewRowsTiling):
                assert m <= 2
                assert weight.format.bits == 8
            elif isinstance(choice, RoundedTiling) or choice is Library.ROUNDED:
                assert can_be_rounded(weight)


@pytest.mark.parametrize("name", FORMATS)
def test_many_rows_and_words_have_their_codes_joined_in_order(name: str) -> None:
    weight = described(name, 6144, 4096)
    for m in (1, 9, 17, 33, 64):
        choice = choose(m, weight, torch.bfloat16, 132)
        if isinstance(choice, PackedLinearTiling):
            short = weight.format.bits == 4 and 0 < weight.format.inputs < 128
            fewest = 1 if short or weight.format.layout in WORDS else 9
            assert choice.joined == (m >= fewest and can_be_joined(weight, torch.bfloat16))
            assert choice.rows >= m


@pytest.mark.parametrize(
    ("name", "overlapping"),
    [
        ("bitsandbytes NF4", [*range(1, 257)]),
        ("bitsandbytes NF4, nested", [*range(1, 33), *range(65, 257)]),
        ("compressed-tensors int4", [*range(1, 9), *range(33, 129)]),
        ("torchao int8", [*range(1, 5), *range(9, 129)]),
        ("torchao int4, tiles", [*range(1, 129)]),
        ("GPTQ", [*range(1, 129)]),
        ("AWQ", [*range(1, 5), *range(33, 129)]),
    ],
)
def test_products_overlap_where_that_gains(name: str, overlapping: list[int]) -> None:
    def overlaps(m: int) -> bool:
        choice = choose(m, described(name, 6144, 4096), torch.bfloat16, 132)
        return isinstance(choice, PackedLinearTiling) and choice.overlap

    assert [m for m in range(1, 257) if overlaps(m)] == overlapping


def test_scales_of_another_type_are_of_sums() -> None:
    weight = described("GPTQ, short groups", 6144, 4096)
    others = weight._replace(scales=weight.scales.half())
    for m, inputs in ((1, 256), (64, 256), (128, 128), (256, 128)):
        assert choose(m, weight, torch.bfloat16, 132)[2] == inputs
    assert choose(128, others, torch.bfloat16, 132)[2] == 32
    assert choose(129, others, torch.bfloat16, 132) is Library.UNPACKED


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *(("bitsandbytes NF4", 256), ("bitsandbytes NF4, nested", 256), ("compressed-tensors int4", 512)),
        *(("torchao int8", 512), ("GPTQ", 512), ("torchao int4, tiles", 1024)),
        *(("AWQ", 256), ("GPTQ, short groups", 256)),  # 64 and 32 inputs share a scale
    ],
)
def test_more_rows_have_the_weight_unpacked(name: str, most: int) -> None:
    choices = [choose(m, described(name, 6144, 4096), torch.bfloat16, 132) for m in (most, most + 1)]
    assert isinstance(choices[0], PackedLinearTiling)
    assert choices[1] is Library.UNPACKED


def test_a_tile_of_several_weights_has_outputs_of_one() -> None:
    outputs = [tile.outputs for joined in (*JOINED.values(), NF4, NESTED_NF4) for tile in joined.tiles]
    assert not any(map(OUTPUTS_TOGETHER.__mod__, outputs))


def test_products_that_are_left_to_cublas() -> None:
    weight = described("compressed-tensors int4", 6144, 4096)
    for m in (1, 64, 4096):
        assert choose(m, weight, torch.float32, 132) is Library.UNPACKED
        assert choose(m, weight, torch.bfloat16, 0) is Library.UNPACKED
    assert choose(4096, weight, torch.bfloat16, 132) is Library.UNPACKED
    assert torch.float32 in DTYPES


def test_rows_are_rounded_only_where_the_library_s_formula_does_so() -> None:
    weight = described("FP8Linear", 6144, 4096)
    for m in range(1, 257):
        choice = choose(m, weight, torch.bfloat16, 132)
        assert isinstance(choice, RoundedTiling) == (9 <= m <= 128)
        assert (choice is Library.ROUNDED) == (m > 128)
        if isinstance(choice, RoundedTiling):
            assert choice.rows >= min(m, 64)
            assert choice.splits <= 4096 // 128
    assert choose(1024, weight, torch.float16, 132) is Library.UNPACKED
    many = described("FP8Linear", 24576, 4096)
    assert [choose(128, own, torch.bfloat16, 132)[0] for own in (weight, many)] == [64, 128]
    for other in (
        weight._replace(format=weight.format._replace(may_round=False)),
        weight._replace(scales=weight.scales.t().contiguous().t()),
        described("FP8Linear", 6144, 4096 + 128),
        described("FP8Linear", 6144 + 8, 4096),
        weight._replace(codes=torch.empty(17, dtype=torch.float8_e4m3fn)[1:]),
        described("torchao float8 by row", 6144, 4096),
    ):
        assert isinstance(choose(64, other, torch.bfloat16, 132), PackedLinearTiling)
        assert choose(1024, other, torch.bfloat16, 132) is Library.UNPACKED
