"""The kernel of `strided_latent_attention` under Triton's interpreter; on a GPU see `test_mla_gpu.py`."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compiled_llm_flashinfer.ops.contracts import StridedLatentAttention
from support.flashinfer_api.latent_pools import LatentPools
from support.ops.compiling import compiled, resources_of
from support.ops.interpreting import interpreted, needs_triton, not_interpreted

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]


def attend(rows: LatentPools, states: tuple[Tensor, ...], causal: bool, parts: int) -> tuple[Tensor, Tensor]:
    from compiled_llm_flashinfer.ops.kernels.strided.latents import attend as launch
    from compiled_llm_ops.kernels.latent.latent_tiling import QueryTile

    out, lse = torch.full(states[0].shape, math.nan).to(states[0].dtype), torch.full(states[0].shape[:2], math.nan)
    launch(StridedLatentAttention(*states, out, lse, *rows.table, rows.scale, causal), QueryTile(4, 4, 16, 4), parts)
    return out, lse


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("heads", [3, 8])
@pytest.mark.parametrize("page_size", [1, 5])
def test_rows(page_size: int, heads: int, parts: int, causal: bool, seed: int) -> None:
    """Tiles are of 4 heads and 4 queries, blocks of 16 keys."""
    lengths, queries = [1, 16, 17, 40, 0, 33, 2], [1, 4, 2, 9, 3, 0, 5]
    rows = LatentPools(lengths, queries, heads=heads, rank=32, page_size=page_size, dtype=torch.float16, seed=seed)
    for states in (rows.parts, rows.apart):
        found = attend(rows, states, causal, parts)
        for own, exact in zip(found, rows.expected(causal), strict=True):
            torch.testing.assert_close(own.double(), exact, rtol=1e-2, atol=5e-3)


@interpreted
def test_results_of_other_strides_and_wide_tables(seed: int) -> None:
    from compiled_llm_flashinfer.ops.kernels.strided.latents import attend as launch

    rows = LatentPools(dtype=torch.float16, seed=seed)
    tokens, heads = rows.query.shape[:2]
    out, lse = torch.zeros(16, heads, tokens).half().permute(2, 1, 0), torch.zeros(heads, tokens).T
    table = [own.long() for own in rows.table]
    launch(StridedLatentAttention(*rows.parts, out, lse, *table, rows.scale, True), None, 1)
    for own, exact in zip((out, lse), rows.expected(True), strict=True):
        torch.testing.assert_close(own.double(), exact, rtol=1e-2, atol=5e-3)


@interpreted
def test_what_has_no_kernel_is_refused() -> None:
    from compiled_llm_flashinfer.ops.kernels.strided.latents import attend as launch

    rows = LatentPools(dtype=torch.float16)
    query, rope, latents, ropes = rows.apart
    out, lse = torch.zeros_like(query), torch.zeros(query.shape[:2])
    for states, message in (
        ((query.float(), rope.float(), latents, ropes), "no kernel for torch.float32"),
        ((query[..., :12], rope, latents[..., :12], ropes), "no kernel for R=12"),
        ((query, rope, latents.bfloat16(), ropes.bfloat16()), "latents must be torch.float16, as queries; got"),
        ((query, rope, latents.transpose(1, 2).contiguous().transpose(1, 2), ropes), "got latents of strides"),
    ):
        with pytest.raises(ValueError, match=message):
            launch(StridedLatentAttention(*states, out, lse, *rows.table, rows.scale))


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("heads", [16, 128])
def test_deepseeks_sizes_compile_for_hopper(heads: int, tmp_path: Path) -> None:
    from compiled_llm_flashinfer.ops.kernels.strided.latents import _strided_latents as kernel
    from compiled_llm_ops.kernels.latent.latent_tiling import STAGES, query_tile

    tile = query_tile(heads, 512, 4)
    constants = {
        "HEADS": heads, "QUERIES": tile.heads * tile.tokens, "RANK": 512, "ROPE": 64, "PAGE": 64, "BLOCK": tile.block,
        "STAGES": STAGES, "CAUSAL": True,
    }  # fmt: skip
    pointers = dict.fromkeys(kernel.arg_names[:4], "*bf16") | dict.fromkeys(kernel.arg_names[6:10], "*i32")
    pointers |= {"out": "*fp32", "lse": "*fp32", "scale": "fp32"}
    numbers = {name: "i32" for name in kernel.arg_names if name not in (*pointers, *constants)}
    aligned = [*kernel.arg_names[:6], *(name for name in numbers if name not in ("rows", "lse_token", "lse_part"))]
    made = compiled(kernel, constants, {**pointers, **numbers}, tile.warps, aligned)
    (stack,) = re.findall(r"STACK:(\d+)", resources_of(made.asm["cubin"], tmp_path / "cubin"))
    assert int(stack) <= 16, "registers spill"
    assert made.metadata.shared <= 227 * 1024
