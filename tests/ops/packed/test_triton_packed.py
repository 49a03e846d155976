"""The kernel of packed queries with the tiling for speed, under Triton's interpreter on the CPU, and compiled; on a GPU
see `test_packed_gpu.py`. `invariant` and `variants` have tests of what is theirs.
"""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm_ops import plain_attention
from compiled_llm_ops.backends import backend_named
from compiled_llm_ops.contracts import AppendPagedKv, PagedAttention
from compiled_llm_ops.contracts.devices import CudaDevice
from compiled_llm_ops.kernels.attention.packed_tiling import (
    FEWEST,
    LARGEST_HEAD,
    SMALLEST_HEAD,
    PackedTiling,
    packed_tiling,
)
from compiled_llm_ops.protocol import owner_of
from support.ops.compiling import compiled, resources_of
from support.ops.fp8_pages import KINDS, Fp8Batch
from support.ops.interpreting import interpreted, needs_triton, not_interpreted
from support.ops.op_cases import Batch

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]

SHARED_MEMORY = 228 * 1024
"""Bytes of an H100's multiprocessor."""

LENGTHS, QUERIES = [1, 16, 17, 40, 33, 16], [1, 16, 2, 21, 33, 0]
"""One token, a full page, one more; whole rows and the ends of some, and a row without queries."""


def attend(
    batch: Batch, tiling: PackedTiling, window_left: int = -1, soft_cap: float = 0.0, **given: Any
) -> tuple[Tensor, Tensor]:
    from compiled_llm_ops.kernels.attention.packed import PackedQueries, attend as launch

    args = PagedAttention(*batch.arguments(), window_left, soft_cap, **given)
    out, lse = torch.full_like(args.query, torch.nan), torch.full(args.query.shape[:2], torch.nan)
    launch(PackedQueries.of(args), out, lse, tiling)
    return out, lse


def expected_lse(batch: Batch, window_left: int, soft_cap: float) -> Tensor:
    """`[T, H]`, in base 2."""
    taken, rows = 0, []
    for length, count, states in zip(batch.lengths, batch.queries, batch.keys, strict=True):
        keys = states.float().repeat_interleave(batch.group, 1)
        logits = torch.einsum("qhd,lhd->qhl", batch.query[taken : taken + count].float(), keys) * batch.scale
        if soft_cap:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        if count:
            logits = logits + batch.mask(length, count, window_left)[0, 0][:, None]
        rows.append(torch.logsumexp(logits, -1) / math.log(2))
        taken += count
    return torch.cat(rows)


def batch_of(seed: int, **sizes: Any) -> Batch:
    return Batch(LENGTHS, QUERIES, **{"page_size": 16, "dtype": torch.float16, "seed": seed, **sizes}).filled()


def check(batch: Batch, tiling: PackedTiling, window_left: int, soft_cap: float) -> None:
    out, lse = attend(batch, tiling, window_left, soft_cap)
    exact = batch.query.dtype == torch.float32
    near = {"rtol": 1e-5, "atol": 1e-5} if exact else {"rtol": 5e-3, "atol": 5e-3}
    torch.testing.assert_close(out.float(), batch.expected(batch.scale, window_left, soft_cap), **near)
    near = {"rtol": 1e-5, "atol": 1e-5} if exact else {"rtol": 1e-3, "atol": 3e-3}
    torch.testing.assert_close(lse, expected_lse(batch, window_left, soft_cap), **near)


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("group", [1, 2, 5, 7, 71])
@pytest.mark.parametrize(("window_left", "soft_cap"), [(-1, 0.0), (4, 0.0), (15, 1.5), (16, 0.0), (300, 0.0)])
def test_groups_windows_and_caps(group: int, dtype: torch.dtype, window_left: int, soft_cap: float, seed: int) -> None:
    """Tiles hold parts of tokens if a group is larger, or does not divide them."""
    batch = batch_of(seed, group=group, kv_heads=2 if group < 8 else 1, head_dim=64, dtype=dtype)
    check(batch, PackedTiling(16, 16, 2, 4), window_left, soft_cap)


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("head_dim", "padded"), [(64, 64), (80, 128), (256, 256), (320, 512), (512, 512)])
def test_sizes_of_heads_with_the_tiling_that_the_rule_takes(
    head_dim: int, padded: int, dtype: torch.dtype, seed: int
) -> None:
    batch = batch_of(seed, group=3, head_dim=head_dim, padded=padded, dtype=dtype)
    tokens, rows = len(batch.query), len(LENGTHS)
    itemsize = dtype.itemsize
    check(batch, packed_tiling(3 * tokens / rows, padded, itemsize, itemsize, SHARED_MEMORY), 20, 0.0)


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_pages_of_any_size(page_size: int, seed: int) -> None:
    check(batch_of(seed, group=2, head_dim=64, page_size=page_size), PackedTiling(32, 32, 2, 4), 9, 0.0)


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_fp8(kind: str, dtype: torch.dtype, seed: int) -> None:
    sizes: dict[str, Any] = {"head_dim": 64, "page_size": 16, "dtype": dtype, "group": 3}
    batch = Fp8Batch(LENGTHS, QUERIES, kind=kind, seed=seed, **sizes).filled()
    given = {"key_scale": batch.scales.key, "value_scale": batch.scales.value}
    out, lse = attend(batch, PackedTiling(16, 32, 2, 4), 20, 1.5, **given)
    near = 2e-2 if dtype == torch.bfloat16 else 5e-3
    torch.testing.assert_close(out.float(), batch.read().expected(batch.scale, 20, 1.5), rtol=near, atol=near)
    torch.testing.assert_close(lse, batch.expected_lse(batch.scale, 20, 1.5), rtol=near, atol=near)


