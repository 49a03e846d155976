"""FlashInfer's kernels behind our plans and our own kernel for decode, against attention computed by hand.

The reference has keys and values contiguous, the kernels have them in pages.

Shapes: B rows, T packed tokens, L tokens of one row, Q queries of one row, H query heads, K kv heads, D head
dimension, P pages, S page size.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache, run_and_get_code

from compiled_llm.compat.inductor import make_kernels_wait_first
from compiled_llm_ops import (
    Geometry,
    PageTable,
    add_rms_norm,
    decode_attention,
    decode_attention_lse,
    paged_attention_lse,
    plan_paged_attention,
)
from compiled_llm_ops.backends import backend_named
from compiled_llm_ops.flashinfer import splitting, versions
from compiled_llm_ops.flashinfer.append import append
from compiled_llm_ops.flashinfer.workspace import STAGING_BUFFERS, Workspace
from support.gpu import by_dtype, close, needs_cuda, seeded

pytestmark = [pytest.mark.gpu, needs_cuda]

PAGE_SIZE = 16
GROUPS = [1, 2, 4, 7, 8]
UNWRITTEN = 100.0
"""What lies in slots that no token was written to: finite, and far off if it is read."""

by_group = pytest.mark.parametrize("group", GROUPS, ids="group={}".format)
captured_or_not = pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
split_or_not = pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])


def geometry_of(
    group: int, dtype: torch.dtype = torch.bfloat16, head_dim: int = 128, window_left: int = -1, soft_cap: float = 0.0
) -> Geometry:
    padded = versions.padded_head_dim(head_dim)
    return Geometry(2 * group, 2, padded, PAGE_SIZE, window_left, soft_cap, dtype, dtype)


def scale_of(geometry: Geometry) -> float:
    return geometry.head_dim**-0.5 * (3.0 if geometry.logits_soft_cap else 1.0)  # large enough logits to be capped


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    return Workspace("cuda", 256 * 2**20)


# ---- rows: keys and values twice, contiguous for the reference and in pages for the kernels


class Layer(NamedTuple):
    """One layer's cache; `keys` and `values` are `[B, longest, K, D]` with D before padding."""

    geometry: Geometry
    keys: Tensor
    values: Tensor
    pages: Tensor


