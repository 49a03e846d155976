"""The decode kernel on CUDA: here under Triton's interpreter on the CPU; on a GPU see `test_ops_gpu.py`.

Shapes: B rows, L tokens of one row, H query heads, K kv heads, D head dimension, P pages, S page size.
"""

from __future__ import annotations

import importlib
import itertools
import random
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor

from compiled_llm_ops import paged_attention_lse
from compiled_llm_ops.attention.preparation import prepared
from compiled_llm_ops.contracts import DecodeAttention
from compiled_llm_ops.kernels.attention import decode_tiling
from compiled_llm_ops.kernels.attention.decode_tiling import (
    MAX_ROWS,
    MAX_SHARES,
    AttentionTiling,
    choose_attention_tiling as choose,
)
from support.ops.compiling import compiled, resources_of
from support.ops.fp8_pages import KINDS, check_codes, scales_of, stored, stored_pages
from support.ops.interpreting import INTERPRETED, interpreted, needs_triton, not_interpreted
from support.ops.op_cases import UNREAD, planned_table

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]

KV_HEADS = 2
SCALE = 0.3
H200 = {"processors": 132, "shared_memory": 228 * 1024}


@pytest.fixture(autouse=True)
def programs_run_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one row after the other, so that none can use what another one has left."""
    if not INTERPRETED:
        return
    builder = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    set_dim, set_idx, orders = builder.set_grid_dim, builder.set_grid_idx, {}

    def set_grid_dim(*grid: int) -> None:
        orders[grid] = random.sample(places := list(itertools.product(*map(range, grid))), len(places))
        set_dim(*grid)

    def set_grid_idx(x: int, y: int, z: int) -> None:
        _, height, depth = builder.grid_dim
        set_idx(*orders[builder.grid_dim][(x * height + y) * depth + z])

    monkeypatch.setattr(builder, "set_grid_dim", set_grid_dim)
    monkeypatch.setattr(builder, "set_grid_idx", set_grid_idx)


# ---- rows in pages


class Batch(NamedTuple):
    """Rows that decode: the op's arguments, in float16, which the interpreter multiplies as it should."""

    query: Tensor
    key: Tensor
    value: Tensor
    pages: Tensor
    starts: Tensor
    lengths: Tensor
    indices: Tensor

    def appended(self) -> Tensor:
        """The pages with the newest keys and values."""
        pages, new, size = self.pages.clone(), self.new_tokens, self.pages.shape[3]
        at = (self.lengths[:, None] - new + torch.arange(new)).flatten()
        states = torch.stack([self.key, self.value], 1)
        pages[self.indices[self.starts.repeat_interleave(new) + at // size], :, :, at % size, : self.key.shape[2]] = (
            states
        )
        return pages

    @property
    def new_tokens(self) -> int:
        return len(self.query) // len(self.starts)


def int32(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def batch_of(
    lengths: Sequence[int], group: int, page_size: int, head_dim: int, stored: int = 0, new_tokens: int = 1
) -> Batch:
    """Rows in pages of random order; free pages and free slots hold NaN, and so do those of the newest tokens."""
    counts = [-(-length // page_size) for length in lengths]
    total = sum(counts)
    numbers = torch.randperm(total) + 1
    pages = torch.full((total + 2, 2, KV_HEADS, page_size, stored or head_dim), torch.nan, dtype=torch.float16)
    pages[..., head_dim:] = 0
    starts = [0]
    for length, count in zip(lengths, counts, strict=True):
        own = numbers[starts[-1] : starts[-1] + count]
        states = torch.randn(2, KV_HEADS, count * page_size, head_dim).half()
        states[:, :, length - new_tokens :] = torch.nan
        pages[own, :, :, :, :head_dim] = states.unflatten(2, (count, page_size)).permute(2, 0, 1, 3, 4)
        starts.append(starts[-1] + count)
    indices = int32([*numbers.tolist(), *[total + 1] * 40])
    tokens = len(lengths) * new_tokens
    query = torch.randn(tokens, KV_HEADS * group, head_dim).half()
    key, value = torch.randn(2, tokens, KV_HEADS, head_dim).half()
    return Batch(query, key, value, pages, int32(starts[:-1]), int32(lengths), indices)


def launch(
    batch: Batch, tiling: int | AttentionTiling, window_left: int = -1, soft_cap: float = 0.0, **preparation: Any
) -> tuple[Tensor, Tensor]:
    """Attend with this tiling, or with so many programs besides one for each row."""
    from compiled_llm_ops.kernels.attention.decode import decode

    tiling = tiling_of(batch, tiling) if isinstance(tiling, int) else tiling
    lse = torch.empty(batch.query.shape[:2])
    given = DecodeAttention(*batch, SCALE, window_left, soft_cap, **preparation)
    return decode(given, lse, tiling=tiling, pdl=False), lse


def tiling_of(batch: Batch, spare: int, unsplit: int = 2, min_share: int = 1, row_tile: int = 0) -> AttentionTiling:
    """Blocks small enough for short rows to have several."""
    row_tile = row_tile or (len(batch.starts) if spare else 1)
    return AttentionTiling(
        row_tile, row_tile + spare, unsplit, min_share, block=8192 // batch.pages.shape[4], stages=3, warps=4
    )


def fewer(tiling: AttentionTiling) -> AttentionTiling:
    """A tiling with fewer programs: the interpreter takes its time."""
    return tiling._replace(programs=min(tiling.programs, tiling.row_tile + 5))


def check(
    batch: Batch, tiling: int | AttentionTiling, window_left: int = -1, soft_cap: float = 0.0, near: float = 2e-3
) -> tuple[Tensor, Tensor]:
    """Compare what this tiling gives, which is returned, with a dense computation."""
    pages = batch.appended()
    out, lse = launch(batch, tiling, window_left, soft_cap)
    torch.testing.assert_close(batch.pages, pages, rtol=0, atol=0, equal_nan=True)
    qo_indptr = torch.arange(len(batch.starts) + 1).int() * batch.new_tokens
    expected, expected_lse = paged_attention_lse(
        batch.query.float(), pages, qo_indptr, *planned_table(batch), *UNREAD, SCALE, window_left, soft_cap
    )
    assert expected.isfinite().all()
    assert out.is_contiguous()
    torch.testing.assert_close(out.float(), expected, rtol=near, atol=near)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)
    return out, lse


WHOLE = pytest.mark.whole
SPARE = pytest.mark.parametrize("spare", [0, 8], ids="spare={}".format)
LENGTHS = [1, 15, 16, 17, 64, 65, 300, 513]
FEW_LONG = [5000, 3, 2049]
FEW_AND_MANY = [300, 1000, 1, 40, 700, 1500, 65]


ROWS: list[dict[str, int]] = [
    {"group": 1, "head_dim": 128},
    {"group": 8},
    {"page_size": 1},
    {"page_size": 5},
    {"page_size": 1024},
    {"head_dim": 16, "stored": 64},
    {"head_dim": 96, "stored": 128},
]
MORE_ROWS: list[dict[str, int]] = [
    {"group": 1},
    {"group": 5},
    {"group": 5, "head_dim": 128},
    {"group": 8, "head_dim": 128},
    {"page_size": 64},
    {"head_dim": 80, "stored": 128},
]


@pytest.mark.drawn
@interpreted
@SPARE
@pytest.mark.parametrize("sizes", [*ROWS, *(pytest.param(sizes, marks=WHOLE) for sizes in MORE_ROWS)], ids=str)
def test_heads_and_pages_of_any_size(sizes, spare, seed):
    sizes = {"group": 2, "page_size": 16, "head_dim": 64, **sizes}
    lengths = {*LENGTHS, sizes["page_size"], sizes["page_size"] + 1}
    check(batch_of(sorted(lengths), **sizes), spare)


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize(
    ("lengths", "group", "spare", "row_tile"),
    [
        (FEW_LONG, 2, 30, 0),
        *((FEW_AND_MANY, 4, 5, row_tile) for row_tile in (1, 7)),
        *(pytest.param(FEW_LONG, 2, spare, 0, marks=WHOLE) for spare in (0, 49)),
        pytest.param(FEW_AND_MANY, 4, 5, 3, marks=WHOLE),
    ],
)
def test_long_rows_and_groups_of_rows_are_shared_by_many_programs(lengths, group, spare, row_tile, seed):
    batch = batch_of(lengths, group, 16, 128)
    check(batch, tiling_of(batch, spare, row_tile=row_tile))


@pytest.mark.whole
@interpreted
def test_of_many_rows_only_long_ones_are_shared(seed):
    batch = batch_of([256, 512, 513, 1100], 2, 16, 128)  # blocks: 4, 8, 9, 18
    expected, _ = launch(batch, 0)
    for spare, unsplit, min_share, shared in (
        (12, 3, 1, [True, True, True, True]),
        (12, 8, 1, [False, False, True, True]),
        (12, 3, 8, [False, False, True, True]),
        (3, 3, 1, [False, False, False, True]),
        (12, 3, 18, [False, False, False, False]),
    ):
        out, _ = launch(batch, tiling_of(batch, spare, unsplit, min_share))
        torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)
        found = [not torch.equal(*row) for row in zip(out, expected, strict=True)]
        assert found == shared, (spare, unsplit, min_share)


@pytest.mark.whole
@interpreted
@pytest.mark.parametrize(("rows", "long"), [pytest.param(8, 7, marks=WHOLE), (17, 8)])
def test_one_long_row_of_many(rows, long, seed):
    """In batches of more rows than share programs, too, and wherever it is."""
    lengths = torch.randint(1, 160, (rows,)).tolist()
    lengths[long] = 3000
    batch, tiling = batch_of(lengths, 2, 16, 128), fewer(choose(rows, 8, 2, 128, 40_960, **H200))
    out, _ = check(batch, tiling)
    alone, _ = launch(batch, tiling._replace(unsplit=1000))
    assert not torch.equal(out[long], alone[long])


@interpreted
@pytest.mark.parametrize(("window_left", "soft_cap"), [(-1, 0.0), (150, 5.0), pytest.param(10_000, 0.0, marks=WHOLE)])
def test_batches_of_mixed_rows(window_left, soft_cap, seed):
    for rows in (3, 16):
        batch = batch_of((2 ** (torch.rand(rows) * 11)).int().tolist(), 2, 16, 128)
        max_keys = 4096 if window_left < 0 else window_left + 1
        check(batch, fewer(choose(rows, KV_HEADS, 2, 128, max_keys, **H200)), window_left, soft_cap)


@pytest.mark.drawn
@interpreted
@SPARE
@pytest.mark.parametrize(
    "window_left", [0, *(pytest.param(left, marks=WHOLE) for left in (1, 20)), 300], ids="window={}".format
)
def test_nothing_outside_of_the_window_is_read(window_left, spare, seed):
    batch = batch_of(LENGTHS, 2, 16, 128)
    expected = check(batch, spare, window_left)
    for row, length in enumerate(LENGTHS):
        own = batch.indices[batch.starts[row] :]
        for position in range(length - 1 - window_left):
            batch.pages[own[position // 16], :, :, position % 16] = torch.nan
    for actual, other in zip(launch(batch, spare, window_left), expected, strict=True):
        assert torch.equal(actual, other)


@pytest.mark.drawn
@interpreted
@SPARE
@pytest.mark.parametrize("window_left", [pytest.param(-1, marks=WHOLE), 100], ids="window={}".format)
def test_capped_logits(window_left, spare, seed):
    batch = batch_of(LENGTHS, 4, 16, 64)
    check(batch, spare, window_left, soft_cap=2.0)
    check(batch._replace(query=batch.query * 1000), spare, window_left, soft_cap=30.0)


@interpreted
def test_log_sum_exp_may_be_left_out(seed):
    from compiled_llm_ops.kernels.attention.decode import decode

    batch = batch_of([40, 700], 17, 16, 64)
    out, _ = launch(batch, 3)
    assert torch.equal(out, decode(DecodeAttention(*batch, SCALE), None, tiling=tiling_of(batch, 3), pdl=False))


@interpreted
def test_queries_keys_and_values_may_have_any_strides(seed):
    batch = batch_of([40, 700], 2, 16, 64)
    fused = torch.randn(2, 8, 65).half()
    check(batch._replace(query=fused[:, :4, 1:], key=fused[:, 4:6, 1:], value=fused[:, 6:, :64]), 3)
    query, key, value = torch.randn(64, 8, 2).half().permute(2, 1, 0).split([4, 2, 2], dim=1)
    check(batch._replace(query=query, key=key, value=value), 3)


@interpreted
@SPARE
def test_rows_of_padding_are_harmless(spare, seed):
    """They write to the null page and read it, and may all be the same row of it. They count among the rows."""
    batch = batch_of([30, 1, 600], 2, 16, 64)
    alone = launch(batch, spare)
    padding = torch.ones(5, KV_HEADS, 64).half()
    padded = Batch(
        torch.cat([batch.query, torch.zeros(5, *batch.query.shape[1:]).half()]),
        torch.cat([batch.key, padding]),
        torch.cat([batch.value, padding]),
        batch.pages,
        torch.cat([batch.starts, int32([len(batch.indices)] * 5)]),
        torch.cat([batch.lengths, torch.ones(5, dtype=torch.int32)]),
        torch.cat([batch.indices, torch.zeros(1, dtype=torch.int32)]),
    )
    together = launch(padded, spare)
    for actual, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(actual[:3], expected, rtol=2e-3, atol=2e-3)
    assert bool((together[0][3:] == 1).all())


@pytest.mark.drawn
@interpreted
@SPARE
@pytest.mark.parametrize(("head_dim", "stored"), [(64, 64), pytest.param(96, 128, marks=WHOLE)])
@pytest.mark.parametrize("given", [pytest.param("norms", marks=WHOLE), "one norm", "positions", "both"])
def test_queries_and_keys_are_normed_and_turned_first(given, head_dim, stored, spare, seed):
    batch = batch_of(LENGTHS, 3, 16, head_dim, stored)
    angles = (torch.rand(len(LENGTHS), head_dim // 2) * 6).repeat(1, 2)
    preparation: dict[str, Any] = {"epsilon": 0.1}
    if given != "positions":
        preparation["query_norm"] = torch.randn(head_dim).half()
    if given in ("norms", "both"):
        preparation["key_norm"] = torch.randn(head_dim).half()
    if given in ("positions", "both"):
        preparation |= {"cos": angles.cos().half(), "sin": angles.sin().half()}
    arguments = DecodeAttention(*batch, SCALE, **preparation)
    query, key = (
        prepared(states.float(), None if norm is None else norm.float(), arguments)
        for states, norm in ((batch.query, arguments.query_norm), (batch.key, arguments.key_norm))
    )
    pages = batch._replace(key=key.half()).appended()
    out, lse = launch(batch, spare, **preparation)
    torch.testing.assert_close(batch.pages, pages, rtol=2e-3, atol=2e-3, equal_nan=True)
    one_each = torch.arange(len(query) + 1).int()
    expected, expected_lse = paged_attention_lse(query, pages, one_each, *planned_table(batch), *UNREAD, SCALE)
    torch.testing.assert_close(out.float(), expected, rtol=3e-3, atol=3e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-2)


@pytest.mark.drawn
@interpreted
@SPARE
@pytest.mark.parametrize(
    ("new_tokens", "sizes", "window_left"),
    [
        (2, {"group": 2}, -1),
        (3, {"group": 1, "page_size": 1}, 20),
        pytest.param(2, {"group": 2, "page_size": 5}, 0, marks=WHOLE),
        pytest.param(5, {"group": 4, "head_dim": 96, "stored": 128}, -1, marks=WHOLE),
        pytest.param(16, {"group": 5}, 300, marks=WHOLE),
    ],
)
def test_several_new_tokens_of_each_row(new_tokens, sizes, window_left, spare, seed):
    """Each sees those before it, whichever programs write them; blocks end between them, too."""
    sizes = {"page_size": 16, "head_dim": 64, **sizes}
    lengths = [new_tokens, new_tokens + 1, 16, 17, 64, 127, 128, 129, 130, 257, 513]
    batch = batch_of(sorted(length for length in lengths if length >= new_tokens), **sizes, new_tokens=new_tokens)
    check(batch, spare, window_left)
    check(batch, spare, window_left, soft_cap=2.0)


@interpreted
def test_several_new_tokens_are_normed_and_turned_by_their_own_positions(seed):
    batch = batch_of([2, 40, 129, 300], 2, 16, 64, new_tokens=2)
    angles = (torch.rand(len(batch.query), 32) * 6).repeat(1, 2)
    preparation = {"query_norm": torch.randn(64).half(), "key_norm": torch.randn(64).half(), "epsilon": 0.1}
    preparation |= {"cos": angles.cos().half(), "sin": angles.sin().half()}
    arguments = DecodeAttention(*batch, SCALE, **preparation)
    query, key = (
        prepared(states.float(), norm.float(), arguments)
        for states, norm in ((batch.query, arguments.query_norm), (batch.key, arguments.key_norm))
    )
    pages = batch._replace(key=key.half()).appended()
    out, lse = launch(batch, 3, **preparation)
    torch.testing.assert_close(batch.pages, pages, rtol=2e-3, atol=2e-3, equal_nan=True)
    qo_indptr = torch.arange(len(batch.starts) + 1).int() * 2
    expected, expected_lse = paged_attention_lse(query, pages, qo_indptr, *planned_table(batch), *UNREAD, SCALE)
    torch.testing.assert_close(out.float(), expected, rtol=3e-3, atol=3e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-2)


@pytest.mark.whole
@interpreted
def test_counters_are_zero_again(seed, monkeypatch):
    """The same ones serve launch after launch, over rows that grow and shrink."""
    from compiled_llm_ops.kernels.attention import decode as triton_attention

    counters = torch.zeros(4 * KV_HEADS, dtype=torch.int32)
    monkeypatch.setattr(triton_attention.zeroed_counters, "take", lambda count, device: counters[:count])
    for lengths in ([1, 2, 3, 4], [900, 1, 300, 257], [2000, 2000, 16, 16], [5, 1000]):
        check(batch_of(lengths, 2, 16, 128), 6)
        assert not counters.any()


@interpreted
def test_batches_of_any_size_are_two_kernels(seed, monkeypatch):
    """Or more would be compiled when batches grow, and for types that no test has compiled."""
    from compiled_llm_ops.kernels.attention import decode as triton_attention

    variants: list[tuple[list[Any], dict[str, Any]]] = []

    class Noted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *given, **constants: variants.append(
                ([getattr(value, "dtype", type(value)) for value in given], constants)
            )

    monkeypatch.setattr(triton_attention, "_decode_paged_attention", Noted())
    for lengths, spare in (([700], 7), ([40, 700], 0), ([40, 700], 7), ([40] * 32, 40)):
        launch(batch_of(lengths, 2, 16, 64), spare)
    (alone, unshared, shared, many) = variants
    assert alone == unshared
    assert shared == many
    assert (alone[0], {**alone[1], "ROWS": 32}) == shared
    assert shared[0][14:17] == [torch.float32, torch.float32, torch.int32]


@pytest.mark.drawn
@interpreted
@SPARE
@pytest.mark.parametrize("sizes", [{"group": 2}, {"group": 7, "new_tokens": 3}, {"group": 1, "head_dim": 256}], ids=str)
def test_float32_is_as_exact_as_it_can_be(sizes, spare, seed):
    sizes = {"page_size": 16, "head_dim": 64, "new_tokens": 1, **sizes}
    batch = batch_of([3, 16, 17, 65, 130], **sizes)
    states = {name: getattr(batch, name).float() for name in ("query", "key", "value", "pages")}
    batch = batch._replace(**{name: own * 1.001 for name, own in states.items()})  # more digits than 16 bits have
    tiling = choose(5, KV_HEADS, sizes["group"] * sizes["new_tokens"], sizes["head_dim"], 700, **H200, query_bytes=4)
    programs = {"row_tile": 5, "programs": 5 + spare} if spare else {"row_tile": 1, "programs": 1}
    check(batch, tiling._replace(unsplit=1, min_share=1, **programs), 100, near=1e-5)


@interpreted
@pytest.mark.parametrize("change", ["dtype", "pages"])
def test_what_the_kernel_cannot_read_raises(change, seed):
    batch = batch_of([40], 2, 16, 64)
    if change == "dtype":
        batch = batch._replace(query=batch.query.double())
    else:
        batch = batch._replace(pages=batch.pages.transpose(1, 2))
    with pytest.raises(ValueError, match=r"use torch\.float16, torch\.bfloat16, torch\.float32|must be contiguous"):
        launch(batch, 0)


# ---- pages of fp8


def launch_fp8(batch: Batch, kind: str, tiling: int, *how: Any, key: Tensor | None = None, **options: Any) -> None:
    """Launch with pages of fp8; compare what is written, and what attention with prepared `key` finds, with a table of
    fp8's numbers and attention in float32 over these.
    """
    scales = scales_of(kind, KV_HEADS)
    pages, read = stored_pages(batch.pages, scales)
    new_key, new_value = (
        stored(states, scale)
        for states, scale in zip((batch.key if key is None else key, batch.value), scales, strict=True)
    )
    expected_codes = batch._replace(key=new_key.codes, value=new_value.codes, pages=pages.view(torch.uint8)).appended()
    seen = batch._replace(key=new_key.read, value=new_value.read, pages=read).appended()
    fp8, query = scales.given, options.pop("query", batch.query.float())
    out, lse = launch(batch._replace(pages=pages), tiling, *how, **options, **fp8)
    if key is None:
        assert torch.equal(pages.view(torch.uint8), expected_codes)
        assert fp8["saturated"].tolist() == [new_key.clamped + new_value.clamped]
    else:
        check_codes(pages, expected_codes)
    qo_indptr = torch.arange(len(batch.starts) + 1).int() * batch.new_tokens
    expected, expected_lse = paged_attention_lse(query, seen, qo_indptr, *planned_table(batch), *UNREAD, SCALE, *how)
    tolerance = 3e-3 if key is None else 1e-2
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3 if key is None else 2e-2)


@pytest.mark.drawn
@interpreted
@SPARE
@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_values_of_fp8_are_rounded_and_read_as_stored(kind, spare, seed):
    launch_fp8(batch_of(LENGTHS, 2, 16, 64), kind, spare)


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize(("window_left", "soft_cap"), [(20, 0.0), (-1, 2.0), (300, 5.0)])
@pytest.mark.parametrize("sizes", [{"page_size": 5}, {"head_dim": 96, "stored": 128}, {"new_tokens": 3}], ids=str)
def test_windows_caps_and_sizes_of_any_kind_with_pages_of_fp8(sizes, window_left, soft_cap, seed, whole):
    sizes = {"group": 3, "page_size": 16, "head_dim": 64, **sizes}
    lengths = [length for length in LENGTHS if length >= sizes.get("new_tokens", 1)]
    for kind in ("both", "small") if whole else ("both",):
        launch_fp8(batch_of(lengths, **sizes), kind, 8, window_left, soft_cap)


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("kind", ["none", "both", "small"])
@pytest.mark.parametrize("new_tokens", [1, 2])
def test_queries_and_keys_are_normed_and_turned_before_they_are_rounded_to_fp8(new_tokens, kind, seed):
    batch = batch_of([2, 40, 129, 300], 2, 16, 64, new_tokens=new_tokens)
    angles = (torch.rand(len(batch.query), 32) * 6).repeat(1, 2)
    options: dict[str, Any] = {"query_norm": torch.randn(64).half(), "key_norm": torch.randn(64).half(), "epsilon": 0.1}
    options |= {"cos": angles.cos().half(), "sin": angles.sin().half()}
    arguments = DecodeAttention(*batch, SCALE, **options)
    query, key = (
        prepared(states.float(), norm.float(), arguments)
        for states, norm in ((batch.query, arguments.query_norm), (batch.key, arguments.key_norm))
    )
    launch_fp8(batch, kind, 3, key=key.half(), query=query, **options)


@interpreted
def test_a_nan_is_stored_in_fp8_as_one_and_infinities_as_the_largest(seed):
    batch = batch_of([40], 2, 16, 64)
    batch.key[0, 0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 449])
    launched, count = batch._replace(pages=batch.pages.to(torch.float8_e4m3fn)), torch.zeros(1, dtype=torch.int64)
    launch(launched, 0, saturated=count)
    page = launched.pages[launched.indices[2], 0, 0, 39 % 16, :4].float()
    assert page.isnan().tolist() == [True, False, False, False]
    assert page[1:].tolist() == [448, -448, 448]
    assert count.tolist() == [3]


# ---- who reads what


class Share(NamedTuple):
    """What one program reads of which row."""

    row: int
    first: int
    count: int
    begin: int
    end: int


def dealt(blocks: Sequence[int], tiling: AttentionTiling, more: int = 0) -> list[Share]:
    """What each program of a kv head finds, and so many programs past them."""
    from support.ops.share_kernel import share_kernel

    found = torch.full((tiling.programs + more, 5), -1, dtype=torch.int32)
    padded = 1 if tiling.row_tile == 1 else MAX_ROWS
    share_kernel[(len(found),)](
        int32(blocks),
        found,
        len(blocks),
        tiling.programs,
        tiling.unsplit,
        tiling.min_share,
        padded,
        MAX_SHARES,
        tiling.share_equal,
    )
    return [Share(*numbers) for numbers in found.tolist()]


def counts_of(shares: Sequence[Share], rows: int) -> list[int]:
    return [sum(share.row == row and share.count > 0 for share in shares) for row in range(rows)]


@pytest.mark.whole
@interpreted
@settings(derandomize=True, deadline=None, max_examples=5)
@given(
    st.lists(st.one_of(st.integers(1, 5), st.integers(1, 60), st.integers(1, 2**20)), min_size=1, max_size=32),
    st.integers(0, 69),
    st.integers(0, 5),
    st.integers(1, 5),
)
@example([3] * 32, 0, 2, 1)
@example([2**20] + [1] * 31, 0, 0, 1)
@example([1, 2, 2, 3], 2, 0, 1)
@example([1] * 20 + [64], 63, 0, 1)
@example([2**20, 3], 69, 0, 1)
def test_each_block_is_read_once(blocks, spare, unsplit, min_share):
    """By as many programs as there are, whatever the rows; those that read nothing come last."""
    tiling = AttentionTiling(len(blocks), len(blocks) + spare, unsplit, min_share, block=64, stages=3, warps=4)
    shares = dealt(blocks, tiling, more=3)
    counts = counts_of(shares, len(blocks))
    used = sum(counts)
    assert used <= tiling.programs
    assert all(share.count == 0 for share in shares[used:])
    assert all(
        count == 1 if most <= unsplit else count <= MAX_SHARES for count, most in zip(counts, blocks, strict=True)
    )
    size = max(-(-sum(blocks) // (spare + 1)), min_share)
    ends = [0] * len(blocks)
    for program, (row, first, count, begin, end) in enumerate(shares[:used]):
        assert count == counts[row]
        assert first + count > program >= first
        assert begin == ends[row] < end
        assert end - begin in (blocks[row] // count, -(-blocks[row] // count))
        assert end - begin <= size or blocks[row] <= unsplit or count == MAX_SHARES
        ends[row] = end
    assert ends == blocks


NEEDS = [
    (1, [384], [1]),
    (1, [1024], [8]),
    (1, [4096], [16]),
    (1, [32_768], [16]),
    (1, [4096] * 2, [8] * 2),
    (1, [4096] * 8, [4] * 8),
    (1, [1024] * 8, [1] * 8),
    (1, [4096] * 32, [4] * 32),
    (1, [*[160] * 7, 32_768], [*[1] * 7, 24]),
    (1, [32_768, *[160] * 31], [32, *[1] * 31]),
    (2, [4096] * 32, [1] * 32),
    (2, [*[1024] * 31, 4096], [*[1] * 31, 4]),
    (2, [*[4096] * 16, *[1024] * 16], [*[4] * 16, *[1] * 16]),
]
MORE_NEEDS = [
    (1, [4096] * 4, [4] * 4),
    (1, [1000] * 32, [1] * 32),
    (1, [3072, 1024, *[2048] * 14], [3, 1, *[2] * 14]),
    (2, [*range(1000, 1320, 10)], [1] * 32),
    (2, [30] * 32, [1] * 32),
]


@interpreted
@pytest.mark.parametrize(
    ("tiles", "lengths", "expected"), [*NEEDS, *(pytest.param(*needs, marks=WHOLE) for needs in MORE_NEEDS)]
)
def test_rows_are_shared_by_need(tiles, lengths, expected):
    """While that occupies multiprocessors that would be idle, and else where they are long, or uneven."""
    tiling = choose(tiles * len(lengths), 8, 2, 128, 40_960, **H200)
    shares = dealt([-(-length // tiling.block) for length in lengths], tiling)
    assert counts_of(shares, len(lengths)) == expected
    if tiles == 1:
        assert [share.count > 1 for share in shares] == sorted((share.count > 1 for share in shares), reverse=True)
    else:
        assert tiling.row_tile == len(lengths)


@interpreted
def test_no_program_is_waited_for(seed):
    """Where rows of mixed lengths fill the device, the longest share sets the time."""
    tiling = choose(64, 8, 2, 128, 40_960, **H200)
    blocks = [-(-length // tiling.block) for length in torch.randint(16, 4001, (tiling.row_tile,)).tolist()]
    assert max(share.end - share.begin for share in dealt(blocks, tiling)) * tiling.block <= 1024


# ---- compiled, without a GPU


COMPILED = [
    ("bf16", 2, 128, 1, {}),
    ("bf16", 2, 128, 8, {}),
    ("bf16", 4, 128, 33, {}),
    ("bf16", 16, 128, 1, {}),
    ("fp16", 8, 64, 32, {"CAPPED": True}),
    ("bf16", 71, 64, 1, {}),
    ("bf16", 4, 256, 64, {"HEAD": 160, "PAGE": 1}),
    ("bf16", 8, 512, 1, {}),
    ("bf16", 2, 128, 8, {"NEW": 2, "PADDED": 4}),
]
IN_EACH_RUN = (4, 6, 8)
"""The others have no size or option that these have not."""


FP8_CASES = {
    "pages alone": ("key_scale", "value_scale", "saturated"),
    "scales": ("saturated",),
    "scales and a count": (),
}
"""Which of the arguments that belong to fp8 are None."""


@pytest.mark.whole
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("head_dim", [128, 256, *(pytest.param(size, marks=WHOLE) for size in (64, 512))])
def test_float32_compiles_without_spilling(head_dim, tmp_path):
    from compiled_llm_ops.kernels.attention.decode import _decode_paged_attention as kernel

    tiling = choose(8, 8, 4, head_dim, 40_960, **H200, number_bytes=4, query_bytes=4)
    constants = {
        "ROWS": MAX_ROWS, "MOST": MAX_SHARES, "NEW": 1, "GQA": 4, "PADDED": 4, "HEAD": head_dim, "DIM": head_dim,
        "PAGE": 16, "BLOCK": tiling.block, "CHUNK": 2, "STAGES": tiling.stages, "CAPPED": False,
        "SHARE_EQUAL": tiling.share_equal, "PDL": True,
    }  # fmt: skip
    floats = ("query", "key", "value", "pages", "out", "query_norm", "key_norm", "cos", "sin", "partials")
    types = dict.fromkeys((*floats, "partial_lses"), "*fp32")
    types |= dict.fromkeys(("starts", "lengths", "indices", "arrivals"), "*i32")
    types |= dict.fromkeys((name for name in kernel.arg_names if name.endswith("_stride")), "i32")
    types |= dict.fromkeys(("rows", "row_tile", "window_left", "unsplit", "min_share"), "i32")
    types |= dict.fromkeys(("scale", "cap", "epsilon"), "fp32")
    made = compiled(kernel, constants, types, tiling.warps, ("query", "pages", "row_stride"), launch_pdl=True)
    assert "tf32" not in made.asm["ptx"]
    assert made.metadata.shared < H200["shared_memory"] // 2
    (stack,) = re.findall(r"STACK:(\d+)", resources_of(made.asm["cubin"], tmp_path / "cubin"))
    assert int(stack) <= 64, "registers spill"


def compiled_of_fp8(tiling, absent=(), dtype="bf16", **options):
    """The kernel over pages of fp8, two query heads for each of their kv heads; ``absent`` arguments are None."""
    from compiled_llm_ops.kernels.attention import decode as module

    kernel = module._decode_paged_attention
    constants = {
        "ROWS": MAX_ROWS, "MOST": MAX_SHARES, "NEW": 1, "GQA": 2, "PADDED": 2, "HEAD": 128, "DIM": 128, "PAGE": 16,
        "BLOCK": tiling.block, "CHUNK": 16, "STAGES": tiling.stages, "CAPPED": False, "SHARE_EQUAL": tiling.share_equal,
        "PDL": True, "lse": None, **dict.fromkeys(absent),
    }  # fmt: skip
    types = {
        **dict.fromkeys(("query", "key", "value", "out", "query_norm", "key_norm", "cos", "sin"), f"*{dtype}"),
        "pages": "*fp8e4nv",
        "saturated": "*i64",
        **dict.fromkeys(("partials", "partial_lses", "key_scale", "value_scale"), "*fp32"),
        **dict.fromkeys(("starts", "lengths", "indices", "arrivals"), "*i32"),
        **dict.fromkeys((name for name in kernel.arg_names if name.endswith("_stride")), "i32"),
        **dict.fromkeys(("rows", "row_tile", "window_left", "unsplit", "min_share"), "i32"),
        **dict.fromkeys(("scale", "cap", "epsilon"), "fp32"),
    }
    types = {name: type for name, type in types.items() if name not in absent}
    aligned = ("query", "pages", "row_stride")
    return compiled(kernel, constants, types, tiling.warps, aligned, launch_pdl=True, **options)


@pytest.mark.whole
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
def test_three_programs_of_fp8_fit_a_multiprocessor(tmp_path):
    tiling = choose(48, 8, 2, 128, 40_960, **H200, number_bytes=1)
    made = compiled_of_fp8(tiling, maxnreg=tiling.registers)
    found = resources_of(made.asm["cubin"], tmp_path / "cubin")
    (registers,), (stack,) = (re.findall(rf"{name}:(\d+)", found) for name in ("REG", "STACK"))
    assert 3 * 32 * tiling.warps * int(registers) <= 2**16
    assert 3 * (made.metadata.shared + 1024) <= H200["shared_memory"], "and a kilobyte for each program"
    assert int(stack) <= 16, "registers spill"


@pytest.mark.whole
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("left_out", ["pages alone", pytest.param("scales", marks=WHOLE), "scales and a count"])
def test_fp8_is_read_as_it_is_and_converted(left_out, dtype, tmp_path):
    """What is being loaded takes half of the shared memory, and is converted in registers, not byte by byte."""
    absent = FP8_CASES[left_out]
    made = compiled_of_fp8(choose(8, 8, 2, 128, 40_960, **H200), absent, dtype)
    (stack,) = re.findall(r"STACK:(\d+)", resources_of(made.asm["cubin"], tmp_path / "cubin"))
    assert int(stack) <= 16, "registers spill"
    assert made.metadata.shared <= 80 * 1024, "blocks of bfloat16 take 137 KB"
    ptx = made.asm["ptx"]
    assert "cvt.rn.f16x2.e4m3x2" in ptx, "from fp8"
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in ptx, "pairs of values"
    assert not re.findall(r"ld\.shared\.[bu]8\b", ptx), "values one by one"
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx, "to fp8"
    assert "min.NaN.xorsign.abs.f32" in ptx, "clamped before"
    assert ("div.rn.f32" in ptx) == ("key_scale" not in absent)
    assert len(re.findall(r"(?:atom|red)\.\S*add\.u64", ptx)) == (0 if "saturated" in absent else 2)
    before, _ = ptx.split("griddepcontrol.wait")
    touched = re.findall(r"cp\.async\.\w+\.shared|(?:ld|st|atom)\.global", before)
    assert touched == ["ld.global"] * len(touched)
    assert len(touched) <= 4, "no more than with other pages"


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("kernel_of", "with_lse", "prepares"),
    [
        pytest.param(case, with_lse, prepares, marks=[] if run and with_lse == number % 4 // 2 != prepares else WHOLE)
        for number, case in enumerate(COMPILED)
        for run in [number in IN_EACH_RUN]
        for with_lse, prepares in itertools.product((False, True), repeat=2)
    ],
    ids=str,
)
def test_nothing_but_the_page_table_is_touched_before_waiting(kernel_of, with_lse, prepares, tmp_path):
    """Kernels in front may still write before `gdc_wait`; whoever is let go relies on that this one has waited."""
    from compiled_llm_ops.kernels.attention import decode as module

    dtype, group, head_dim, rows, changes = kernel_of
    padded, kernel = 1 << (group - 1).bit_length(), module._decode_paged_attention
    tiling = choose(rows, 8, group, head_dim, 40_960, **H200)
    constants = {
        "ROWS": 1 if rows == 1 else MAX_ROWS, "MOST": MAX_SHARES,
        "NEW": 1, "GQA": group, "PADDED": padded, "HEAD": head_dim, "DIM": head_dim, "PAGE": 16,
        "BLOCK": tiling.block, "CHUNK": max(1, module.MERGED_VALUES // (padded * head_dim)),
        "STAGES": tiling.stages, "CAPPED": False, "SHARE_EQUAL": tiling.share_equal, "PDL": True, **changes,
        **({} if with_lse else {"lse": None}),
        **({} if prepares else dict.fromkeys(("query_norm", "key_norm", "cos", "sin"))),
    }  # fmt: skip
    types = {
        **dict.fromkeys(("query", "key", "value", "pages", "out"), f"*{dtype}"),
        **dict.fromkeys(("query_norm", "key_norm", "cos", "sin"), f"*{dtype}"),
        **dict.fromkeys(("lse", "partials", "partial_lses"), "*fp32"),
        **dict.fromkeys(("starts", "lengths", "indices", "arrivals"), "*i32"),
        **dict.fromkeys((name for name in kernel.arg_names if name.endswith("_stride")), "i32"),
        **dict.fromkeys(("rows", "row_tile", "window_left", "unsplit", "min_share"), "i32"),
        **dict.fromkeys(("scale", "cap", "epsilon"), "fp32"),
    }
    aligned = ("query", "pages", "row_stride")
    made = compiled(kernel, constants, types, tiling.warps, aligned, launch_pdl=True)
    if group <= 16:
        (stack,) = re.findall(r"STACK:(\d+)", resources_of(made.asm["cubin"], tmp_path / "cubin"))
        assert int(stack) <= (16 if prepares else 0), "registers spill"
    large = tiling.block * head_dim == 2**14
    assert made.metadata.shared <= (decode_tiling.LARGE_PROGRAM if large else 99 * 1024), "8.9 has no more"
    before, after = made.asm["ptx"].split("griddepcontrol.wait")
    touched = re.findall(r"cp\.async\.\w+\.shared|(?:ld|st|atom)\.global", before)
    assert touched == ["ld.global"] * len(touched)
    assert len(touched) <= 4, "where the row's pages begin and end, its last length, the page of its newest token"
    assert "griddepcontrol.launch_dependents" not in before
    assert "griddepcontrol.launch_dependents" in after
    if prepares and head_dim <= 128 and "NEW" not in changes:
        asked, _, waited = after.partition("cp.async.")[0].partition("bar.sync")
        assert "ld.global" in asked
        assert "ld.global" not in waited, "all that queries and keys are made of is asked for at once"
