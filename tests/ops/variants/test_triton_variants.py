"""Variants in the decode kernel: here under Triton's interpreter on the CPU; on a GPU see `test_variants_gpu.py`."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm_ops.contracts import DecodeAttention
from compiled_llm_ops.contracts.devices import CudaDevice
from compiled_llm_ops.kernels.attention.decode_tiling import (
    MAX_ROWS,
    MAX_SHARES,
    AttentionTiling,
    choose_attention_tiling as choose,
)
from compiled_llm_ops.kernels.attention.packed_tiling import PackedTiling, packed_tiling
from compiled_llm_ops.variants import packed
from compiled_llm_ops.variants.contracts import PagedAttentionVariant
from compiled_llm_ops.variants.triton_source import logits_transform, source_of
from support.ops.compiling import compiled, resources_of
from support.ops.interpreting import interpreted, needs_triton, not_interpreted
from support.ops.op_cases import Batch
from support.ops.variants import EXAMPLES, expected, registered

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]

LENGTHS = [3, 16, 17, 64, 65, 200]
COMPILED = [
    pytest.mark.parametrize(
        "name", [pytest.param(own, marks=[pytest.mark.whole] * (at % 6 != first)) for at, own in enumerate(EXAMPLES)]
    )
    for first in (0, 3)
]
"""For each of the two kernels, the examples with which every run compiles it; all of them with `--whole`."""


def batch_of(new_tokens: int = 1, group: int = 3, seed: int = 0) -> Batch:
    new = [new_tokens] * len(LENGTHS)
    options = {"head_dim": 48, "padded": 64, "page_size": 16, "dtype": torch.float16}
    return Batch(LENGTHS, new, group=group, seed=seed, **options).filled()


def launch(name: str, batch: Batch, tensors: list[Tensor], spare: int, window_left: int = -1) -> tuple[Tensor, Tensor]:
    """Attend with so many programs besides one for each row."""
    from compiled_llm_ops.kernels.attention.decode import prepare_decode

    rows = len(LENGTHS)
    tile = AttentionTiling(rows if spare else 1, rows + spare if spare else 1, 1, 1, block=16, stages=3, warps=4)
    lse = torch.empty(batch.query.shape[:2])
    args = DecodeAttention(*batch.decode_arguments(), window_left)
    transform = logits_transform(registered(name), tensors)
    out, run = prepare_decode(args, lse, tiling=tile, pdl=False, transform=transform)
    run()
    torch.testing.assert_close(args.pages, batch.pages)
    return out, lse


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("spare", [0, 9])
@pytest.mark.parametrize(("new_tokens", "window"), [(1, -1), (1, 40), (3, -1)])
def test_examples_in_the_decode_kernel(name: str, spare: int, new_tokens: int, window: int, seed: int) -> None:
    batch = batch_of(new_tokens, seed=seed)
    tensors = EXAMPLES[name].tensors(len(LENGTHS), *batch.query.shape[:2])
    out, lse = launch(name, batch, tensors, spare, window)
    outputs, sums = expected(batch, EXAMPLES[name], tensors, window)
    size = max(1.0, float(outputs.abs().max()))
    torch.testing.assert_close(out.float() / size, outputs / size, rtol=3e-3, atol=3e-3)
    if EXAMPLES[name].softmax:
        torch.testing.assert_close(lse, sums, rtol=1e-3, atol=3e-3)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is for CUDA launches on tensors of the CPU, with tiles so small that rows have several."""
    from compiled_llm_ops.kernels.attention import packed

    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(packed, "device_of", lambda _: CudaDevice(0, 0))
    monkeypatch.setattr(packed, "packed_tiling", lambda *_: PackedTiling(16, 16, 3, 4))


@pytest.mark.drawn
@interpreted
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("window", [-1, 20])
def test_examples_in_the_kernel_of_packed_queries(name: str, window: int, seed: int) -> None:
    options = {"head_dim": 48, "padded": 64, "page_size": 16, "dtype": torch.float16}
    batch = Batch([9, 30, 70, 41], [9, 3, 40, 1], group=3, seed=seed, **options).filled()
    tensors = EXAMPLES[name].tensors(4, *batch.query.shape[:2])
    query, pages, qo_indptr, *table, _, _, scale = batch.arguments()
    variant = registered(name)
    args = PagedAttentionVariant(query, pages, qo_indptr, *table, variant.name, tensors, scale, window)
    out, lse = packed._cuda(args, variant.softmax)
    outputs, sums = expected(batch, EXAMPLES[name], tensors, window)
    size = max(1.0, float(outputs.abs().max()))
    torch.testing.assert_close(out.float() / size, outputs / size, rtol=3e-3, atol=3e-3)
    if lse is not None:
        torch.testing.assert_close(lse, sums, rtol=1e-3, atol=3e-3)


