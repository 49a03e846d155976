"""The kernels of `skinny_linear`, of norms and of log-probabilities, under Triton's interpreter on the CPU.

`test_linear_gpu.py` and `test_sampling_gpu.py` run them on a GPU. Shapes: M rows, N outputs, K or I inputs.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import compiled_llm_ops
from compiled_llm_ops import chained_linear, normed_linear, top_logprobs
from compiled_llm_ops.contracts.sampling import TopLogprobs
from compiled_llm_ops.kernels.linear.chained_tiling import ChainedTiling, MatmulTile, choose_chained_tiling
from compiled_llm_ops.kernels.linear.skinny_tiling import LinearTiling
from support.ops.compiling import compiled, in_order
from support.ops.interpreting import interpreted, needs_triton, not_interpreted
from support.ops.logprob_cases import check_packed, logits_of

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]

TILINGS = [
    LinearTiling(rows=1, outputs=4, tiles=1, inputs=256, stages=1, prefetched=3),
    LinearTiling(rows=1, outputs=2, tiles=1, inputs=512, stages=1, prefetched=1),
    LinearTiling(rows=2, outputs=4, tiles=1, inputs=512, stages=1, prefetched=2),
    LinearTiling(rows=2, outputs=16, tiles=1, inputs=256, stages=1, prefetched=0),
    LinearTiling(rows=16, outputs=64, tiles=1, inputs=256, stages=5, prefetched=0),
    LinearTiling(rows=16, outputs=64, tiles=3, inputs=128, stages=4, prefetched=0),
    LinearTiling(rows=32, outputs=64, tiles=2, inputs=128, stages=5, prefetched=0),
    LinearTiling(rows=64, outputs=16, tiles=1, inputs=256, stages=5, prefetched=0),
    LinearTiling(rows=64, outputs=64, tiles=3, inputs=128, stages=3, prefetched=0),
    LinearTiling(rows=64, outputs=64, tiles=1, inputs=512, stages=1, prefetched=0),
    LinearTiling(rows=64, outputs=128, tiles=1, inputs=128, stages=4, prefetched=0),
]


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("n", [48, 208], ids="N={}".format)
def test_every_tiling_multiplies(tiling: LinearTiling, n: int, seed: int) -> None:
    from compiled_llm_ops.kernels.linear.skinny import multiply

    most = tiling.rows if tiling.rows < 64 else 2 * tiling.rows + 3
    for m in {1, 2, 5, tiling.rows - 1, tiling.rows, most} & set(range(1, most + 1)):
        rows, weight = torch.randn(m, 768).half(), torch.randn(n, 768).half()  # bfloat16 it multiplies as integers
        out = multiply(rows, weight, tiling, pdl=False)
        torch.testing.assert_close(out.double(), rows.double() @ weight.double().T, rtol=1e-3, atol=1e-3)


ONE_ROW = [
    LinearTiling(rows=1, outputs=4, tiles=1, inputs=256, stages=1, prefetched=3),
    LinearTiling(rows=1, outputs=2, tiles=1, inputs=512, stages=1, prefetched=2),
]


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("normed", [False, True], ids=["as it is", "normed"])
@pytest.mark.parametrize("gated", [False, True], ids=["outputs", "gated"])
@pytest.mark.parametrize("tiling", [*ONE_ROW, ONE_ROW[0]._replace(prefetched=1)], ids=str)
@pytest.mark.parametrize("n", [46, pytest.param(208, marks=pytest.mark.whole)], ids="N={}".format)
def test_one_row_is_normed_and_gated(tiling: LinearTiling, n: int, gated: bool, normed: bool, seed: int) -> None:
    from compiled_llm_ops.kernels.linear.skinny import Normed, multiply_few

    k = 700
    if normed and tiling.prefetched * tiling.inputs < k:
        pytest.skip("not all inputs are prefetched")
    states, update = torch.randn(2, 1, k).half()
    norm, weight = torch.randn(k).half(), torch.randn(n, k).half() / 20
    total = torch.full_like(states, torch.nan)
    expected_total, expected = normed_linear(states, update, norm, 0.01, weight, gated)
    row = states if normed else torch.nn.functional.rms_norm(expected_total, (k,), norm, 0.01)
    given = Normed(update, norm, 0.01, total) if normed else None
    out = multiply_few(row, weight, tiling, normed=given, gated=gated, pdl=False)
    torch.testing.assert_close(out.float(), expected.float(), rtol=4e-3, atol=4e-3)
    assert not normed or torch.equal(total, expected_total)


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("gated", [False, True], ids=["outputs", "gated"])
@pytest.mark.parametrize(
    ("m", "tiling"),
    [
        *[(m, ChainedTiling(MatmulTile(8, 16, 256, 0), MatmulTile(8, 64, 64, 3))) for m in (2, 5, 8)],
        *[(m, ChainedTiling(MatmulTile(16, 16, 256, 0), MatmulTile(16, 64, 64, 3))) for m in (5, 16)],
        *[(m, ChainedTiling(MatmulTile(16, 64, 128, 3), MatmulTile(32, 64, 64, 3))) for m in (17, 70)],
        (131, ChainedTiling(MatmulTile(64, 32, 64, 3), MatmulTile(64, 16, 64, 3))),
    ],
    ids=str,
)
def test_two_products_with_a_norm_between_them(m: int, tiling: ChainedTiling, gated: bool, seed: int) -> None:
    from compiled_llm_ops.kernels.linear.chained import multiply_and_add, multiply_scaled

    rows, states = torch.randn(m, 512).half(), torch.randn(m, 192).half()
    weight, next_weight = torch.randn(192, 512).half() / 20, torch.randn(400, 192).half() / 10
    norm = torch.rand(192).half()
    expected_total, expected = chained_linear(rows, weight, states, norm, 0.01, next_weight, gated)
    given = multiply_and_add(rows, weight, states, norm, tiling, pdl=False)
    out = multiply_scaled(given, next_weight, 0.01, tiling, gated=gated, pdl=False)
    torch.testing.assert_close(given.total.float(), expected_total.float(), rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(out.float(), expected.float(), rtol=1e-2, atol=1e-2)


@interpreted
@pytest.mark.parametrize("n", [48, 1100], ids="N={}".format)
def test_halves_are_gated(n: int, seed: int) -> None:
    from compiled_llm_ops.kernels.linear.norm import silu_and_mul

    product = torch.randn(3, 2 * n).half()
    first, second = product.chunk(2, -1)
    expected = torch.nn.functional.silu(first) * second
    torch.testing.assert_close(silu_and_mul(product, pdl=False), expected, rtol=2e-3, atol=2e-3)


# ---- compiled, without a GPU


def constants_of(tiling: LinearTiling) -> dict[str, Any]:
    return {"ROWS": tiling.rows, "BN": tiling.outputs, "BK": tiling.inputs, "PDL": True}


POINTERS = dict.fromkeys("xwy", "*bf16")


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("tiling", [tiling for tiling in TILINGS if tiling.rows > 2], ids=str)
def test_with_tensor_cores_weights_alone_are_asked_for_before_waiting(tiling: LinearTiling) -> None:
    """Kernels in front may still write before `gdc_wait`; whoever is let go relies on that this one has waited."""
    from compiled_llm_ops.kernels.linear.skinny import _linear_tensor_cores as kernel

    types = {**POINTERS, **dict.fromkeys("MNK", "i32")}
    types |= {name: f"tensordesc<bf16[{n},{tiling.inputs}]>" for name, n in zip("xw", tiling[:2], strict=True)}
    constants = {**constants_of(tiling), "TILES": tiling.tiles, "STAGES": tiling.stages}
    code = compiled(kernel, constants, types, launch_pdl=True).asm["ptx"]
    found = in_order(code)
    before = found.index("griddepcontrol.wait")
    assert set(found[:before]) == {"cp.async.bulk"}
    assert found.index("griddepcontrol.launch_dependents") > before
    assert "ld.global" not in found
    moved = re.search(r"mov\.b64\s+(%\w+), \w+_param_0;", code)  # where rows are described
    described = moved and re.search(rf"cvta\.param\.u64\s+(%\w+), {moved[1]};", code)
    assert described
    first_read = code.index(f", [{described[1]}, ")
    assert code.index("griddepcontrol.wait") < first_read


CHAINED = {"gated": (6144, 2048, True), "plain": (4096, 3072, False)}


def pair_of(m: int, outputs: int, inputs: int, gated: bool) -> ChainedTiling:
    tiling = choose_chained_tiling(m, 1024, inputs, outputs // (2 if gated else 1), gated)
    assert tiling is not None
    return tiling


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("m", [8, 16], ids="M={}".format)
@pytest.mark.parametrize(("outputs", "inputs", "gated"), CHAINED.values(), ids=CHAINED)
def test_of_two_products_the_first_reads_weights_alone_before_waiting(
    outputs: int, inputs: int, gated: bool, m: int
) -> None:
    """As above, where programs ask for all their weights at once."""
    from compiled_llm_ops.kernels.linear.chained import _linear_add

    assert pair_of(m, outputs, inputs, gated).first == MatmulTile(m, 16, 1024, 0)
    types = {**dict.fromkeys(("x", "w", *SUMS), "*bf16"), "squares": "*fp32", "M": "i32", "N": "i32"}
    constants = {"K": inputs, "ROWS": m, "BN": 16, "BK": 1024, "SPLIT": 4, "PDL": True}
    aligned = ["x", "w", *SUMS, "squares", "N"]
    code = compiled(_linear_add, constants, types, aligned=aligned, launch_pdl=True).asm["ptx"]
    if m == 8:
        asked = code.partition("griddepcontrol.wait")[2].partition("st.shared")[0]
        assert asked.count("ld.global") == m * inputs * 2 // (128 * 16), "all inputs at once, 16 bytes each"
    found = in_order(code)
    before = found.index("griddepcontrol.wait")
    assert set(found[:before]) == {"ld.global"}
    assert found[before + 1] == "griddepcontrol.launch_dependents"
    weights = 16 * inputs * 2 // (128 * 16)  # of a thread, 16 bytes each
    assert found[:before].count("ld.global") == weights


SUMS = ("states", "norm", "total", "scaled")


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("m", [8, 64, 128, 256], ids="M={}".format)
@pytest.mark.parametrize(("outputs", "inputs", "gated"), CHAINED.values(), ids=CHAINED)
def test_of_two_products_weights_alone_are_asked_for_before_waiting(
    outputs: int, inputs: int, gated: bool, m: int
) -> None:
    """As above, in tiles; states and squares, which kernels in front write, are read after that, too."""
    tiling = pair_of(m, outputs, inputs, gated)
    kernels = [lambda pdl: second_of_two(gated, tiling.second, pdl)]
    if tiling.first.stages:
        kernels.append(lambda pdl: first_of_two(tiling.first, pdl))
    for kernel in kernels:
        code = kernel(pdl=True)
        found = in_order(code["ptx"])
        before = found.index("griddepcontrol.wait")
        assert set(found[:before]) == {"cp.async.bulk"}
        assert found.index("griddepcontrol.launch_dependents") > before
        assert found.index("ld.global") > before
        layouts = [sums_of(each["ttgir"]) for each in (code, kernel(pdl=False))]
        assert layouts[0] == layouts[1], "sums in another order, and so other bits"


def first_of_two(tile: MatmulTile, pdl: bool) -> Any:
    from compiled_llm_ops.kernels.linear.chained import _linear_add_tiles

    types = {**dict.fromkeys(SUMS, "*bf16"), "squares": "*fp32", **dict.fromkeys(["squares_stride", *"MNK"], "i32")}
    types |= {"x": block_of(tile.rows, tile), "w": block_of(tile.outputs, tile)}
    constants = {"STAGES": tile.stages, **constants_of_tile(tile, pdl)}
    aligned = [*SUMS, "squares", "squares_stride", "N", "K"]
    return compiled(_linear_add_tiles, constants, types, aligned=aligned, **({"launch_pdl": True} if pdl else {})).asm


def second_of_two(gated: bool, tile: MatmulTile, pdl: bool) -> Any:
    from compiled_llm_ops.kernels.linear.chained import _linear_of_scaled

    types = {"squares": "*fp32", "y": "*bf16", **dict.fromkeys(["squares_stride", *"MNK"], "i32"), "epsilon": "fp32"}
    types |= {"scaled": block_of(tile.rows, tile), "w": block_of(tile.outputs, tile)}
    constants = {"TILES": 64, "PARTS": 64, "GATED": gated, "STAGES": tile.stages, **constants_of_tile(tile, pdl)}
    aligned = ["squares", "squares_stride", "y", "N", "K"]
    return compiled(_linear_of_scaled, constants, types, aligned=aligned, **({"launch_pdl": True} if pdl else {})).asm


def block_of(size: int, tile: MatmulTile) -> str:
    return f"tensordesc<bf16[{size},{tile.inputs}]>"


def constants_of_tile(tile: MatmulTile, pdl: bool) -> dict[str, Any]:
    return {"ROWS": tile.rows, "BN": tile.outputs, "BK": tile.inputs, "PDL": pdl}


def sums_of(code: str) -> list[str]:
    """The layouts of what is summed, one for each line of a reduction's type."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    return [layouts[name] for name in re.findall(r"\}\) : \(tensor<[\dx]+f32, (#\w+)>\) ->", code)]


