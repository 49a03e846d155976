"""The kernels of `packed_linear` under Triton's interpreter, and compiled for Hopper.

Shapes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm_ops.kernels.linear.skinny_tiling import SHARED_MEMORY
from compiled_llm_ops.packed.formats import NF4, NF4_UNIT
from compiled_llm_ops.packed.kernels.pair_ptx import pair_text_for
from compiled_llm_ops.packed.kernels.ptx import exact_nf4, text_for
from compiled_llm_ops.packed.rule import (
    MAX_BLOCK,
    ROUNDED,
    TILE_ROWS,
    TWO_ROUNDED,
    JoinedTile,
    RoundedTile,
    tiling_for,
)
from compiled_llm_ops.packed.tilings import (
    FEWEST_HALVED,
    FewRowsTiling,
    PackedLinearTiling,
    RoundedTiling,
    block_inputs,
    can_be_apart,
    can_be_joined,
    can_be_together,
    joined_inputs,
    takes_few_rows,
    way_of,
)
from compiled_llm_ops.packed.unpack import unpack
from support.ops.compiling import compiled, in_order, resources_of
from support.ops.interpreting import interpreted, needs_triton, not_interpreted
from support.ops.packed_weights import ANYWHERE, FORMATS, IN_ROWS, Made, described, finite, side_by_side, tiles_of

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]


@interpreted
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("m", "n", "k", "splits"), [(1, 24, 256, 1), (5, 72, 328, 2), (19, 40, 512, 3)], ids=str)
def test_each_format_on_tensor_cores(name: str, m: int, n: int, k: int, splits: int, seed: int) -> None:
    from compiled_llm_ops.packed.kernels.tiles import multiply

    made = finite(name, n, k)
    rows, bias = torch.randn(m, k).half(), torch.randn(n).half()
    inputs = block_inputs(made.weight.format, 128)
    tiling = PackedLinearTiling(16, 32, inputs, stages=2, splits=splits, warps=4)
    check(multiply(rows, made.weight, bias, tiling, pdl=False), rows, made, bias)
    if can_be_apart(made.weight.format, inputs):
        check(multiply(rows, made.weight, bias, tiling._replace(apart=True), pdl=False), rows, made, bias)


@interpreted
@pytest.mark.parametrize("name", FORMATS)
def test_each_format_joined_in_the_order_of_the_inputs(name: str, seed: int) -> None:
    from compiled_llm_ops.packed.kernels.joined import multiply

    (m, n, k), dtype = (19, 96, 608), torch.bfloat16 if FORMATS[name][0].code == "e4m3" else torch.float16
    made = finite(name, n, k)
    weight = made.weight
    if weight.zeros is not None and weight.zeros.is_floating_point():
        assert not can_be_joined(weight, dtype), "values are scaled in the rows' type"
        weight = weight._replace(scales=weight.scales.to(dtype), zeros=weight.zeros.to(dtype))
    if not can_be_joined(weight, dtype):
        assert weight.format.bits == 8
        return
    rows, bias = torch.randn(m, k).to(dtype), torch.randn(n).to(dtype)
    tiling = PackedLinearTiling(16, 64, block_inputs(weight.format, 128), stages=2, splits=3, warps=4, joined=True)
    check(multiply(rows, weight, bias, tiling, pdl=False), rows, made, bias)


SHORT = [name for name, (format, _) in FORMATS.items() if format.bits == 4 and 0 < format.inputs < 128]


@interpreted
@pytest.mark.parametrize("k", [512, 608])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("name", [*SHORT, "torchao int4, tiles"])
def test_a_block_has_several_groups_if_numbers_are_scaled(
    name: str, group: int, k: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where inputs end within a block."""
    from compiled_llm_ops.packed.kernels.joined import multiply

    format, how = FORMATS[name]
    monkeypatch.setitem(FORMATS, "own", (format._replace(inputs=group), how))
    made = finite("own", 96, k)
    weight = made.weight
    if how != "nested" and format.code != "nf4":
        weight = weight._replace(scales=weight.scales.half())
    if weight.zeros is not None and weight.zeros.is_floating_point():
        weight = weight._replace(zeros=weight.zeros.half())
    assert can_be_joined(weight, torch.float16)
    made, rows, bias = Made(weight, unpack(weight, torch.float64)), torch.randn(19, k).half(), torch.randn(96).half()
    for most in (128,) if format.layout == "tiles" else (128, 256):
        assert joined_inputs(weight, torch.float16, most) == most
        tiling = PackedLinearTiling(16, 64, most, stages=2, splits=2, warps=4, joined=True)
        check(multiply(rows, weight, bias, tiling, pdl=False), rows, made, bias)


