"""The kernels of latent attention: under Triton's interpreter on the CPU, and compiled for Hopper without a GPU."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch

from compiled_llm_ops.kernels.attention.decode_tiling import MAX_ROWS, MAX_SHARES, AttentionTiling
from compiled_llm_ops.kernels.latent.latent_tiling import MOST_SHARES, STAGES, choose_decode_tiling, query_tile
from support.ops.compiling import compiled, in_order, resources_of
from support.ops.interpreting import interpreted, needs_triton, not_interpreted
from support.ops.latent_rows import MIXES, LatentRows

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]

LARGE = 2.5e-3
"""How far float16 is off for values of about 1."""


def rows_of(lengths: Any, queries: Any = None, **sizes: Any) -> LatentRows:
    return LatentRows(lengths, queries, **{"dtype": torch.float16, **sizes})


def check(rows: LatentRows, spare: int | None = None, block: int = 32, unsplit: int = 1) -> None:
    """Decode with so many programs besides one for each row, or one a row."""
    from compiled_llm_ops.kernels.latent.decode import decode

    count = len(rows.lengths)
    tile = 1 if spare is None else -(-count // -(-count // MAX_ROWS))
    tiling = AttentionTiling(tile, tile + (spare or 0), unsplit, 1, block, STAGES, 4)
    args = rows.decode_arguments()
    lse = torch.full(args.query_latent.shape[:2], torch.nan)
    out = decode(args, lse, tiling=tiling, pdl=False)
    expected, expected_lse = rows.expected()
    torch.testing.assert_close(args.pages, rows.written(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(out.float(), expected, rtol=LARGE, atol=LARGE)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=2e-3)


def check_packed(rows: LatentRows) -> None:
    from compiled_llm_ops.kernels.latent.attention import attend

    args = rows.arguments()
    lse = torch.full(args.query_latent.shape[:2], torch.nan)
    out = attend(args, lse)
    expected, expected_lse = rows.expected()
    torch.testing.assert_close(out.float(), expected, rtol=LARGE, atol=LARGE)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=2e-3)


LENGTHS = [1, 31, 32, 33, 0, 64, 65, 300]


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("heads", [1, 4, 16, 20, 70, 128], ids="heads={}".format)
@pytest.mark.parametrize("spare", [None, 0, 6], ids="spare={}".format)
def test_decode_with_any_heads_and_programs(heads, spare, seed):
    check(rows_of(LENGTHS, heads=heads, page_size=16, seed=seed), spare)


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize(("rank", "size"), [(16, 16), (64, 32), (256, 32), (512, 64)])
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_decode_with_any_sizes(rank, size, page_size, seed):
    check(rows_of([3, 40, 0, 65], rank=rank, size=size, page_size=page_size, seed=seed), 3)


@interpreted
def test_many_rows_and_shares(seed):
    check(rows_of([0, *range(1, 40), 700, 0], page_size=16, seed=seed), 9)
    check(rows_of([2000, 3], page_size=16, seed=seed), MAX_SHARES + 5, block=16)
    check(rows_of([0, 0], seed=seed), 2)


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("heads", [1, 3, 16, 32, 70], ids="heads={}".format)
def test_packed_queries(mix, heads, seed):
    check_packed(rows_of(*MIXES[mix], heads=heads, seed=seed))


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("chosen", [1, 32, 33, 100], ids="chosen={}".format)
@pytest.mark.parametrize("spare", [None, 0, 9], ids="spare={}".format)
def test_chosen_tokens_in_decode(chosen, spare, seed):
    """Others hold NaN; some queries see none."""
    check(rows_of(LENGTHS, chosen=chosen, heads=20, page_size=16, seed=seed), spare)
    rows = rows_of([300, 7], chosen=chosen, page_size=5, seed=seed)
    rows.chosen = [[-1] * chosen, [6, *[-1] * (chosen - 1)]]
    check(rows, spare)


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("heads", "chosen"), [(1, 1), (3, 5), (70, 33)])
def test_chosen_tokens_of_packed_queries(mix, heads, chosen, seed):
    check_packed(rows_of(*MIXES[mix], heads=heads, chosen=chosen, seed=seed))


@interpreted
def test_long_packed_rows(seed):
    check_packed(rows_of([150, 1, 90], [150, 1, 3], page_size=16, heads=2, seed=seed))
    check_packed(rows_of([50, 70], [3, 5], rank=512, size=64, page_size=16, heads=20, seed=seed))


@interpreted
def test_latents_are_written_where_they_belong(seed):
    from compiled_llm_ops.kernels.latent.append import append

    for rank, size in ((32, 16), (20, 6)):
        rows = rows_of([9, 13, 4], [2, 5, 4], rank=rank, size=size, seed=seed)
        args = rows.append_arguments()
        args = args._replace(rope=args.rope.T.contiguous().T)
        append(args)
        torch.testing.assert_close(args.pages, rows.written(), rtol=0, atol=0, equal_nan=True)


@interpreted
def test_queries_may_have_any_strides(seed):
    rows = rows_of([9, 4, 40], seed=seed)
    rows.query = torch.randn(48, 4, 3).half().permute(2, 1, 0)
    check(rows)
    check_packed(rows)


@interpreted
def test_the_ops_choose_their_tiling(seed, monkeypatch):
    """With a real device's numbers."""
    from compiled_llm_ops.attention.latent import attention, decode

    monkeypatch.setattr(decode, "device_of", lambda _: decode_device)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    from compiled_llm_ops.attention.decode import DecodeDevice

    decode_device = DecodeDevice(132, 228 * 1024)
    rows = rows_of([3, 0, 70], page_size=16, seed=seed)
    expected, expected_lse = rows.expected()
    for kernel, made in ((decode._cuda, rows.decode_arguments), (attention._cuda, rows.arguments)):
        assert kernel(made(), False)[1] is None
        out, lse = kernel(made(), True)
        torch.testing.assert_close(out.float(), expected, rtol=LARGE, atol=LARGE)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=2e-3)


