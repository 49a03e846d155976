"""FlashInfer's kernels behind our plans and our own kernel for decode, against attention computed by hand.

The reference has keys and values contiguous, the kernels have them in pages.

Shapes: B rows, T packed tokens, L tokens of one row, Q queries of one row, H query heads, K kv heads, D head
dimension, P pages, S page size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from compiled_llm_ops import (
    Geometry,
    PageTable,
    append_paged_kv,
    decode_attention,
    decode_attention_lse,
    paged_attention_lse,
)
from compiled_llm_ops.flashinfer import splitting
from compiled_llm_ops.flashinfer.append import append
from compiled_llm_ops.flashinfer.hopper import FA3
from compiled_llm_ops.flashinfer.workspace import FlashInferWorkspace
from support.gpu import by_dtype, close, needs_cuda, seeded
from support.ops import gpu_rows
from support.ops.fp8_pages import KINDS, LARGEST, Fp8Batch
from support.ops.gpu_rows import (
    MIXED,
    PAGE_SIZE,
    UNWRITTEN,
    Plan,
    Rows,
    by_group,
    by_variant,
    captured_or_not,
    decode,
    geometry_of,
    make_plan,
    needs_hopper,
    on_device,
    options_of,
    outputs,
    scale_of,
    unplanned,
)

pytestmark = [pytest.mark.gpu, needs_cuda]


# ---- append


@seeded
@by_dtype
@pytest.mark.parametrize("head_dim", [128, 96], ids="D={}".format)
def test_append_puts_tokens_where_the_page_table_says(dtype: torch.dtype, head_dim: int, seed: int) -> None:
    rows = Rows([geometry_of(2, dtype, head_dim)], [1, 16, 17, 50], 64, head_dim, seed)
    rows.grow_to([2, 17, 32, 64])
    (layer,) = rows.layers
    for row, length in enumerate(rows.lengths):
        for position in range(length):
            page, slot = int(rows.numbers[row, position // PAGE_SIZE]), position % PAGE_SIZE
            stored = layer.pages[page, :, :, slot]
            assert torch.equal(stored[0, :, :head_dim], layer.keys[row, position]), (row, position)
            assert torch.equal(stored[1, :, :head_dim], layer.values[row, position]), (row, position)
    used = sum(rows.lengths) * 2 * 2 * head_dim
    assert (layer.pages[..., :head_dim] != UNWRITTEN).sum().item() == used


@seeded
def test_append_takes_views_of_fused_projections(seed: int) -> None:
    geometry = geometry_of(2)
    rows = Rows([geometry], [20], 48, 128, seed)
    fused = rows.random((20, 4 + 2 + 2, 128), torch.bfloat16)
    key, value = fused[:, 4:6], fused[:, 6:8]
    awkward = torch.empty(20, 2, 129, dtype=torch.bfloat16, device="cuda")[..., 1:]
    awkward.copy_(value)
    positions = torch.arange(20, dtype=torch.int32, device="cuda")
    (layer,) = rows.layers
    append(key, awkward, layer.pages, torch.zeros_like(positions), positions, on_device(rows.table()))
    own = layer.pages[rows.numbers[0, :2].long()].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :20]
    assert torch.equal(own, torch.stack([key, value]))


# ---- decode and prefill against the reference


def decode_once(geometry: Geometry, head_dim: int, lengths: Sequence[int], seed: int) -> None:
    rows = Rows([geometry], lengths, max(lengths), head_dim, seed)
    (layer,) = rows.layers
    columns = on_device(rows.table())
    query, newest, pages = rows.queries(layer, len(lengths))[..., :head_dim], rows.newest(layer), layer.pages.clone()
    rows.forget_newest()
    out, lse = decode(layer, query, newest, columns)
    rows.check(layer, query, out, lse)
    assert torch.equal(layer.pages, pages), "the newest keys and values, and nothing else"
    for _ in range(5):
        again = decode_attention(query, *newest, layer.pages, *unplanned(columns), *options_of(geometry))
        assert torch.equal(again, out), "the same inputs give the same bits"


def prefill_once(
    geometry: Geometry,
    head_dim: int,
    lengths: Sequence[int],
    queries: Sequence[int],
    workspace: FlashInferWorkspace,
    *,
    static: bool,
    seed: int,
    variant: int = splitting.SPLIT,
) -> None:
    rows = Rows([geometry], lengths, max(lengths), head_dim, seed)
    (layer,) = rows.layers
    columns = on_device(rows.table(queries))
    plan = make_plan(layer, columns, workspace, static=static, variant=variant)
    plan.plan(rows.table(queries))
    query = rows.queries(layer, sum(queries))
    out, lse = outputs(query)
    plan.run(query, layer.pages, out, lse, scale_of(plan.geometry))
    rows.check(layer, query, out, lse, queries)


@seeded
@by_dtype
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [(-1, 0.0), (20, 3.0)], ids="options={}".format)
def test_pages_of_fp8(options: tuple[int, float], kind: str, dtype: torch.dtype, seed: int) -> None:
    """Written by `append_paged_kv`, which launches our kernel in front of FlashInfer, and by decode, alike."""
    sizes = {"head_dim": 128, "page_size": 16, "group": 3}
    batch = Fp8Batch(MIXED, [1] * len(MIXED), kind=kind, dtype=dtype, seed=seed, **sizes)
    key, value = (torch.cat(states).cuda() for states in (batch.keys, batch.values))
    pages, scales = batch.pages.cuda(), [own if own is None else own.cuda() for own in batch.scales]
    counts = [torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2)]
    slots = [column.cuda() for column in batch.slots([0] * len(MIXED), MIXED)]
    table = [column.cuda() for column in batch.table]
    append_paged_kv(key, value, pages, *slots, *table, "flashinfer", *scales, counts[0])
    codes = batch.expected_pages()
    assert torch.equal(pages.cpu().view(torch.uint8), codes)
    batch.pages = pages.cpu()
    given = [own.cuda() if torch.is_tensor(own) else own for own in batch.decode_arguments()]
    named = {"key_scale": scales[0], "value_scale": scales[1], "saturated": counts[1]}
    out, lse = decode_attention_lse(*given, *options, **named)
    assert torch.equal(given[3].cpu().view(torch.uint8), codes)
    assert [int(count) for count in counts] == [batch.clamped(), batch.clamped(1)]
    how = (batch.scale, *options)
    close(out.float().cpu(), batch.read().expected(*how), 4e-3 if dtype is torch.float16 else 1.6e-2, "out")
    close(lse.cpu(), batch.expected_lse(*how), 5e-3, "lse")


EXTENDED = ([5, 16, 17, 40, 333, 1025], [5, 1, 17, 20, 333, 3])
"""Lengths and queries: whole prompts, and the last tokens of longer rows."""


@seeded
@by_dtype
@captured_or_not
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [(-1, 0.0), (20, 3.0)], ids="options={}".format)
@pytest.mark.parametrize(
    ("variant", "head_dim"), [(splitting.WHOLE, 64), (splitting.SPLIT, 128), (splitting.WHOLE, 256)]
)
def test_prefill_over_pages_of_fp8(
    variant: int, head_dim: int, options: tuple[int, float], kind: str, static: bool, dtype: torch.dtype, seed: int
) -> None:
    """FlashInfer's kernels have no scales by head: they go into queries and results."""
    lengths, queries = EXTENDED
    sizes = {"head_dim": head_dim, "page_size": PAGE_SIZE, "group": 3, "unwritten": LARGEST}
    batch = Fp8Batch(lengths, queries, kind=kind, dtype=dtype, seed=seed, **sizes)
    pages = batch.expected_pages().view(torch.float8_e4m3fn).cuda()
    scales = [own if own is None else own.cuda() for own in batch.scales]
    geometry = Geometry(6, 2, head_dim, PAGE_SIZE, *options, dtype, torch.float8_e4m3fn)
    host = PageTable(batch.qo_indptr, *batch.table)
    columns, workspace = on_device(host), FlashInferWorkspace("cuda", 64 * 2**20)
    plan = Plan(geometry, columns, workspace, static, variant)
    plan.plan(host)
    given = (batch.query.cuda(), pages, *columns, plan.owner.tensor, workspace.buffer, batch.scale, *options, *scales)
    out, lse = paged_attention_lse(*given)
    how = (batch.scale, *options)
    close(out.float().cpu(), batch.read().expected(*how), 8e-3 if dtype is torch.float16 else 4e-2, "out")
    close(lse.cpu(), batch.expected_lse(*how), 5e-2 if options[1] else 2e-2, "lse")