@pytest.mark.whole
@interpreted
def test_a_query_that_sees_no_key_has_zeros_wherever_programs_end(seed: int) -> None:
    batch = batch_of(3, group=1, seed=seed)
    for spare in (0, 9):
        out, lse = launch("blind", batch, [], spare)
        assert bool((out[:2] == 0).all())
        assert bool((lse[:3, 1] == -torch.inf).all())
        assert bool(out.isfinite().all())


def test_the_source_says_what_the_function_says() -> None:
    source = source_of(registered("unseen"))
    assert source.startswith("@triton.jit\ndef logits(logit, row, head, query, query_position, key_position, tensors")
    assert "floor_mod(head, (3))" in source
    assert "tl.load(tensors[0] + row.to(tl.int64))" in source
    assert "def visible" not in source
    source = source_of(registered("inkling"))
    assert "mask=(head >= 0) & (head < sizes[0]) & (x1 >= 0) & (x1 < sizes[1]), other=0" in source


# ---- compiled, without a GPU

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64"}
POINTERS |= {torch.bool: "*i1"}


def of_variant(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The constants and types that are a variant's."""
    given = EXAMPLES[name].tensors(2, 2, 16)
    variant = logits_transform(registered(name), given)
    types: dict[str, Any] = {}
    if given:
        types["tensors"] = tuple(POINTERS[tensor.dtype] for tensor in given)
    if variant.sizes:
        types["sizes"] = tuple("i32" for _ in variant.sizes)
    return variant.constants, types


STATES = dict.fromkeys(("query", "key", "value", "pages", "out", "query_norm", "key_norm", "cos", "sin"), "*bf16")
TABLE = dict.fromkeys(("starts", "lengths", "indices", "arrivals", "qo_indptr"), "*i32")
NUMBERS = dict.fromkeys(("rows", "row_tile", "window_left", "unsplit", "min_share"), "i32")
NUMBERS |= dict.fromkeys(("scale", "cap", "epsilon"), "fp32")
PARTS = dict.fromkeys(("lse", "partials", "partial_lses"), "*fp32")


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@COMPILED[0]
@pytest.mark.parametrize("new_tokens", [1, 2])
def test_examples_in_the_decode_kernel_compile_for_hopper(name: str, new_tokens: int, tmp_path: Path) -> None:
    from compiled_llm_ops.kernels.attention.decode import _decode_paged_attention as kernel

    own, own_types = of_variant(name)
    tiling = choose(8, 8, 2 * new_tokens, 128, 40_960, 132, 228 * 1024)
    constants = {
        "ROWS": MAX_ROWS, "MOST": MAX_SHARES, "NEW": new_tokens, "GQA": 2, "PADDED": 2 * new_tokens, "HEAD": 128,
        "DIM": 128, "PAGE": 16, "BLOCK": tiling.block, "CHUNK": 16, "STAGES": tiling.stages, "CAPPED": False,
        "SHARE_EQUAL": tiling.share_equal, "PDL": True, **own,
    }  # fmt: skip
    types: dict[str, Any] = {**STATES, **PARTS, **NUMBERS, **TABLE, **own_types}
    types |= dict.fromkeys((argument for argument in kernel.arg_names if argument.endswith("_stride")), "i32")
    types = {argument: type for argument, type in types.items() if argument in kernel.arg_names}
    aligned = ("query", "pages", "row_stride")
    made = compiled(kernel, constants, types, tiling.warps, aligned, launch_pdl=True)
    (stack,) = re.findall(r"STACK:(\d+)", resources_of(made.asm["cubin"], tmp_path / "cubin"))
    assert int(stack) <= 16, "registers spill"
    before, _ = made.asm["ptx"].split("griddepcontrol.wait")
    assert len(re.findall(r"(?:ld|st|atom)\.global", before)) <= 4, "a variant's tensors may be the previous kernel's"


@pytest.mark.whole
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@COMPILED[1]
def test_examples_in_the_kernel_of_packed_queries_compile_for_hopper(name: str, tmp_path: Path) -> None:
    from compiled_llm_ops.kernels.attention.packed import _packed_attention as kernel

    own, own_types = of_variant(name)
    tiling = packed_tiling(1000, 128, 2, 2, 228 * 1024)
    constants = {
        "QUERIES": tiling.queries, "GQA": 2, "KV_HEADS": 8, "HEAD": 128, "DIM": 128, "PAGE": 16, "KEYS": tiling.keys,
        "STAGES": tiling.stages, "WINDOWED": True, "CAPPED": False, "NEW": 0, **own,
    }  # fmt: skip
    types = {**STATES, **PARTS, **NUMBERS, **TABLE, **own_types, "row_stride": "i32", "head_stride": "i32"}
    types = {argument: type for argument, type in types.items() if argument in kernel.arg_names}
    made = compiled(kernel, constants, types, tiling.warps, ("pages", "out"))
    (stack,) = re.findall(r"STACK:(\d+)", resources_of(made.asm["cubin"], tmp_path / "cubin"))
    assert int(stack) <= 16, "registers spill"