# ---- the tiling


def test_tiles_hold_no_more_than_registers():
    for heads in (1, 5, 16, 20, 32, 40, 128):
        for rank in (16, 256, 512):
            for most in (1, 4):
                tile = query_tile(heads, rank, most)
                queries = tile.heads * tile.tokens
                assert 16 <= queries <= 64, (heads, rank, most)
                assert queries & (queries - 1) == 0
                assert tile.tokens == 1 or queries * rank <= 2**14


def test_programs_follow_the_device_and_the_keys():
    assert choose_decode_tiling(1, 16, 512, 65536, 132).programs == MOST_SHARES
    assert choose_decode_tiling(8, 16, 512, 65536, 132).programs == 8 * 16
    assert choose_decode_tiling(64, 128, 512, 65536, 132).programs == 32 * 4
    assert choose_decode_tiling(64, 16, 512, 64, 132).programs == 1


# ---- compiled, without a GPU


def stack_of(made: Any, path: Any) -> int:
    (stack,) = re.findall(r"STACK:(\d+)", resources_of(made.asm["cubin"], path / "cubin"))
    return int(stack)


def types_of(kernel: Any, tensors: tuple[str, ...], table: tuple[str, ...], sums: tuple[str, ...]) -> dict[str, str]:
    named = {**dict.fromkeys(tensors, "*bf16"), **dict.fromkeys(table, "*i32"), **dict.fromkeys(sums, "*fp32")}
    numbers = ("rows", "row_tile", "heads", "unsplit", "min_share", "tokens", "listed")
    strides = [name for name in kernel.arg_names if name.endswith("_stride")]
    integers = [*strides, *(name for name in numbers if name in kernel.arg_names)]
    return {**named, **dict.fromkeys(integers, "i32"), "scale": "fp32"}


SIZES = pytest.mark.parametrize(
    ("heads", "rank", "size"), [(16, 512, 64), (20, 512, 64), (128, 512, 64), (40, 256, 32)]
)

LISTS = pytest.mark.parametrize("table", [(), ("chosen",)], ids=str)


@pytest.mark.drawn
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@SIZES
@LISTS
def test_decode_fits_registers_and_shared_memory(table, heads, rank, size, tmp_path):
    from compiled_llm_ops.kernels.latent import decode

    kernel, tile = decode._latent_decode, query_tile(heads, rank)
    columns = min(rank, decode.MERGED_COLUMNS)
    constants = {
        "ROWS": 32, "MOST": 64, "TILE": tile.heads, "RANK": rank, "ROPE": size, "PAGE": 16, "BLOCK": tile.block,
        "COLUMNS": columns, "CHUNK": decode.MERGED_VALUES // (tile.heads * columns), "STAGES": STAGES,
        "SHARE_EQUAL": True, "PDL": True,
    }  # fmt: skip
    types = types_of(
        kernel,
        ("query_latent", "query_rope", "latent", "rope", "pages", "out"),
        ("starts", "lengths", "indices", "arrivals", *table),
        ("lse", "partials", "partial_lses"),
    )
    aligned = [name for name, kind in types.items() if kind.startswith("*") or name.endswith("_stride")]
    made = compiled(kernel, constants, types, tile.warps, aligned, launch_pdl=True)
    assert stack_of(made, tmp_path) == 0, "registers spill"
    assert made.metadata.shared <= 227 * 1024
    steps = in_order(made.asm["ptx"])
    begun = steps.index("griddepcontrol.launch_dependents")
    assert "griddepcontrol.wait" in steps[:begun]
    before = [step for step in steps[: steps.index("griddepcontrol.wait")] if step != "griddepcontrol.wait"]
    assert set(before) == {"ld.global"}, "where pages begin, and lengths"


@pytest.mark.drawn
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@SIZES
@LISTS
def test_packed_queries_fit_registers_and_shared_memory(table, heads, rank, size, tmp_path):
    from compiled_llm_ops.kernels.latent import attention

    kernel, tile = attention._latent_attention, query_tile(heads, rank, 1 if table else attention.MOST_TOKENS)
    constants = {
        "HEADS": tile.heads, "TOKENS": tile.tokens, "RANK": rank, "ROPE": size, "PAGE": 16, "BLOCK": tile.block,
        "STAGES": STAGES,
    }  # fmt: skip
    types = types_of(
        kernel,
        ("query_latent", "query_rope", "pages", "out"),
        ("token_rows", "token_positions", "indptr", "indices", *table),
        ("lse",),
    )
    aligned = [name for name, kind in types.items() if kind.startswith("*") or name.endswith("_stride")]
    made = compiled(kernel, constants, types, tile.warps, aligned)
    assert stack_of(made, tmp_path) == 0, "registers spill"
    assert made.metadata.shared <= 227 * 1024