class Rows:
    """Rows with random keys and values, and pages in random order that hold the first `lengths` of them."""

    def __init__(self, geometries: Sequence[Geometry], lengths: Sequence[int], longest: int, head_dim: int, seed: int):
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.head_dim = head_dim
        self.lengths = [0] * len(lengths)
        each = -(-longest // PAGE_SIZE)
        order = torch.randperm(len(lengths) * each, generator=torch.Generator().manual_seed(seed))
        self.numbers = (order.to(torch.int32) + 1).view(len(lengths), each)  # page 0 is nobody's
        self.layers = [self._layer(geometry, longest) for geometry in geometries]
        self.grow_to(lengths)

    def _layer(self, geometry: Geometry, longest: int) -> Layer:
        shape = (len(self.lengths), longest, geometry.kv_heads, self.head_dim)
        stored = (self.numbers.numel() + 1, 2, geometry.kv_heads, PAGE_SIZE, geometry.head_dim)
        pages = torch.full(stored, UNWRITTEN, dtype=geometry.dtype, device="cuda")
        pages[..., self.head_dim :] = 0
        return Layer(geometry, self.random(shape, geometry.dtype), self.random(shape, geometry.dtype), pages)

    def random(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.randn(tuple(shape), generator=self.generator, device="cuda").to(dtype)

    def queries(self, layer: Layer, tokens: int) -> Tensor:
        """`[T, H, D]`, padded with zeros."""
        return self.padded(
            layer, self.random((tokens, layer.geometry.query_heads, self.head_dim), layer.geometry.dtype)
        )

    def newest(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """The keys and the values `[B, K, D]` of each row's last token."""
        rows, last = torch.arange(len(self.lengths)), torch.tensor(self.lengths) - 1
        return layer.keys[rows, last], layer.values[rows, last]

    def forget_newest(self) -> None:
        """Leave the slots of each row's last token unwritten."""
        pages = torch.tensor(
            [int(own[(length - 1) // PAGE_SIZE]) for own, length in zip(self.numbers, self.lengths, strict=True)]
        )
        slots = (torch.tensor(self.lengths) - 1) % PAGE_SIZE
        for layer in self.layers:
            layer.pages[pages, :, :, slots, : self.head_dim] = UNWRITTEN

    def padded(self, layer: Layer, states: Tensor) -> Tensor:
        return torch.nn.functional.pad(states, (0, layer.geometry.head_dim - self.head_dim))

    def grow_to(self, lengths: Sequence[int]) -> None:
        """Append each row's next tokens to its pages."""
        spans = list(zip(self.lengths, lengths, strict=True))
        self.lengths = list(lengths)
        rows = torch.cat([torch.full((end - start,), row) for row, (start, end) in enumerate(spans)]).int().cuda()
        positions = torch.cat([torch.arange(start, end) for start, end in spans]).int().cuda()
        for layer in self.layers:
            key, value = (
                self.padded(layer, torch.cat([states[row, start:end] for row, (start, end) in enumerate(spans)]))
                for states in (layer.keys, layer.values)
            )
            append(key, value, layer.pages, rows, positions, on_device(self.table()))

    def table(self, queries: Sequence[int] | None = None) -> PageTable:
        """The page table on the host; one query a row where None."""
        counts = torch.tensor([-(-length // PAGE_SIZE) for length in self.lengths])
        last = torch.tensor([(length - 1) % PAGE_SIZE + 1 for length in self.lengths])
        indices = torch.cat([self.numbers[row, :count] for row, count in enumerate(counts.tolist())])
        starts = _starts(torch.tensor(queries) if queries else torch.ones_like(counts))
        return PageTable(starts.int(), _starts(counts).int(), indices.int(), last.int())

    def expected(
        self, layer: Layer, query: Tensor, queries: Sequence[int] | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Each row's `[Q, H, D]` and `[Q, H]` (base 2), in float32."""
        taken, results = 0, []
        for row, (length, count) in enumerate(zip(self.lengths, queries or [1] * len(self.lengths), strict=True)):
            own = query[taken : taken + count, :, : self.head_dim]
            results.append(attention(layer.geometry, own, layer.keys[row, :length], layer.values[row, :length]))
            taken += count
        return results

    def check(
        self, layer: Layer, query: Tensor, out: Tensor, lse: Tensor, queries: Sequence[int] | None = None
    ) -> None:
        """Every row by itself, and the padding."""
        capped = layer.geometry.logits_soft_cap > 0  # the kernels' tanh is an approximation
        tolerance = (4e-2 if capped else 2e-2) if out.dtype == torch.bfloat16 else 4e-3
        taken = 0
        for row, (o, s) in enumerate(self.expected(layer, query, queries)):
            own = slice(taken, taken + len(o))
            name = f"row {row} of lengths {self.lengths}, {layer.geometry}"
            close(out[own, :, : self.head_dim].float(), o, tolerance, name)
            close(lse[own], s, 5e-2 if capped else 5e-3, f"log-sum-exp of {name}")
            taken += len(o)
        assert not out[:taken, :, self.head_dim :].any()


def attention(geometry: Geometry, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """`query` `[Q, H, D]` are the last tokens of `keys`, `values` `[L, K, D]`."""
    group = geometry.query_heads // geometry.kv_heads
    k, v = (states.float().repeat_interleave(group, dim=1) for states in (keys, values))
    logits = torch.einsum("qhd,lhd->hql", query.float(), k) * scale_of(geometry)
    if geometry.logits_soft_cap:
        logits = geometry.logits_soft_cap * torch.tanh(logits / geometry.logits_soft_cap)
    position = torch.arange(len(keys) - len(query), len(keys), device="cuda")[:, None]
    distance = position - torch.arange(len(keys), device="cuda")[None]
    hidden = distance < 0
    if geometry.window_left >= 0:
        hidden |= distance > geometry.window_left
    logits = logits.masked_fill(hidden, -torch.inf)
    largest = logits.amax(dim=-1, keepdim=True)
    weights = torch.exp(logits - largest)
    total = weights.sum(dim=-1, keepdim=True)
    out = torch.einsum("hql,lhd->qhd", weights / total, v)
    return out, ((largest + total.log()) / torch.log(torch.tensor(2.0))).squeeze(-1).T


def _starts(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def on_device(table: PageTable) -> PageTable:
    return PageTable(*(column.cuda() for column in table))


def upload(table: PageTable, columns: PageTable, *, non_blocking: bool = False) -> None:
    for column, content in zip(columns, table, strict=True):
        column[: len(content)].copy_(content, non_blocking=non_blocking)


def fixed_columns(rows: Rows) -> PageTable:
    """Device buffers at fixed addresses that hold any table of these rows."""
    count = len(rows.lengths)
    sizes = (count + 1, count + 1, rows.numbers.numel(), count)
    return PageTable(*(torch.zeros(size, dtype=torch.int32, device="cuda") for size in sizes))


class Plan:
    """One attention group's plan, made and launched through the ops."""

    def __init__(
        self, geometry: Geometry, columns: PageTable, workspace: Workspace, static: bool, split: bool | None
    ) -> None:
        self.geometry, self.columns, self.workspace = geometry, columns, workspace
        self.owner = backend_named("flashinfer").new_plan(workspace, 2**20)
        self._static = static
        self._captured_tokens = -1
        self._variant = -1 if split is None else splitting.SPLIT if split else splitting.WHOLE

    def plan(self, host: PageTable) -> None:
        """The first batch of a static plan sets the tokens of captured launches."""
        if self._static and self._captured_tokens < 0:
            self._captured_tokens = int(host.qo_indptr[-1])
        table = (host.qo_indptr, host.indptr, host.last_page_len)
        how = (*self.geometry, self._captured_tokens, self._variant)
        plan_paged_attention(self.owner.tensor, self.owner.numbers, *table, self.workspace.buffer, *how)

    def run(
        self, query: Tensor, pages: Tensor, out: Tensor, lse: Tensor, scale: float, table: PageTable | None = None
    ) -> None:
        given = (*(self.columns if table is None else table), self.owner.tensor, self.workspace.buffer)
        options = (scale, self.geometry.window_left, self.geometry.logits_soft_cap)
        for result, place in zip(paged_attention_lse(query, pages, *given, *options), (out, lse), strict=True):
            place.copy_(result)


def make_plan(
    layer: Layer, columns: PageTable, workspace: Workspace, *, static: bool = True, split: bool | None = True
) -> Plan:
    return Plan(layer.geometry, columns, workspace, static, split)


def options_of(geometry: Geometry) -> tuple[float, int, float]:
    return scale_of(geometry), geometry.window_left, geometry.logits_soft_cap


def decode(layer: Layer, query: Tensor, newest: tuple[Tensor, Tensor], columns: PageTable) -> tuple[Tensor, Tensor]:
    """`[B, H, D]` and `[B, H]`; whatever lengths the columns have, nothing is planned."""
    return decode_attention_lse(query, *newest, layer.pages, *columns[1:], *options_of(layer.geometry))


def outputs(query: Tensor) -> tuple[Tensor, Tensor]:
    return torch.full_like(query, UNWRITTEN), torch.full(query.shape[:2], UNWRITTEN, device="cuda")


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
        again = decode_attention(query, *newest, layer.pages, *columns[1:], *options_of(geometry))
        assert torch.equal(again, out), "the same inputs give the same bits"


def preparation_of(
    rows: Rows, count: int, head_dim: int, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Weights of the norms of queries and keys, and cosines and sines of each row's position."""
    query_norm, key_norm = rows.random((2, head_dim), dtype)
    angles = (rows.random((count, head_dim // 2), torch.float32) * 3).repeat(1, 2)
    return (query_norm, key_norm), angles.cos().to(dtype), angles.sin().to(dtype)


def prepared(states: Tensor, norm: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys as the layer would norm and turn them, in float32."""
    states = torch.nn.functional.rms_norm(states.float(), states.shape[-1:], norm.float(), 0.01)
    first, second = states.chunk(2, -1)
    return states * cos.float()[:, None] + torch.cat([-second, first], -1) * sin.float()[:, None]


def prefill_once(
    geometry: Geometry,
    head_dim: int,
    lengths: Sequence[int],
    queries: Sequence[int],
    workspace: Workspace,
    *,
    static: bool,
    seed: int,
    split: bool | None = True,
) -> None:
    rows = Rows([geometry], lengths, max(lengths), head_dim, seed)
    (layer,) = rows.layers
    columns = on_device(rows.table(queries))
    plan = make_plan(layer, columns, workspace, static=static, split=split)
    plan.plan(rows.table(queries))
    query = rows.queries(layer, sum(queries))
    out, lse = outputs(query)
    plan.run(query, layer.pages, out, lse, scale_of(plan.geometry))
    rows.check(layer, query, out, lse, queries)


MIXED = [1, 15, 16, 17, 32, 300, 1025]
EXTENDED = ([5, 16, 17, 40, 333, 1025], [5, 1, 17, 20, 333, 3])
"""Lengths and queries: whole prompts, and the last tokens of longer rows."""


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
    monkeypatch.setitem(globals(), "PAGE_SIZE", page_size)
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
@split_or_not
def test_prefill_and_extend(
    group: int, dtype: torch.dtype, static: bool, split: bool, seed: int, workspace: Workspace
) -> None:
    prefill_once(geometry_of(group, dtype), 128, *EXTENDED, workspace, static=static, split=split, seed=seed)


@seeded
@pytest.mark.parametrize("group", [2, 8], ids="group={}".format)
@pytest.mark.parametrize("options", [{"window_left": 20}, {"window_left": 0}, {"soft_cap": 5.0}], ids=str)
def test_sliding_window_and_soft_cap(group: int, options: dict[str, Any], seed: int, workspace: Workspace) -> None:
    geometry = geometry_of(group, **options)
    decode_once(geometry, 128, MIXED, seed)
    prefill_once(geometry, 128, *EXTENDED, workspace, static=False, seed=seed)


@seeded
@pytest.mark.parametrize("group", [1, 4], ids="group={}".format)
def test_head_size_without_kernels_is_padded(group: int, seed: int, workspace: Workspace) -> None:
    geometry = geometry_of(group, head_dim=96)
    decode_once(geometry, 96, MIXED, seed)
    prefill_once(geometry, 96, *EXTENDED, workspace, static=False, seed=seed)


@seeded
def test_one_long_row_is_split_over_the_device(seed: int, workspace: Workspace) -> None:
    for group in (2, 8):
        for lengths in ([20_000], [40_960], [20_000, 1, 500], [*[160] * 7, 32_768], [5000, *[100] * 149]):
            decode_once(geometry_of(group), 128, lengths, seed)
    prefill_once(geometry_of(8), 128, [20_000], [7], workspace, static=False, seed=seed)


@seeded
def test_query_may_be_a_view_of_a_fused_projection(seed: int, workspace: Workspace) -> None:
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


# ---- replay


def capture(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Run once as it is, so that every kernel is loaded, then record."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


class DecodeGraph:
    """A captured decode step of layers with different attention groups."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.columns = fixed_columns(rows)
        self.newest = [rows.newest(layer) for layer in rows.layers]
        self.queries = [rows.queries(layer, len(rows.lengths)) for layer in rows.layers]
        self.outputs: list[tuple[Tensor, Tensor]] = []
        self.stage()
        self.graph = capture(self._step)

    def stage(self) -> None:
        """Take one token more of each row, not yet in the pages."""
        rows = self.rows
        rows.lengths = [length + 1 for length in rows.lengths]
        for layer, query, newest in zip(rows.layers, self.queries, self.newest, strict=True):
            query.copy_(rows.queries(layer, len(query)))
            for states, own in zip(newest, rows.newest(layer), strict=True):
                states.copy_(own)
        upload(rows.table(), self.columns)

    def _step(self) -> None:
        layers = zip(self.rows.layers, self.queries, self.newest, strict=True)
        self.outputs = [decode(layer, query, newest, self.columns) for layer, query, newest in layers]

    def replay_and_check(self) -> None:
        for out, lse in self.outputs:
            out.fill_(UNWRITTEN)
            lse.fill_(UNWRITTEN)
        self.graph.replay()
        for layer, query, (out, lse) in zip(self.rows.layers, self.queries, self.outputs, strict=True):
            self.rows.check(layer, query, out, lse)


@seeded
@pytest.mark.parametrize("group", [1, 2, 8], ids="group={}".format)
@pytest.mark.parametrize(
    "lengths", [[15], [15, 16, 1, 250, 31], [15, 16, 1, 250, 31] * 8], ids=lambda lengths: f"rows={len(lengths)}"
)
def test_a_recorded_decode_step_holds_for_all_lengths(group: int, lengths: list[int], seed: int) -> None:
    """Rows grow by tokens and by leaps, over page boundaries, to where many programs share them; and shrink again."""
    rows = Rows([geometry_of(group), geometry_of(group, window_left=300)], lengths, 9000, 128, seed)
    step = DecodeGraph(rows)
    step.replay_and_check()
    leaps = {4: [15, 700, 1, 250, 0], 9: [0, 1, 1600, 0, 2], 14: [6000, 5000, 300, 1200, 300]}
    for count in range(20):
        if count in leaps:
            more = (leaps[count] * 8)[: len(lengths)]
            rows.grow_to([length + leap for length, leap in zip(rows.lengths, more, strict=True)])
        step.stage()
        step.replay_and_check()
    rows.lengths = list(lengths)
    step.stage()
    step.replay_and_check()


@seeded
def test_replays_see_the_table_that_was_captured(seed: int, workspace: Workspace) -> None:
    """A launch may be given columns that an earlier step of the graph computes."""
    rows = Rows([geometry_of(2)], [15, 16, 40], 64, 128, seed)
    (layer,) = rows.layers
    columns = on_device(rows.table())
    before = columns.last_page_len - 1
    columns.last_page_len.fill_(1)
    plan = make_plan(layer, columns, workspace)
    plan.plan(rows.table())
    query = rows.queries(layer, 3)
    planned, decoded, newest = outputs(query), outputs(query), rows.newest(layer)

    def step() -> None:
        advanced = columns._replace(last_page_len=before + 1)
        plan.run(query, layer.pages, *planned, scale_of(plan.geometry), table=advanced)
        for result, given in zip(decode(layer, query, newest, advanced), decoded, strict=True):
            given.copy_(result)

    capture(step).replay()
    rows.check(layer, query, *planned)
    rows.check(layer, query, *decoded)


@seeded
def test_decode_replays_on_several_streams_at_once(seed: int) -> None:
    """Recordings from one stream, replayed on others at the same time, with launches outside of them in between."""
    given = []
    for lengths in ([5000], [700, 3000], [*[40] * 40, 6000, 1, 900]):
        rows = Rows([geometry_of(2)], lengths, max(lengths), 128, seed)
        (layer,) = rows.layers
        given.append((layer, rows.queries(layer, len(lengths)), rows.newest(layer), on_device(rows.table())))
    expected = [decode(*arguments) for arguments in given]
    recording, graphs, results = torch.cuda.Stream(), [], []
    for layer, query, newest, columns in given:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=recording):
            results.append([decode(layer, query + 0, newest, columns) for _ in range(20)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for repeat in range(30):
        for out, _ in [result for own in results for result in own]:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        eager = []
        for stream, graph, own in zip(streams, graphs, given, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                eager.append(decode(*own))
                graph.replay()
        torch.cuda.synchronize()
        for own, launched, wanted in zip(results, eager, expected, strict=True):
            for actual in [*own, launched]:
                assert all(torch.equal(a, w) for a, w in zip(actual, wanted, strict=True)), repeat


@seeded
@by_dtype
@pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (2, 96), (4, 128), (8, 64), (2, 256)])
@pytest.mark.parametrize("lengths", [[1], [160], [1, 16, 17, 700], [3000] * 40], ids=str)
def test_decode_norms_and_turns_queries_and_keys(
    group: int, head_dim: int, lengths: list[int], dtype: torch.dtype, seed: int
) -> None:
    rows = Rows([geometry_of(group, dtype, head_dim)], lengths, max(lengths), head_dim, seed)
    (layer,) = rows.layers
    columns = on_device(rows.table())
    query = rows.queries(layer, len(lengths))[..., :head_dim] * 3
    key, value = rows.newest(layer)
    norms, cos, sin = preparation_of(rows, len(lengths), head_dim, dtype)
    ready = [prepared(states, norm, cos, sin).to(dtype) for states, norm in zip((query, key), norms, strict=True)]
    expected = decode(layer, ready[0], (ready[1], value), columns)
    pages = layer.pages.clone()
    rows.forget_newest()
    options = options_of(layer.geometry)
    given = (query, key, value, layer.pages, *columns[1:], *options, *norms, 0.01, cos, sin)
    for overlap in (False, True):
        out, lse = decode_attention_lse(*given, overlap)
        tolerance = 2e-3 if dtype is torch.float16 else 1.6e-2
        close(layer.pages.float(), pages.float(), tolerance, "pages")
        close(out.float(), expected[0].float(), 2 * tolerance, "out")
        close(lse, expected[1], 5 * tolerance, "lse")
        assert torch.equal(decode_attention(*given, overlap), out)


def test_inductors_kernels_wait_before_they_touch_memory() -> None:
    """Also those that read nothing, or nothing of what the kernel in front writes."""
    make_kernels_wait_first()

    def steps(states: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        product = states @ states.T
        sums = other.sum(1)
        return product, torch.full_like(other, 2.0), sums, (other * product.sum()).softmax(1)

    options = {"triton.enable_pdl": True}
    given = (torch.randn(64, 64, device="cuda"), torch.randn(100, 70000, device="cuda"))
    with fresh_cache():
        _, (code,) = run_and_get_code(torch.compile(steps, options=options), *given)  # type: ignore[call-overload]
    kernels = re.findall(r"\ndef triton_\w+\(.*?device_str", code, flags=re.S)
    assert len(kernels) >= 3
    for kernel in kernels:
        access = re.search(r"tl\.(load|store)", kernel)
        assert access is not None
        assert kernel.index("gdc_wait") < access.start(), kernel


@seeded
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="kernels do not overlap"
)
@pytest.mark.parametrize("lengths", [[100], [5000], [600] * 8], ids=str)
def test_decode_waits_for_what_is_in_front_of_it(lengths: list[int], seed: int) -> None:
    """Chains of layers, each of which reads what the one before wrote, between kernels that let go early."""
    rows = Rows([geometry_of(2)], lengths, max(lengths), 128, seed)
    (layer,) = rows.layers
    columns, scale = on_device(rows.table()), scale_of(layer.geometry)
    norms, cos, sin = preparation_of(rows, len(lengths), 128, torch.bfloat16)
    preparation = (-1, 0.0, *norms, 0.01, cos, sin)
    make_kernels_wait_first()

    def chain(query: Tensor) -> Tensor:
        for _ in range(12):
            key, value = query[:, :2], query[:, 2:]
            out = decode_attention(query, key, value, layer.pages, *columns[1:], scale, *preparation, overlap=True)
            total, query = add_rms_norm(out, query, norms[0], 1e-6, overlap=True)
            query = torch.nn.functional.rms_norm(out + query + total, (128,))
        return query

    compiled = torch.compile(chain, options={"triton.enable_pdl": True}, fullgraph=True)
    query = rows.queries(layer, len(lengths))
    expected = compiled(query)
    plain = torch.compile(chain, options={"triton.enable_pdl": False}, fullgraph=True)(query)
    close(expected.float(), plain.float(), 2e-2, "with and without overlap")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(query)
    for _ in range(50):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


@seeded
@split_or_not
def test_static_prefill_replays_smaller_batches(split: bool, seed: int, workspace: Workspace) -> None:
    rows = Rows([geometry_of(4)], [200, 33, 64], 400, 128, seed)
    (layer,) = rows.layers
    columns = fixed_columns(rows)
    plan = make_plan(layer, columns, workspace, split=split)
    query = rows.queries(layer, 60)
    out, lse = outputs(query)

    def prepare(queries: list[int]) -> None:
        for pinned, _ in workspace._staging:
            pinned.fill_(1)  # what earlier plans have left there must not matter
        upload(rows.table(queries), columns)
        plan.plan(rows.table(queries))

    prepare([20, 20, 20])
    graph = capture(lambda: plan.run(query, layer.pages, out, lse, scale_of(plan.geometry)))
    for lengths, queries in (([200, 33, 64], [20, 20, 20]), ([260, 40, 200], [1, 40, 3]), ([400, 40, 200], [58, 1, 1])):
        rows.grow_to(lengths)
        prepare(queries)
        graph.replay()
        rows.check(layer, query, out, lse, queries)


@pytest.mark.parametrize(("tokens", "rows"), [(60, 3), (300, 1), (2064, 65)])
@pytest.mark.parametrize("head_dim", [64, 128, 256], ids="D={}".format)
def test_static_plans_take_what_is_reckoned(tokens: int, rows: int, head_dim: int) -> None:
    geometry = geometry_of(4, head_dim=head_dim)
    queries = [1] * (rows - 1) + [tokens - rows + 1]
    counts = torch.tensor([-(-count // PAGE_SIZE) for count in queries])
    last = torch.tensor([(count - 1) % PAGE_SIZE + 1 for count in queries])
    host = PageTable(
        *(
            column.int()
            for column in (_starts(torch.tensor(queries)), _starts(counts), torch.arange(counts.sum()), last)
        )
    )
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    needed = splitting.captured_split_bytes(geometry, tokens, rows, processors)

    def plan(nbytes: int) -> None:
        workspace = Workspace("cuda", nbytes)
        Plan(geometry, on_device(host), workspace, static=True, split=True).plan(host)

    plan(needed)
    with pytest.raises(RuntimeError, match="raise workspace_bytes"):
        plan(needed - 1024)


# ---- what a captured launch baked in


@seeded
def test_a_number_that_a_captured_launch_has_read_may_not_change(
    seed: int, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows([geometry_of(2)], MIXED, max(MIXED), 128, seed)
    (layer,) = rows.layers
    plan = make_plan(layer, on_device(rows.table()), workspace)
    plan.plan(rows.table())
    query = rows.queries(layer, len(MIXED))
    given = query, layer.pages, *outputs(query), scale_of(plan.geometry)
    graph = capture(lambda: plan.run(*given))  # as long as it lives, it may be replayed
    module = workspace.wrapper(plan.geometry)._cached_module
    real = module.plan

    def changed(*arguments: Any) -> list[int]:
        numbers = [int(number) for number in real(*arguments)]
        return [numbers[0] + 1, *numbers[1:]]

    monkeypatch.setattr(module, "plan", changed)
    with pytest.raises(RuntimeError, match=r"padded_batch_size was \d+ and is now \d+"):
        plan.plan(rows.table())
    del graph


# ---- plan() never waits


def in_pinned_memory(table: PageTable) -> PageTable:
    return PageTable(*(column.pin_memory() for column in table))


@seeded
def test_plan_does_not_wait_for_the_device(seed: int, workspace: Workspace) -> None:
    """As many plans as there are staging buffers, each launched, while the device sleeps; then all results are right.

    All batches share one plan, as a model's prefills do: its copies and launches are in stream order.
    """
    rows = Rows([geometry_of(4)], [10, 100, 1, 700], 1000, 128, seed)
    (layer,) = rows.layers
    queries, tokens = [7, 1, 1, 20], 29
    batches = []
    for _ in range(STAGING_BUFFERS):
        rows.grow_to([length + step for length, step in zip(rows.lengths, (1, 5, 16, 17), strict=True)])
        query = rows.queries(layer, tokens)
        batches.append((rows.lengths, in_pinned_memory(rows.table(queries)), query, *outputs(query)))
    columns = fixed_columns(rows)
    plan = make_plan(layer, columns, workspace, static=False)

    def launch_all() -> None:
        for _, host, query, out, lse in batches:
            upload(host, columns, non_blocking=True)
            plan.plan(host)
            plan.run(query, layer.pages, out, lse, scale_of(plan.geometry))

    launch_all()  # loads the kernels and fills the allocators' caches
    for _, _, _, out, lse in batches:
        out.fill_(UNWRITTEN)
        lse.fill_(UNWRITTEN)
    torch.cuda.synchronize()
    asleep = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)  # about a second
        asleep.record()
        start = time.perf_counter()
        launch_all()
        took, waited = time.perf_counter() - start, asleep.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not waited, f"{len(batches)} plans returned after {took:.3f} s, when the device had woken up"
    torch.cuda.synchronize()
    for lengths, _, query, out, lse in batches:
        rows.lengths = lengths
        rows.check(layer, query, out, lse, queries)


# ---- failing loudly


@seeded
def test_small_workspace_is_named(seed: int) -> None:
    rows = Rows([geometry_of(2)], [100, 200], 200, 128, seed)
    plan = make_plan(rows.layers[0], on_device(rows.table()), Workspace("cuda", 4096))
    with pytest.raises(RuntimeError, match=r"workspace of 4096 bytes is too small .* raise workspace_bytes"):
        plan.plan(rows.table())


@seeded
def test_plan_inside_a_capture_raises(seed: int, workspace: Workspace) -> None:
    rows = Rows([geometry_of(2)], [100, 200], 200, 128, seed)
    plan = make_plan(rows.layers[0], on_device(rows.table()), workspace)
    graph, touched = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        touched.add_(1)
        with pytest.raises(RuntimeError, match="plan before the capture"):
            plan.plan(rows.table())


@seeded
def test_launch_that_was_not_planned_raises(seed: int, workspace: Workspace) -> None:
    rows = Rows([geometry_of(2)], [100, 200], 200, 128, seed)
    (layer,) = rows.layers
    plan = make_plan(layer, on_device(rows.table()), workspace)
    query = rows.queries(layer, 2)
    with pytest.raises(RuntimeError, match="nothing was planned"):
        plan.run(query, layer.pages, *outputs(query), 1.0)
    plan.plan(rows.table())
    with pytest.raises(ValueError, match="plan is of another batch: tokens"):
        plan.run(query[:1], layer.pages, *outputs(query[:1]), 1.0)
    with pytest.raises(ValueError, match="plan is of another batch: geometry"):
        plan.run(query[..., :64], layer.pages[..., :64], *outputs(query), 1.0)
