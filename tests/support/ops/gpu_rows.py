"""Rows on the GPU: keys and values twice, contiguous for a reference computed by hand and in pages for the kernels.

Shapes: B rows, T packed tokens, L tokens of one row, Q queries of one row, H query heads, K kv heads, D head
dimension, P pages, S page size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from compiled_llm_ops import Geometry, PageTable, decode_attention_lse, paged_attention_lse, plan_paged_attention
from compiled_llm_ops.backends import backend_named
from compiled_llm_ops.flashinfer import splitting, versions
from compiled_llm_ops.flashinfer.append import append
from compiled_llm_ops.flashinfer.hopper import FA3
from compiled_llm_ops.flashinfer.workspace import FlashInferWorkspace
from support.gpu import close

PAGE_SIZE = 16
GROUPS = [1, 2, 4, 7, 8]
UNWRITTEN = 100.0
"""What lies in slots that no token was written to: finite, and far off if it is read."""
by_group = pytest.mark.parametrize("group", GROUPS, ids="group={}".format)
captured_or_not = pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100, H200 or alike"
)
by_variant = pytest.mark.parametrize(
    "variant", [splitting.WHOLE, splitting.SPLIT, pytest.param(FA3, marks=needs_hopper)], ids=["whole", "split", "fa3"]
)


def geometry_of(
    group: int, dtype: torch.dtype = torch.bfloat16, head_dim: int = 128, window_left: int = -1, soft_cap: float = 0.0
) -> Geometry:
    padded = versions.padded_head_dim(head_dim)
    return Geometry(2 * group, 2, padded, PAGE_SIZE, window_left, soft_cap, dtype, dtype)


def scale_of(geometry: Geometry) -> float:
    return geometry.head_dim**-0.5 * (3.0 if geometry.logits_soft_cap else 1.0)  # large enough logits to be capped


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
        starts = starts_of(torch.tensor(queries) if queries else torch.ones_like(counts))
        return PageTable(starts.int(), starts_of(counts).int(), indices.int(), last.int())

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


def starts_of(counts: Tensor) -> Tensor:
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
        self, geometry: Geometry, columns: PageTable, workspace: FlashInferWorkspace, static: bool, variant: int
    ) -> None:
        self.geometry, self.columns, self.workspace = geometry, columns, workspace
        self.owner = backend_named("flashinfer").new_plan(workspace, 2**20)
        self._static = static
        self._captured_tokens = -1
        self._variant = variant

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
    layer: Layer,
    columns: PageTable,
    workspace: FlashInferWorkspace,
    *,
    static: bool = True,
    variant: int = splitting.SPLIT,
) -> Plan:
    return Plan(layer.geometry, columns, workspace, static, variant)


def options_of(geometry: Geometry) -> tuple[float, int, float]:
    return scale_of(geometry), geometry.window_left, geometry.logits_soft_cap


def decode(layer: Layer, query: Tensor, newest: tuple[Tensor, Tensor], columns: PageTable) -> tuple[Tensor, Tensor]:
    """`[B, H, D]` and `[B, H]`; whatever lengths the columns have, nothing is planned."""
    return decode_attention_lse(query, *newest, layer.pages, *unplanned(columns), *options_of(layer.geometry))


def unplanned(columns: PageTable) -> tuple[Tensor, Tensor, Tensor]:
    """What `decode_attention` takes of a table: where rows start, their lengths, and the page numbers."""
    full = columns.indptr[1:] - columns.indptr[:-1] - 1
    return columns.indptr[:-1], full * PAGE_SIZE + columns.last_page_len, columns.indices


def outputs(query: Tensor) -> tuple[Tensor, Tensor]:
    return torch.full_like(query, UNWRITTEN), torch.full(query.shape[:2], UNWRITTEN, device="cuda")


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


MIXED = [1, 15, 16, 17, 32, 300, 1025]
