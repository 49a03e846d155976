"""The kernels of latent attention: under Triton's interpreter on the CPU, and compiled for Hopper without a GPU."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import Any

import pytest
import torch

from compiled_llm_ops.kernels.attention.decode_tiling import MAX_ROWS
from compiled_llm_ops.kernels.latent import latent_tiling
from compiled_llm_ops.kernels.latent.latent_tiling import (
    MOST_SHARES,
    STAGES,
    LatentTiling,
    choose_decode_tiling,
    decode_tile,
    query_tile,
    reads_by_hand,
)
from compiled_llm_ops.kernels.latent.step import check_kernel
from support.ops.compiling import compiled, in_order, resources_of
from support.ops.interpreting import interpreted, needs_triton, not_interpreted
from support.ops.latent_rows import MIXES, LatentRows, check_any_batch

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]

LARGE = 2.5e-3
"""How far float16 is off for values of about 1."""


def rows_of(lengths: Any, queries: Any = None, **sizes: Any) -> LatentRows:
    return LatentRows(lengths, queries, **{"dtype": torch.float16, **sizes})


def check(rows: LatentRows, spare: int | None = None, **fields: Any) -> None:
    """Decode with so many programs besides one for each row, or one a row, with some fields of a tiling."""
    from compiled_llm_ops.kernels.latent.decode import decode

    count, args = len(rows.lengths), rows.decode_arguments()
    tile = 1 if spare is None else -(-count // -(-count // MAX_ROWS))
    programs = tile + (spare or 0)
    shared = {"row_tile": tile, "programs": programs, "equal": programs}
    tiling = decode_tile(rows.query.shape[1], rows.rank)._replace(**{"block": 32, **shared, **fields})
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


@pytest.mark.whole
@interpreted
def test_many_rows_and_shares(seed):
    check(rows_of([0, *range(1, 40), 700, 0], page_size=16, seed=seed), 9)
    check(rows_of([2000, 3], page_size=16, seed=seed), 69, block=16)
    check(rows_of([0, 0], seed=seed), 2)


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("keys_first", [False, True], ids="keys_first={}".format)
@pytest.mark.parametrize("chosen", [None, 90], ids="chosen={}".format)
def test_many_programs_of_a_row_are_merged(keys_first, chosen, seed):
    """Rows without tokens, with one, shorter than a block, of a block and one more, and of hundreds of blocks."""
    sizes = {"chosen": chosen, "heads": 18, "page_size": 16, "seed": seed}
    check(rows_of([0, 1, 15, 16, 17, 700, 0], **sizes), 45, block=16, heads=16, keys_first=keys_first)
    alone = rows_of([700], **sizes)
    check(alone, 39, block=16, heads=32, keys_first=keys_first)
    check(alone, 0, block=64, heads=32, keys_first=keys_first)


@interpreted
@pytest.mark.parametrize("page_size", [3, 16, 64, 128])
def test_blocks_of_whole_pages_and_of_parts(page_size, seed):
    check(rows_of([1, 15, 16, 17, 63, 64, 65, 130], page_size=page_size, seed=seed), 5, block=64)


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("heads", [1, 3, 16, 32, 70], ids="heads={}".format)
def test_packed_queries(mix, heads, seed):
    check_packed(rows_of(*MIXES[mix], heads=heads, seed=seed))


@interpreted
@pytest.mark.parametrize("heads", [4, 20])
def test_invariant_bits_depend_on_a_rows_tokens_alone(heads, seed):
    """One kernel serves all batches; whether its compiler keeps to one order is seen on a GPU."""
    from compiled_llm_ops.kernels.latent.attention import attend, attend_newest

    def with_lse(launch):
        def launched(args):
            lse = torch.full(args.query_latent.shape[:2], torch.nan)
            return launch(args, lse), lse

        return launched

    rows = rows_of([17, 3, 70], [17, 3, 70], heads=heads, seed=seed)
    check_any_batch(rows, with_lse(attend), with_lse(attend_newest), seed, times=2)


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
    from compiled_llm_ops.contracts.devices import CudaDevice

    monkeypatch.setattr(decode, "device_of", lambda _: CudaDevice(132, 228 * 1024))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
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
    assert choose_decode_tiling(1, 16, 512, 65536, 132).programs == 132
    assert choose_decode_tiling(1, 16, 512, 1024, 132).programs == 16
    assert choose_decode_tiling(1, 128, 512, 65536, 132).programs == 66
    assert choose_decode_tiling(8, 16, 512, 65536, 132).programs == 8 * 16
    assert choose_decode_tiling(64, 128, 512, 65536, 132).programs == 32 * 4
    assert choose_decode_tiling(64, 16, 512, 64, 132).programs == 1


SHARED = {
    16: {(1, 1024): 16, (1, 8192): 64, (1, 65_536): 128, (8, 1024): 8, (8, 8192): 16, (8, 65_536): 16}
    | {(64, 1024): 2, (64, 8192): 2, (64, 65_536): 2},
    128: {(1, 1024): 8, (1, 8192): 32, (1, 65_536): 64, (8, 1024): 4, (8, 8192): 8, (8, 65_536): 8}
    | {(64, 1024): 1, (64, 8192): 1, (64, 65_536): 1},
}
"""Programs of a row on Hopper, by heads, rows and keys of each."""


@interpreted
@pytest.mark.parametrize("heads", [16, 20, 128], ids="heads={}".format)
def test_programs_of_a_row_on_hopper(heads):
    for (rows, keys), expected in SHARED[16 if heads == 20 else heads].items():
        tiling = choose_decode_tiling(rows, heads, 512, 65_536, 132, by_hand=True)
        for fewer in (0, 40):  # rows of a few tokens less are not cut otherwise
            lengths = [keys - fewer * (row % 2) for row in range(tiling.row_tile)]
            assert shares_of_first(lengths, tiling) == expected, (rows, keys, fewer)


@interpreted
def test_a_long_row_among_short_ones_has_more_programs():
    for rows, heads in ((64, 16), (64, 128), (200, 16)):
        tiling = choose_decode_tiling(rows, heads, 512, 65_536, 132, by_hand=True)
        assert shares_of_first([32_768] + [500] * (tiling.row_tile - 1), tiling) >= 16, (rows, heads)


def shares_of_first(lengths: list[int], tiling: LatentTiling) -> int:
    """How many programs share the first row of a tile, as the kernels find it."""
    import triton
    import triton.language as tl

    from compiled_llm_ops.kernels.attention.decode import _share
    from compiled_llm_ops.kernels.latent.step import least_share

    @triton.jit
    def count(lengths, out, rows, programs, min_share, few, equal, most: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
        each = tl.arange(0, most)
        blocks = tl.cdiv(tl.load(lengths + each, mask=each < rows, other=0), block)
        least = least_share(blocks, rows, min_share, few, equal)
        tl.store(out, _share(blocks, 0, programs, rows, least, least, 256)[2])

    count.fn.__globals__.update(tl=tl, _share=_share, least_share=least_share)
    out = torch.zeros(1, dtype=torch.int32)
    numbers = (len(lengths), tiling.programs, tiling.min_share, tiling.few, tiling.equal)
    count[(1,)](torch.tensor(lengths, dtype=torch.int32), out, *numbers, MAX_ROWS, tiling.block)
    return int(out)


def test_equal_rows_are_cut_so_that_multiprocessors_end_together():
    def equal(rows: int, heads: int = 16) -> int:
        return choose_decode_tiling(rows, heads, 512, 65_536, 132, by_hand=True).equal

    assert [equal(rows) for rows in (1, 32, 40, 64, 80, 96, 100, 200)] == [132, 4, 3, 2, 3, 4, 1, 1]
    assert [equal(rows, 128) for rows in (1, 8, 32, 64)] == [66, 8, 2, 1]


def test_what_is_read_by_hand(seed, monkeypatch):
    """All keys of rows in whole pages that divide a block, or chosen ones, of measured sizes, on Hopper."""
    monkeypatch.setattr(latent_tiling, "is_hopper", lambda _: True)
    sizes: dict[str, Any] = {"rank": 512, "size": 64, "page_size": 16, "seed": seed}
    args = rows_of([3, 20], **sizes).decode_arguments()
    assert reads_by_hand(args)
    for other in ({"chosen": 4}, {"chosen": 4, "page_size": 5}):
        assert reads_by_hand(rows_of([3, 20], **{**sizes, **other}).decode_arguments()), other
    for other in ({"rank": 256}, {"size": 32}, {"page_size": 5}, {"page_size": 128}):
        assert not reads_by_hand(rows_of([3, 20], **{**sizes, **other}).decode_arguments()), other
    monkeypatch.undo()
    assert not reads_by_hand(args), "on a CPU"


def test_pages_at_an_odd_address_are_refused(seed):
    args = rows_of([3, 20], rank=16, size=16, page_size=16, seed=seed).decode_arguments()
    odd = torch.zeros(args.pages.numel() + 1, dtype=args.pages.dtype)[1:].view(args.pages.shape)
    with pytest.raises(ValueError, match="latent_decode: pages must begin at a multiple of 16 bytes"):
        check_kernel("latent_decode", args._replace(pages=odd))
    check_kernel("latent_decode", args)


def test_tiles_of_decode_have_room():
    """Two blocks of latents at least and the queries, in shared memory, and sums in half of the registers."""
    for heads in (1, 16, 20, 64, 128):
        for rank in (16, 256, 512):
            tile = decode_tile(heads, rank)
            assert 16 <= tile.heads <= 64, (heads, rank)
            assert tile.heads * rank <= 128 * 32 * tile.warps
            assert 2 * (2 * tile.block + tile.heads) * (rank + 64) <= 224 * 1024


def test_programs_merge_all_of_a_latent():
    for heads in (16, 20, 128):
        for rank in (16, 64, 512):
            for rows in (1, 8, 64):
                tiling = choose_decode_tiling(rows, heads, rank, 65536, 132)
                assert rank % tiling.merged == 0, (heads, rank, rows)
                assert tiling.merged_parts * tiling.merged <= 2**12
                assert tiling.merged == rank or rows * heads * rank <= 3 * 132 * tiling.merged


# ---- compiled, without a GPU


def stack_of(made: Any, path: Any) -> int:
    (stack,) = re.findall(r"STACK:(\d+)", resources_of(made.asm["cubin"], path / "cubin"))
    return int(stack)


def types_of(kernel: Any, tensors: tuple[str, ...], table: tuple[str, ...], sums: tuple[str, ...]) -> dict[str, str]:
    named = {**dict.fromkeys(tensors, "*bf16"), **dict.fromkeys(table, "*i32"), **dict.fromkeys(sums, "*fp32")}
    numbers = ("rows", "row_tile", "heads", "head_tiles", "programs", "min_share", "few", "equal", "tokens", "listed")
    numbers += ("each", "before")
    strides = [name for name in kernel.arg_names if name.endswith("_stride")]
    integers = [*strides, *(name for name in numbers if name in kernel.arg_names)]
    scale = {"scale": "fp32"} if "scale" in kernel.arg_names else {}
    return {**named, **dict.fromkeys(integers, "i32"), **scale}


TENSORS = ("query_latent", "query_rope", "latent", "rope", "pages", "out")
TABLE = ("starts", "lengths", "indices", "shares")
SUMS = ("lse", "partials", "partial_lses")

BY_HAND = pytest.mark.parametrize(("heads", "page_size"), [(16, 16), (20, 1), (128, 64)])


@functools.cache
def by_hand(heads: int, page_size: int, *lists: str) -> Any:
    """The kernel for Hopper, compiled."""
    from compiled_llm_ops.kernels.latent.hopper import _latent_decode_hopper as kernel

    tile, types = decode_tile(heads, 512, by_hand=True), types_of(kernel, TENSORS, (*TABLE, *lists), SUMS)
    aligned = [name for name, kind in types.items() if kind.startswith("*") or name.endswith("_stride")]
    constants = {
        "ROWS": 32, "MOST": MOST_SHARES, "TILE": tile.heads, "RANK": 512, "ROPE": 64, "PAGE": page_size,
        "BLOCK": tile.block, "KEYS_FIRST": tile.keys_first, "PDL": True,
    }  # fmt: skip
    return compiled(kernel, constants, types, tile.warps, aligned, launch_pdl=True)


FEW_SPILLED = 256
"""Bytes of a thread's stack: sums fill the registers of large tiles, and some addresses are read again."""