@pytest.mark.drawn(most=2)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("tiling", "changes"),
    [
        *[(tiling, {}) for tiling in TILINGS if tiling.rows <= 2],
        (TILINGS[0], {"TRIGGER_FIRST": True}),
        (TILINGS[0], {"normed": True}),
        (TILINGS[0], {"GATED": True}),
        (TILINGS[0], {"GATED": True, "normed": True}),
    ],
    ids=str,
)
def test_of_few_rows_weights_alone_are_read_before_waiting(tiling: LinearTiling, changes: dict[str, bool]) -> None:
    """As above; a kernel that triggers the next one first has written nothing by then, and waits all the same."""
    from compiled_llm_ops.kernels.linear.skinny import _skinny_linear_one_or_two_rows as kernel

    changes = {"GATED": False, "TRIGGER_FIRST": False, "normed": False, **changes}
    normed = changes.pop("normed")
    types = {**POINTERS, **dict.fromkeys("NK", "i32"), "epsilon": "fp32"}
    if normed:
        types |= dict.fromkeys(("update", "norm", "total"), "*bf16")
    masked = tiling.inputs == 512
    constants = {**constants_of(tiling), "PREFETCHED": tiling.prefetched, "MASKED": masked, **changes}
    found = in_order(compiled(kernel, constants, types, launch_pdl=True).asm["ptx"])
    before, let_go = map(found.index, ("griddepcontrol.wait", "griddepcontrol.launch_dependents"))
    assert let_go == before + (-1 if changes["TRIGGER_FIRST"] else 1)
    read = found[: min(before, let_go)]
    assert set(read) == ({"ld.global"} if tiling.prefetched else set())
    outputs = tiling.outputs * (2 if changes["GATED"] else 1) + normed
    assert len(read) == tiling.prefetched * outputs * tiling.inputs // 128, (
        "a thread's weights, one by one, and no more"
    )