@seeded
@by_group
@by_dtype
@pytest.mark.parametrize("head_dim", [64, 128, 256], ids="D={}".format)
def test_decode(group: int, dtype: torch.dtype, head_dim: int, seed: int) -> None:
    decode_once(geometry_of(group, dtype, head_dim), head_dim, MIXED, seed)


@seeded
@pytest.mark.parametrize(("group", "head_dim"), [(71, 64), (16, 128), (48, 128), (8, 512), (1, 512)])
def test_decode_with_large_groups_and_heads(group: int, head_dim: int, seed: int) -> None:
    decode_once(geometry_of(group, head_dim=head_dim), head_dim, [1, 17, 300, 5000], seed)


@seeded
@pytest.mark.parametrize("page_size", [1, 2, 32, 128], ids="S={}".format)
def test_decode_over_pages_of_other_sizes(page_size: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_rows, "PAGE_SIZE", page_size)
    decode_once(geometry_of(2), 128, [1, page_size, page_size + 1, 999], seed)


@seeded
@pytest.mark.parametrize("count", [1, 2, 5, 24, 64, 300], ids="rows={}".format)
def test_decode_of_any_number_of_rows(count: int, seed: int) -> None:
    choice = torch.Generator().manual_seed(seed)
    decode_once(geometry_of(2), 128, torch.randint(1, 900, (count,), generator=choice).tolist(), seed)