SIZES = pytest.mark.parametrize(
    ("heads", "rank", "size"), [(16, 512, 64), (20, 512, 64), (128, 512, 64), (40, 256, 32)]
)

LISTS = pytest.mark.parametrize("table", [(), ("chosen",)], ids=str)


@pytest.mark.whole
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@SIZES
@LISTS
def test_decode_fits_registers_and_shared_memory(table, heads, rank, size, tmp_path):
    from compiled_llm_ops.kernels.latent import decode

    kernel, tile = decode._latent_decode, decode_tile(heads, rank)
    constants = {
        "ROWS": 32, "MOST": MOST_SHARES, "TILE": tile.heads, "RANK": rank, "ROPE": size, "PAGE": 16,
        "BLOCK": tile.block, "STAGES": tile.stages, "KEYS_FIRST": tile.keys_first, "PDL": True,
    }  # fmt: skip
    types = types_of(kernel, TENSORS, (*TABLE, *table), SUMS)
    aligned = [name for name, kind in types.items() if kind.startswith("*") or name.endswith("_stride")]
    made = compiled(kernel, constants, types, tile.warps, aligned, launch_pdl=True)
    assert stack_of(made, tmp_path) <= FEW_SPILLED, "registers spill"
    assert made.metadata.shared <= 227 * 1024
    assert "wgmma.mma_async" in made.asm["ptx"]
    assert "cp.async.cg.shared.global" in made.asm["ptx"], "latents are copied past registers, 16 bytes at a time"
    steps = in_order(made.asm["ptx"])
    begun = steps.index("griddepcontrol.launch_dependents")
    assert "griddepcontrol.wait" in steps[:begun]
    before = [step for step in steps[: steps.index("griddepcontrol.wait")] if step != "griddepcontrol.wait"]
    assert set(before) == {"ld.global"}, "where pages begin, and lengths"