@interpreted
@pytest.mark.parametrize("shape", [(1, 64), (3, 1, 96), (5, 1024), (2, 5000)], ids=str)
def test_sums_are_normed(shape: tuple[int, ...], seed: int) -> None:
    from compiled_llm_ops.kernels.linear.norm import add_rms_norm

    states, update = torch.randn(2, *shape).half()
    weight = torch.randn(shape[-1]).half()
    total, normed = add_rms_norm(states, update, weight, 0.01, pdl=False)
    expected_total, expected = compiled_llm_ops.add_rms_norm(states, update, weight, 0.01)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(normed, expected, rtol=2e-3, atol=1e-3)


@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
def test_nothing_but_the_weight_is_touched_before_waiting() -> None:
    from compiled_llm_ops.kernels.linear.norm import _add_rms_norm as kernel

    types = {**dict.fromkeys(("states", "update", "weight", "total", "normed"), "*bf16"), "epsilon": "fp32"}
    made = compiled(kernel, {"INPUTS": 1000, "BLOCK": 1024, "PDL": True}, types, launch_pdl=True)
    found = in_order(made.asm["ptx"])
    before = found.index("griddepcontrol.wait")
    assert found[:before] == ["ld.global"] * 8, "a thread's numbers of the weight, one by one"
    assert found[before + 1] == "griddepcontrol.launch_dependents"