@seeded
def test_decode_reads_nothing_that_is_not_the_rows(seed: int) -> None:
    """Free pages, free slots and what lies left of a window hold NaN; zero times that is not zero."""
    rows = Rows([geometry_of(2), geometry_of(2, window_left=20)], MIXED, max(MIXED), 128, seed)
    for layer in rows.layers:
        window = layer.geometry.window_left
        pages = torch.full_like(layer.pages, float("nan"))
        for row, length in enumerate(rows.lengths):
            for position in range(0 if window < 0 else max(0, length - 1 - window), length):
                page, slot = int(rows.numbers[row, position // PAGE_SIZE]), position % PAGE_SIZE
                pages[page, :, :, slot] = layer.pages[page, :, :, slot]
        layer.pages.copy_(pages)
        query = rows.queries(layer, len(MIXED))
        newest = rows.newest(layer)
        out, lse = decode(layer, query, newest, on_device(rows.table()))
        rows.check(layer, query, out, lse)


@seeded
@by_group
@by_dtype
@captured_or_not
@by_variant
def test_prefill_and_extend(
    group: int, dtype: torch.dtype, static: bool, variant: int, seed: int, workspace: FlashInferWorkspace
) -> None:
    prefill_once(geometry_of(group, dtype), 128, *EXTENDED, workspace, static=static, variant=variant, seed=seed)


@seeded
@pytest.mark.parametrize("group", [2, 8], ids="group={}".format)
@pytest.mark.parametrize("options", [{"window_left": 20}, {"window_left": 0}, {"soft_cap": 5.0}], ids=str)
def test_sliding_window_and_soft_cap(
    group: int, options: dict[str, Any], seed: int, workspace: FlashInferWorkspace
) -> None:
    geometry = geometry_of(group, **options)
    decode_once(geometry, 128, MIXED, seed)
    prefill_once(geometry, 128, *EXTENDED, workspace, static=False, seed=seed)


@seeded
@needs_hopper
@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize("options", [{"window_left": 20}, {"window_left": 200}, {"soft_cap": 5.0}], ids=str)
def test_fa3_sees_windows_and_soft_caps(
    options: dict[str, Any], static: bool, seed: int, workspace: FlashInferWorkspace
) -> None:
    prefill_once(geometry_of(4, **options), 128, *EXTENDED, workspace, static=static, variant=FA3, seed=seed)


@seeded
@needs_hopper
def test_fa3_leaves_what_lies_beyond_the_last_key_alone(seed: int, workspace: FlashInferWorkspace) -> None:
    """Pages that came back from other rows may hold anything."""
    rows = Rows([geometry_of(2)], EXTENDED[0], max(EXTENDED[0]), 128, seed)
    (layer,) = rows.layers
    pages = torch.full_like(layer.pages, torch.nan)
    for row, length in enumerate(rows.lengths):
        for position in range(length):
            page, slot = int(rows.numbers[row, position // PAGE_SIZE]), position % PAGE_SIZE
            pages[page, :, :, slot] = layer.pages[page, :, :, slot]
    layer.pages.copy_(pages)
    table = rows.table(EXTENDED[1])
    plan = make_plan(layer, on_device(table), workspace, static=False, variant=FA3)
    plan.plan(table)
    query = rows.queries(layer, sum(EXTENDED[1]))
    out, lse = outputs(query)
    plan.run(query, layer.pages, out, lse, scale_of(plan.geometry))
    rows.check(layer, query, out, lse, EXTENDED[1])


@seeded
@pytest.mark.parametrize("group", [1, 4], ids="group={}".format)
def test_head_size_without_kernels_is_padded(group: int, seed: int, workspace: FlashInferWorkspace) -> None:
    geometry = geometry_of(group, head_dim=96)
    decode_once(geometry, 96, MIXED, seed)
    prefill_once(geometry, 96, *EXTENDED, workspace, static=False, seed=seed)


@seeded
def test_one_long_row_is_split_over_the_device(seed: int, workspace: FlashInferWorkspace) -> None:
    for group in (2, 8):
        for lengths in ([20_000], [40_960], [20_000, 1, 500], [*[160] * 7, 32_768], [5000, *[100] * 149]):
            decode_once(geometry_of(group), 128, lengths, seed)
    prefill_once(geometry_of(8), 128, [20_000], [7], workspace, static=False, seed=seed)


@seeded
def test_query_may_be_a_view_of_a_fused_projection(seed: int, workspace: FlashInferWorkspace) -> None:
    rows = Rows([geometry_of(2)], MIXED, max(MIXED), 128, seed)
    (layer,) = rows.layers
    plan = make_plan(layer, on_device(rows.table()), workspace, static=False)
    plan.plan(rows.table())
    query = rows.random((len(MIXED), 4 + 2 + 2, 128), torch.bfloat16)[:, :4]
    out, lse = outputs(query.contiguous())
    plan.run(query, layer.pages, out, lse, scale_of(plan.geometry))
    rows.check(layer, query, out, lse)
    for readable in (query, query.transpose(0, 2).contiguous().transpose(0, 2)):
        rows.check(layer, query, *decode(layer, readable, rows.newest(layer), on_device(rows.table())))