@interpreted
@pytest.mark.parametrize("m", [1, 16, 17, 23, 31, 32, 33, 47, 70])
@pytest.mark.parametrize("splits", [1, 2])
def test_rows_that_do_not_fill_their_tiles(m: int, splits: int, seed: int) -> None:
    """A tile begins earlier then, or has its halves overlap."""
    from compiled_llm_ops.packed.kernels.joined import multiply

    made = finite("compressed-tensors int4", 72, 384)
    rows, bias = torch.randn(m, 384).half(), torch.randn(72).half()
    tiling = PackedLinearTiling(32, 64, 128, stages=2, splits=splits, warps=4, joined=True)
    check(multiply(rows, made.weight, bias, tiling, pdl=False), rows, made, bias)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [32, 64, 96, 128, 512])
@pytest.mark.parametrize("kind", ["", ", nested"])
def test_a_block_of_nf4_has_several_groups_or_a_part_of_one(
    kind: str, group: int, dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where inputs end within a block."""
    from compiled_llm_ops.packed.kernels.joined import multiply

    format, how = FORMATS[f"bitsandbytes NF4{kind}"]
    monkeypatch.setitem(FORMATS, "own", (format._replace(inputs=group), how))
    for k in (1152, 608):
        made = finite("own", 72, k)
        rows, bias = torch.randn(9, k).to(dtype), torch.randn(72).to(dtype)
        for most in (64, 256):
            block = joined_inputs(made.weight, dtype, most)
            assert block == most or (group, block) == (96, 32)
            tiling = PackedLinearTiling(16, 64, block, stages=2, splits=2, warps=4, joined=True)
            check(multiply(rows, made.weight, bias, tiling, pdl=False), rows, made, bias)


@interpreted
@pytest.mark.parametrize("kind", ["", ", nested"])
def test_numbers_of_nf4_are_rounded_once(kind: str, seed: int) -> None:
    """Rows with a single one give them back: entries of a rounded table times scales in float32, then rounded.

    Triton's interpreter cuts float32 off where bfloat16 ends, so these are of float16.
    """
    from compiled_llm_ops.packed.kernels.joined import multiply

    weight, dtype = finite(f"bitsandbytes NF4{kind}", 64, 256).weight, torch.float16
    tiling = PackedLinearTiling(64, 64, 256, stages=2, splits=1, warps=4, joined=True)
    found = multiply(torch.eye(256, dtype=dtype), weight, None, tiling, pdl=False).t()
    table = (torch.tensor(NF4, dtype=torch.float64) * NF4_UNIT).to(dtype)
    codes = torch.stack([weight.codes >> 4, weight.codes & 15], -1).view(64, 256).int()
    scales = unpack(weight._replace(codes=torch.full_like(weight.codes, 0xFF)))  # code 15 stands for 1
    expected = (table[codes].double() * (scales.double() / NF4_UNIT)).to(dtype)
    assert (found == expected).float().mean() > 0.99, "but for ties that a scale in two parts breaks otherwise"


@interpreted
@pytest.mark.parametrize("name", [name for name, (format, _) in FORMATS.items() if takes_few_rows(format)])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 20, 256), (2, 131, 330), (1, 20, 128)], ids=str)
def test_one_and_two_rows_of_8_bits(name: str, m: int, n: int, k: int, seed: int) -> None:
    from compiled_llm_ops.packed.kernels.few_rows import multiply_few

    made = finite(name, n, k)
    rows, bias = torch.randn(m, k).half(), torch.randn(n).half()
    for prefetched in (0, 2):
        tiling = FewRowsTiling(outputs=4, inputs=128, prefetched=prefetched, warps=4)
        check(multiply_few(rows, made.weight, bias, tiling, pdl=False), rows, made, bias)


@interpreted
@pytest.mark.parametrize("name", IN_ROWS)
def test_side_by_side_products_have_the_bits_of_those_apart(name: str, seed: int) -> None:
    """By each kernel, cut up alike: the sums of an output have one order."""
    from compiled_llm_ops.packed.kernels import few_rows, joined, tiles

    both = [finite(name, outputs, 256).weight for outputs in (128, 64)]
    whole, format = side_by_side(both), both[0].format
    dtype = torch.bfloat16 if format.code == "e4m3" else torch.float16
    rows, cut = torch.randn(5, 256).to(dtype), PackedLinearTiling(16, 64, block_inputs(format, 128), 2, 2, 4)
    multiplies = [lambda weight: tiles.multiply(rows, weight, None, cut, pdl=False)]
    if can_be_joined(whole, dtype):
        multiplies += [lambda weight: joined.multiply(rows, weight, None, cut._replace(joined=True), pdl=False)]
    if takes_few_rows(format):
        few = FewRowsTiling(outputs=8, inputs=128, prefetched=1, warps=4)
        multiplies += [lambda weight: few_rows.multiply_few(rows[:1], weight, None, few, pdl=False)]
    for multiply in multiplies:
        assert torch.equal(multiply(whole), torch.cat([multiply(own) for own in both], -1))


@interpreted
@pytest.mark.parametrize("name", ANYWHERE)
@pytest.mark.parametrize("outputs", [(128, 96), (128, 256, 32)], ids=str)
def test_weights_together_have_the_bits_of_those_apart(name: str, outputs: tuple[int, ...], seed: int) -> None:
    from compiled_llm_ops.packed.kernels.joined import multiply, multiply_together

    weights, rows = [finite(name, count, 512).weight for count in outputs], torch.randn(19, 512).half()
    bias, block = torch.randn(sum(outputs)).half(), block_inputs(weights[0].format, 128)
    assert can_be_together(weights, torch.float16)
    for of_tile in (64, 128):
        cut = PackedLinearTiling(16, of_tile, block, stages=2, splits=3, warps=4, joined=True)
        each = zip(weights, bias.split(list(outputs)), strict=True)
        apart = [multiply(rows, own, part, cut, pdl=False) for own, part in each]
        assert torch.equal(multiply_together(rows, weights, bias, cut, pdl=False), torch.cat(apart, -1))


@interpreted
@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_unpacked(name: str, seed: int) -> None:
    from compiled_llm_ops.packed.kernels.unpacking import unpack_into

    made = finite(name, 40, 264)
    values = torch.empty(40, 264)
    unpack_into(values, made.weight, block_inputs(made.weight.format, 128))
    torch.testing.assert_close(values.double(), made.values, rtol=1e-5, atol=1e-5)


@interpreted
def test_rows_are_rounded_by_128_inputs(seed: int) -> None:
    from compiled_llm_ops.packed.kernels.rounded import round_rows

    rows = torch.randn(5, 256).half()
    rows[2, 128:] = 0
    rounded, scales = round_rows(rows, pdl=False)
    assert (rounded.shape, scales.shape, scales.stride()) == ((8, 256), (8, 2), (1, 8))
    assert not rounded[5:].float().any()
    groups = rows.float().view(5, 2, 128)
    torch.testing.assert_close(scales[:5], groups.abs().amax(-1).clamp(min=1e-12) / 448)
    again = (rounded[:5].float().view(5, 2, 128) * scales[:5, :, None]).view(5, 256)
    torch.testing.assert_close(again, rows.float(), rtol=2**-4, atol=float(scales.max()) * 2**-9)


@interpreted
@pytest.mark.parametrize("outputs", [64, 128])
@pytest.mark.parametrize(
    ("m", "rows_of_tile", "splits"), [(1, 16, 1), (16, 16, 2), (19, 16, 3), (40, 64, 1), (70, 64, 3)]
)
def test_rounded_rows_are_multiplied_in_eight_bits(
    m: int, rows_of_tile: int, splits: int, outputs: int, seed: int
) -> None:
    """From tiles of 64 rows on rows are the first operand."""
    from compiled_llm_ops.packed.kernels.rounded import multiply, round_rows

    made = finite("FP8Linear", 256, 512)
    rows, bias = torch.randn(m, 512).half(), torch.randn(256).half()
    rounded, scales = (own[:m].double() for own in round_rows(rows, pdl=False))
    expected = (rounded.view(m, 4, 128) * scales[:, :, None]).view(m, 512) @ made.values.T + bias.double()
    out = multiply(rows, made.weight, bias, RoundedTiling(rows_of_tile, outputs, 3, splits, 4), pdl=False)
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3 * float(expected.abs().max()))


def check(out: torch.Tensor, rows: torch.Tensor, made: Made, bias: torch.Tensor) -> None:
    near = 1e-2 if rows.dtype is torch.bfloat16 else 2e-3
    expected = rows.double() @ made.values.T + bias.double()
    torch.testing.assert_close(out.double(), expected, rtol=near, atol=float(expected.abs().max()) * near)


@interpreted
@pytest.mark.parametrize("name", ["compressed-tensors int4", "FP8Linear", "GPTQ"])
@pytest.mark.parametrize("m", [1, 5, 300])
def test_what_the_rule_chooses_is_launched(name: str, m: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from compiled_llm_ops.packed.kernels import launching

    monkeypatch.setattr(launching, "processors_of", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    made = finite(name, 40, 256)
    rows, bias = torch.randn(m, 256).half(), torch.randn(40).half()
    check(launching.multiply(rows, made.weight, bias, pdl=False), rows, made, bias)


@interpreted
@pytest.mark.parametrize("m", [1, 40, 600])
@pytest.mark.parametrize("outputs", [(128, 128, 48), (48, 128), (128, 128, 128, 16)], ids=str)
@pytest.mark.parametrize("name", ["GPTQ", "bitsandbytes NF4, nested", "compressed-tensors int4, asymmetric"])
def test_weights_together_are_launched_or_each_alone(
    name: str, outputs: tuple[int, ...], m: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compiled_llm_ops.packed.kernels import joined, launching

    launches, multiply_together = list[int](), joined.multiply_together

    def noted(rows: Any, weights: Any, *args: Any, **options: Any) -> torch.Tensor:
        launches.append(len(weights))
        return multiply_together(rows, weights, *args, **options)

    monkeypatch.setattr(joined, "multiply_together", noted)
    monkeypatch.setattr(launching, "processors_of", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    made = [finite(name, count, 256) for count in outputs]
    rows, bias = torch.randn(m, 256).half(), torch.randn(sum(outputs)).half()
    out = launching.multiply_each(rows, [own.weight for own in made], bias, pdl=False)
    whole = made[0]._replace(values=torch.cat([own.values for own in made]))
    check(out, rows, whole, bias)
    are_joined = (9 if "int4" in name else 1) <= m < 600
    one_by_one = [1] * len(outputs)
    assert launches == (([3] if outputs == (128, 128, 48) else one_by_one) if are_joined else [])


# ---- compiled, without a GPU

JOINED = [
    name for name, (format, kind) in FORMATS.items() if format.bits == 4 or (format.layout == "rows" and not kind)
]


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [8, 32])
def test_codes_become_numbers_in_registers(name: str, rows: int) -> None:
    """No unpacked weight passes through shared memory: that takes as long as it takes to read the packed one."""
    from compiled_llm_ops.packed.kernels.tiles import _packed_tensor_cores as kernel

    format, types = FORMATS[name][0], types_of(name)
    inputs = block_inputs(format, 128)
    way = way_of(format, inputs)
    constants = {
        **groups_of(name), "WAY": way, "APART": can_be_apart(format, inputs),
        "ROWS": rows, "BN": 64, "BK": inputs, "STAGES": 4, "SPLIT": True,
        "MASKED": False, "ASM": "" if way == "gathered" else text_for(format.code, format.layout, torch.bfloat16),
        "PDL": True,
    }  # fmt: skip
    made = compiled(kernel, constants, types, aligned=ALIGNED & types.keys(), launch_pdl=True)
    assert ("wgmma" if rows > 8 else "mma.sync") in made.asm["ptx"]
    assert "atom" in made.asm["ptx"], "the last program finds itself"
    found = in_order(made.asm["ptx"])
    assert found.index("griddepcontrol.wait") < found.index("griddepcontrol.launch_dependents")
    last = len(found) - 1 - found[::-1].index("griddepcontrol.wait")
    assert not [one for one in found[:last] if one.startswith("st.")], "a program without inputs waits, too"
    if way in ("bytes", "halves"):
        assert not re.search(rf"local_alloc .*tensor<64x{inputs}xbf16", made.asm["ttgir"])


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("rows", TILE_ROWS)
@pytest.mark.parametrize("name", FORMATS)
def test_what_the_rule_chooses_fits_a_multiprocessor(name: str, rows: int) -> None:
    from compiled_llm_ops.packed.kernels.tiles import _packed_tensor_cores as kernel

    format, types = FORMATS[name][0], types_of(name)
    way = way_of(format, block_inputs(format, MAX_BLOCK))
    if way == "gathered":
        pytest.skip("left to cuBLAS")
    tiling = tiling_for(rows, format, 4096, 4096, 132)
    text = text_for(format.code, format.layout, torch.bfloat16)
    constants = {
        **groups_of(name), "WAY": way, "APART": tiling.apart, "ROWS": tiling.rows, "BN": tiling.outputs,
        "BK": tiling.inputs, "STAGES": tiling.stages, "SPLIT": True, "MASKED": False, "ASM": text, "PDL": False,
    }  # fmt: skip
    made = compiled(kernel, constants, types, warps=tiling.warps, aligned=ALIGNED & types.keys())
    assert made.metadata.shared <= SHARED_MEMORY


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("name", "tile", "halved"),
    [
        (name, tile, halved)
        for name in JOINED
        for tile in tiles_of(name)
        for halved in (False, True)[: 1 + (tile.rows >= FEWEST_HALVED)]
    ],
    ids=str,
)
def test_joined_codes_become_numbers_in_registers(name: str, tile: JoinedTile, halved: bool, tmp_path: Path) -> None:
    """Nothing spills, and blocks of rows and codes come by TMA."""
    made = joined(name, tile, halved=halved)
    if halved:
        whole = joined(name, tile)
        stores = [re.findall(r"local_(?:alloc|store) %", one.asm["ttgir"]) for one in (made, whole)]
        assert len(stores[0]) == len(stores[1]), "no rows pass through registers because of their halves"
    if FORMATS[name][0].code == "nf4" and (not FORMATS[name][1] or tile.inputs > 64):  # Triton carries a byte on
        assert not re.search(rf"local_alloc .*tensor<{tile.outputs}x\d+x[bf]+16", made.asm["ttgir"])
    assert ("wgmma" if tile.rows > 8 else "mma.sync") in made.asm["ptx"]
    assert "cp.async.bulk.tensor" in made.asm["ptx"]
    assert "STACK:0 " in resources_of(made.asm["cubin"], tmp_path / "cubin"), "registers spill"
    assert made.metadata.shared <= SHARED_MEMORY
    found = in_order(made.asm["ptx"])
    assert found.index("griddepcontrol.wait") < found.index("griddepcontrol.launch_dependents")
    last = len(found) - 1 - found[::-1].index("griddepcontrol.wait")
    assert not [one for one in found[:last] if one.startswith("st.")], "a program without inputs waits, too"


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(("name", "outputs", "warps"), [("torchao int8", 64, 4), ("torchao int4, tiles", 128, 8)])
def test_tensor_cores_have_ended_before_their_registers_are_written(name: str, outputs: int, warps: int) -> None:
    """As what `compiled` checks: on a GPU, int8 by row gave infinities at times."""
    code = joined(name, JoinedTile(32, outputs, 3, 1.0, warps)).asm["ptx"]
    assert set(re.findall(r"wgmma\.wait_group\S*\s+(\d+)", code)) == {"0"}


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("together", [2, 3])
@pytest.mark.parametrize("rows_of_tables", [False, True])
@pytest.mark.parametrize(
    ("name", "tile"),
    [
        (name, tile)
        for name in ANYWHERE
        for tile in (
            *tiles_of(name),
            *(JoinedTile(rows, 128, 4, 3.0) for rows in (16, 32, 64)),
        )
    ],
    ids=str,
)
def test_a_launch_of_several_weights_chooses_among_descriptors_where_they_are(
    name: str, tile: JoinedTile, rows_of_tables: bool, together: int, tmp_path: Path
) -> None:
    """One that is copied into a program's own memory is no descriptor."""
    made = joined(name, tile, together, rows_of_tables)
    assert "cp.async.bulk.tensor" in made.asm["ptx"]
    assert "STACK:0 " in resources_of(made.asm["cubin"], tmp_path / "cubin"), "registers spill"
    assert made.metadata.shared <= SHARED_MEMORY


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("tile", [*ROUNDED, TWO_ROUNDED], ids=str)
def test_rounded_rows_come_to_tensor_cores_in_eight_bits(tile: RoundedTile, tmp_path: Path) -> None:
    from compiled_llm_ops.packed.kernels.rounded import _packed_rounded as kernel

    constants = {
        "ROWS": tile.rows, "BN": tile.outputs, "BK": 128, "STAGES": tile.stages, "SPLIT": True, "PDL": True,
    }  # fmt: skip
    types = {
        "x": f"tensordesc<fp8e4nv[{tile.rows},128]>",
        "codes": f"tensordesc<fp8e4nv[{tile.outputs},128]>",
        "x_scales": "*fp32",
        "scales": "*fp32",
        "y": "*bf16",
        "parts": "*fp32",
        "counters": "*i32",
        **dict.fromkeys(("M", "N", "K", "padded", "scales_n", "splits"), "i32"),
    }
    aligned = [own for own in types if types[own].startswith("*") or own in ("N", "K", "padded")]
    made = compiled(kernel, constants, types, warps=tile.warps, aligned=aligned, launch_pdl=True)
    assert "wgmma.mma_async.sync.aligned.m64" in made.asm["ptx"]
    assert "e4m3.e4m3" in made.asm["ptx"]
    assert "STACK:0 " in resources_of(made.asm["cubin"], tmp_path / "cubin"), "registers spill"
    assert made.metadata.shared <= SHARED_MEMORY
    found = in_order(made.asm["ptx"])
    last = len(found) - 1 - found[::-1].index("griddepcontrol.wait")
    assert not [one for one in found[:last] if one.startswith("st.")], "a program without inputs waits, too"


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("rows", [8, 16])
def test_bytes_of_two_codes_are_loaded_16_at_a_time(rows: int, tmp_path: Path) -> None:
    from compiled_llm_ops.packed.kernels.tiles import _packed_tensor_cores as kernel

    name = "compressed-tensors int4"
    format, types = FORMATS[name][0], types_of(name)
    tiling = tiling_for(rows, format, 4096, 4096, 132)
    constants = {
        **groups_of(name), "WAY": "halves", "APART": tiling.apart, "ROWS": rows, "BN": tiling.outputs,
        "BK": tiling.inputs, "STAGES": tiling.stages, "SPLIT": True, "MASKED": False, "PDL": True,
        "ASM": text_for(format.code, format.layout, torch.bfloat16),
    }  # fmt: skip
    types = {own: type for own, type in types.items() if own in kernel.arg_names}
    made = compiled(kernel, constants, types, warps=tiling.warps, aligned=ALIGNED & types.keys(), launch_pdl=True)
    assert "STACK:0 " in resources_of(made.asm["cubin"], tmp_path / "cubin"), "registers spill"
    assert re.search(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", made.asm["ptx"])
    assert made.metadata.shared <= SHARED_MEMORY


def joined(name: str, tile: JoinedTile, together: int = 1, rows_of_tables: bool = False, halved: bool = False) -> Any:
    from compiled_llm_ops.packed.kernels.joined import _packed_joined as kernel

    format, kind = FORMATS[name]
    inputs = joined_inputs(described(name), torch.bfloat16, tile.inputs)
    scaled = format.code == "nf4" or kind == "added" or 0 < format.inputs < inputs
    constants = {
        **groups_of(name), "ROWS": tile.rows, "BN": tile.outputs, "BK": inputs, "STAGES": tile.stages, "SPLIT": True,
        "SCALED": scaled, "MASKED": False, "PDL": True,
        "ASM": pair_text_for(format.code, format.layout, torch.bfloat16, scaled=scaled),
    }  # fmt: skip
    types = {name: type for name, type in types_of(name).items() if name in kernel.arg_names}
    types |= {"scales": "*bf16"} if scaled and format.code != "nf4" else {}
    types |= {"zeros": "*bf16"} if kind == "added" else {}
    rows = f"2,{tile.rows // 2}" if halved else f"{tile.rows}"
    types |= {"x": f"tensordesc<bf16[{rows},{inputs}]>", "codes": block_of_codes(name, tile.outputs, inputs)}
    types |= others_of(types, together)
    if rows_of_tables:
        constants |= strides_of_rows(types)
    types = {own: type for own, type in types.items() if own not in constants}
    aligned = (ALIGNED - {"x", "codes"}) & types.keys()
    return compiled(kernel, constants, types, warps=tile.warps, aligned=aligned, launch_pdl=True)


def others_of(types: dict[str, str], together: int) -> dict[str, str]:
    """The types of what a kernel is given for the second weight of a launch and the third."""
    names = [own for own in ("codes", "scales", "zeros", "nested", "scales_k", "zeros_k") if own in types]
    others = {f"{own}_{number}": types[own] for number in range(2, together + 1) for own in names}
    return others | {f"begin_{number}": "i32" for number in range(2, together + 1)}


def strides_of_rows(types: dict[str, str]) -> dict[str, int]:
    """Strides of tables by rows, which Triton takes as known."""
    return dict.fromkeys((own for own in types if own.startswith(("scales_k", "zeros_k"))), 1)


def block_of_codes(name: str, outputs: int, inputs: int) -> str:
    format = FORMATS[name][0]
    sizes = {
        "tiles": (outputs // 8, inputs),
        "words_by_input": (inputs // 8, outputs),
        "words_by_output": (inputs, outputs // 8),
    }.get(format.layout, (outputs, inputs * format.bits // 8))
    return f"tensordesc<{'u8' if format.layout in ('rows', 'high_first') else 'i32'}[{sizes[0]},{sizes[1]}]>"


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", ["FP8Linear", "torchao int8", "torchao float8, one scale"])
def test_of_one_row_the_weight_alone_is_read_before_waiting(name: str) -> None:
    from compiled_llm_ops.packed.kernels.few_rows import _packed_few_rows as kernel

    constants = {**groups_of(name), "ROWS": 1, "BN": 4, "BK": 1024, "PREFETCHED": 4, "MASKED": False, "PDL": True}
    constants.pop("LAYOUT")
    types = {name: type for name, type in types_of(name).items() if name in kernel.arg_names}
    found = in_order(compiled(kernel, constants, types, aligned=ALIGNED & types.keys(), launch_pdl=True).asm["ptx"])
    before = found.index("griddepcontrol.wait")
    assert set(found[:before]) == {"ld.global"}
    assert len(found[:before]) == 4 * 4 * 1024 // (128 * 16), "16 bytes at a time, all of them"
    assert found[before + 1] == "griddepcontrol.launch_dependents"


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", FORMATS)
def test_unpacking_and_rounding_compile(name: str) -> None:
    import triton.language as tl

    from compiled_llm_ops.packed.kernels.rounded import _round
    from compiled_llm_ops.packed.kernels.unpacking import _unpack

    format, types = FORMATS[name][0], types_of(name)
    inputs = block_inputs(format, 128)
    exact = exact_nf4() if format.code == "nf4" else (text_for(format.code, format.layout, torch.bfloat16), "")
    constants = {
        **groups_of(name),
        "WAY": way_of(format, inputs),
        "BN": 64,
        "BK": inputs,
        "MASKED": False,
        "DTYPE": tl.bfloat16,
    }
    constants |= {"ASM": "" if way_of(format, inputs) == "gathered" else exact[0], "ASM_LOW": exact[1]}
    types = {name: type for name, type in types.items() if name in _unpack.arg_names} | {"values": "*bf16"}
    assert "st.global.v4" in compiled(_unpack, constants, types, aligned=ALIGNED & types.keys()).asm["ptx"]
    rounded = {"x": "*bf16", "rounded": "*fp8e4nv", "scales": "*fp32", **dict.fromkeys(("M", "K", "padded"), "i32")}
    code = compiled(_round, {"ROWS": 8, "BK": 128, "PDL": True}, rounded, launch_pdl=True).asm["ptx"]
    assert "cvt" in code
    assert in_order(code)[0] == "griddepcontrol.wait", "it reads and writes what previous kernels write and read"


ALIGNED = {"x", "codes", "scales", "zeros", "nested", "y", "parts", "counters", "values", "N", "K", "blocks"}


def groups_of(name: str) -> dict[str, Any]:
    format = FORMATS[name][0]
    return {"CODE": format.code, "LAYOUT": format.layout, "GROUP_N": format.outputs, "GROUP_K": format.inputs}


def types_of(name: str) -> dict[str, str]:
    format, kind = FORMATS[name]
    codes = "*fp8e4nv" if format.code == "e4m3" else "*u8" if format.layout in ("rows", "high_first") else "*i32"
    types = {"x": "*bf16", "codes": codes, "scales": "*fp32", "y": "*bf16", "parts": "*fp32", "counters": "*i32"}
    types |= {"taken": {"zeros": "*u8"}, "added": {"zeros": "*bf16"}}.get(kind, {})
    types |= {"scales": "*u8", "nested": "*fp32"} if kind == "nested" else {}
    numbers = ("M", "N", "K", "blocks", "scales_n", "scales_k", "zeros_n", "zeros_k", "splits")
    return types | dict.fromkeys(numbers, "i32")