KINDS = ["normal", "ties", "filtered", "strided"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plain_pytorch(kind: str, dtype: torch.dtype, seed: int) -> None:
    logits, tokens = logits_of(kind, 5, 700, dtype), torch.tensor([0, 699, 5, -1, 44])
    for num_logprobs in (0, 1, 20, 700):
        check_packed(top_logprobs(logits, tokens, num_logprobs), logits, tokens, num_logprobs)


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(("dtype", "tiles"), [("bf16", 2048), ("fp32", 1)])
def test_kernels_compile_without_a_gpu(dtype: str, tiles: int) -> None:
    from compiled_llm_ops.sampling.kernels import logprobs as kernels

    numbers = dict.fromkeys(("stride", "vocabulary", "tiles", "spans", "num_logprobs"), "i32")
    types = {"logits": f"*{dtype}", "tokens": "*i64", "likelier": "*i32", "packed": "*i32", **numbers}
    for kernel, constants in (
        (kernels._summarise_for_logprobs, {}),
        (kernels._take_likeliest, {"padded_tiles": tiles, "padded_spans": max(1, tiles // 32)}),
    ):
        compiled(kernel, constants, {**dict.fromkeys(kernel.arg_names, "*fp32"), **types})


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [5, 4225, *(pytest.param(one, marks=pytest.mark.whole) for one in (128, 9001))])
def test_kernels(vocabulary: int, dtype: torch.dtype, kind: str, seed: int) -> None:
    from compiled_llm_ops.sampling.kernels import logprobs as kernels

    logits, tokens = logits_of(kind, 3, vocabulary, dtype), torch.tensor([0, vocabulary - 1, -1])
    for num_logprobs in (0, min(7, vocabulary)):
        check_packed(kernels.top_logprobs(TopLogprobs(logits, tokens, num_logprobs)), logits, tokens, num_logprobs)