@interpreted
def test_pages_before_all_windows_are_not_read(seed: int) -> None:
    batch = Batch([200], [20], head_dim=64, page_size=16, dtype=torch.float16, seed=seed).filled()
    first = (200 - 20 - 50) // 16
    batch.pages[batch.indices[:first].long()] = torch.nan
    check(batch, PackedTiling(16, 16, 2, 4), 50, 0.0)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_backend_appends_and_attends_by_its_own_kernels(
    dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is for CUDA launches on tensors of the CPU; plain PyTorch is not there."""
    from compiled_llm_ops.kernels.attention import packed

    sizes: dict[str, Any] = {"group": 3, "head_dim": 80, "padded": 128, "page_size": 16, "dtype": dtype, "seed": seed}
    batch, backend = Batch(LENGTHS, QUERIES, **sizes), backend_named("triton")
    expected, sums = batch.expected(batch.scale, 20, 1.5), expected_lse(batch, 20, 1.5)
    for name in ("attend_row_by_row", "append"):
        monkeypatch.setattr(plain_attention, name, None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(packed, "device_of", lambda _: CudaDevice(132, SHARED_MEMORY))
    key, value, places = torch.cat(batch.keys), torch.cat(batch.values), batch.slots([0] * len(LENGTHS), LENGTHS)
    backend.append(AppendPagedKv(key, value, batch.pages, *places, *batch.table))
    plan = backend.new_plan(backend.workspace(torch.device("cpu"), 0), 0)
    args = PagedAttention(*batch.arguments(), 20, 1.5)._replace(plan=plan.tensor)
    args = args._replace(query=torch.nn.functional.pad(args.query, (0, 48)))  # as the op does
    out, lse = torch.empty_like(args.query), torch.empty(args.query.shape[:2])
    owner_of(plan.tensor).launch(args, out, lse)
    near = 5e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(out[..., :80].float(), expected, rtol=near, atol=near)
    torch.testing.assert_close(lse, sums, rtol=near, atol=near)
    assert not out[..., 80:].any()


# ---- the rule


def test_tilings_fit_into_shared_memory() -> None:
    head_dim = SMALLEST_HEAD
    while head_dim <= LARGEST_HEAD:
        for query_bytes, number_bytes in ((2, 2), (2, 1), (4, 4), (4, 1)):
            for shared_memory in (100 * 1024, 164 * 1024, SHARED_MEMORY):
                for row_queries in (1.0, 16.0, 17.0, 64.0, 1e4):
                    tiling = packed_tiling(row_queries, head_dim, query_bytes, number_bytes, shared_memory)
                    assert FEWEST <= tiling.queries < max(2 * row_queries, 4 * FEWEST + 1)
                    assert tiling.keys >= FEWEST
                    of_keys = 2 * tiling.stages * tiling.keys * number_bytes
                    assert head_dim * (tiling.queries * query_bytes + of_keys) < shared_memory
        head_dim *= 2
    assert packed_tiling(1e4, 128, 2, 2, SHARED_MEMORY).queries == 128


# ---- compiled, without a GPU


@pytest.mark.drawn(most=1)
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("query", "pages"),
    [
        ("bf16", "bf16"),
        ("fp16", "fp8e4nv"),
        ("bf16", "fp8e4nv"),
        ("fp32", "fp32"),
        pytest.param("fp32", "fp8e4nv", marks=pytest.mark.whole),
    ],
)
@pytest.mark.parametrize(
    ("head_dim", "gqa"), [(64, 3), (128, 2), (128, 71), (256, 8), pytest.param(512, 5, marks=pytest.mark.whole)]
)
@pytest.mark.parametrize("row_queries", [1, 1000, 5000])
@pytest.mark.parametrize("windowed", [False, True])
def test_it_compiles_for_hopper_without_spilling(
    query: str, pages: str, head_dim: int, gqa: int, row_queries: int, windowed: bool, tmp_path: Path
) -> None:
    from compiled_llm_ops.kernels.attention.packed import _packed_attention as kernel

    sizes = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8e4nv": 1}
    tiling = packed_tiling(row_queries, head_dim, sizes[query], sizes[pages], SHARED_MEMORY)
    types = {"query": f"*{query}", "out": f"*{query}", "pages": f"*{pages}", "lse": "*fp32"}
    types |= dict.fromkeys(("qo_indptr", "starts", "last_page_len", "indices"), "*i32")
    types |= dict.fromkeys(("row_stride", "head_stride", "rows", "window_left"), "i32")
    types |= dict.fromkeys(("scale", "cap"), "fp32")
    constants = {
        "QUERIES": tiling.queries, "GQA": gqa, "KV_HEADS": 8, "HEAD": head_dim, "DIM": head_dim, "PAGE": 16,
        "KEYS": tiling.keys, "STAGES": tiling.stages, "WINDOWED": windowed, "CAPPED": False, "NEW": 0,
    }  # fmt: skip
    made = compiled(kernel, constants, types, tiling.warps, ("query", "pages", "out", "row_stride", "head_stride"))
    (stack,) = re.findall(r"STACK:(\d+)", resources_of(made.asm["cubin"], tmp_path / "cubin"))
    assert int(stack) <= (128 if head_dim <= 128 else 512), "registers spill more than was measured"
    assert made.metadata.shared <= SHARED_MEMORY - 1024
    assert ("tf32" in made.asm["ptx"], "fma.rn.f32" in made.asm["ptx"]) == (False, True) or query != "fp32"