@pytest.mark.whole
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@BY_HAND
@LISTS
def test_the_kernel_by_hand_fits_registers_and_shared_memory(table, heads, page_size, tmp_path):
    made = by_hand(heads, page_size, *table)
    assert stack_of(made, tmp_path) <= (FEW_SPILLED if table else 0), "registers spill"
    assert made.metadata.shared <= 227 * 1024
    steps = in_order(made.asm["ptx"])
    assert "cp.async.cg" in steps
    assert "cp.async.ca" not in steps, "sixteen bytes at a time"
    before = steps[: steps.index("griddepcontrol.launch_dependents")]
    assert set(before) == {"ld.global", "griddepcontrol.wait", "st.global"}, (
        "what rows without keys have, and the table"
    )
    assert before[-1] == "griddepcontrol.wait"


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@BY_HAND
@LISTS
def test_no_warp_multiplies_what_another_one_has_yet_to_copy(table, heads, page_size):
    """And none copies over what another one still multiplies: barriers and fences stand between."""
    ptx = by_hand(heads, page_size, *table).asm["ptx"]
    names = {
        "cp.async.cg": "copy", "cp.async.wait_group": "copied", "bar.sync": "barrier", "fence.proxy.async": "fence",
        "wgmma.mma_async": "multiply", "wgmma.wait_group": "multiplied", "st.shared": "store", "stmatrix": "store",
    }  # fmt: skip
    found = re.findall("|".join(map(re.escape, names)), ptx)
    steps = [names[step] for number, step in enumerate(found) if step != found[number - 1] or not number]
    # The compiler puts the loop's head, which waits for copies, at its end.
    head, end = steps.index("copied"), steps.index("fence")
    loop = steps[head : head + 3] + steps[end:head]
    assert steps.count("copied") == 1
    assert loop[:6] == ["copied", "barrier", "copy", "fence", "barrier", "multiply"]
    assert loop[6] == "multiplied", "of logits"
    assert loop[-5:] == ["store", "fence", "barrier", "multiply", "multiplied"]
    newest, first = steps.index("barrier"), steps.index("copy")
    assert newest < first, "the newest latent is written before it is copied"
    assert steps[head + 3] == "barrier", "other uses of shared memory wait for all products"


@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("rows", [1, 64])
def test_merging_waits_before_it_reads(rows, tmp_path):
    from compiled_llm_ops.kernels.latent import decode

    kernel, tiling = decode._merge_shares, choose_decode_tiling(rows, 16, 512, 65536, 132)
    constants = {
        "TILE": tiling.heads, "RANK": 512, "CHUNK": tiling.merged_parts, "COLUMNS": tiling.merged,
        "STAGES": decode.MERGE_STAGES, "BLIND": True, "PDL": True,
    }  # fmt: skip
    types = types_of(kernel, ("out",), ("shares",), ("lse", "partials", "partial_lses"))
    aligned = [name for name, kind in types.items() if kind.startswith("*")]
    made = compiled(kernel, constants, types, 4, aligned, launch_pdl=True)
    assert stack_of(made, tmp_path) == 0, "registers spill"
    assert in_order(made.asm["ptx"])[:2] == ["griddepcontrol.wait", "griddepcontrol.launch_dependents"]
    assert "cp.async.cg.shared.global" in made.asm["ptx"], "sixteen bytes at a time"


@pytest.mark.drawn(most=1)
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
