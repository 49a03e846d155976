"""Batches of attention with their dense reference, and cases of every op for opcheck.

Shapes: B rows, T packed tokens, L tokens of one row, Q queries of one row, H query heads, K kv heads, D head dimension,
P pages, S page size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm_ops import Geometry, append_paged_kv, register_variant
from compiled_llm_ops.sampling.sampling import SampleTokens
from support.ops.cascade_rows import CascadeRows
from support.ops.expert_rows import ExpertRows
from support.ops.latent_rows import MIXES as LATENT_MIXES, LatentRows, RaggedRows
from support.ops.listed_pages import ListedRows
from support.ops.packed_tokens import Sizes, packed_tokens
from support.ops.packed_weights import ANYWHERE, FORMATS, arguments_together, make
from support.ops.recurrent_rows import COUNTS, RecurrentRows
from support.ops.sampling_cases import EVERYTHING, arguments

UNWRITTEN = 1e4
"""What lies in slots that no token was written to: it shows if it is read."""
UNREAD = torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
"""A plan and a workspace: on a CPU nothing reads them."""
TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


class Batch:
    """Rows of random keys and values, contiguous for the oracle and in pages in random order for the ops."""

    def __init__(
        self,
        lengths: Sequence[int],
        queries: Sequence[int],
        *,
        group: int = 2,
        kv_heads: int = 2,
        head_dim: int = 8,
        padded: int | None = None,
        value_dim: int | None = None,
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.lengths, self.queries, self.group, self.page_size = list(lengths), list(queries), group, page_size
        self.keys = [random(length, kv_heads, head_dim) for length in lengths]
        self.values = [random(length, kv_heads, value_dim or head_dim) for length in lengths]
        self.query = random(sum(queries), kv_heads * group, head_dim)
        counts = [-(-length // page_size) for length in lengths]
        order = torch.randperm(sum(counts) + 3, generator=generator)[: sum(counts)] + 1
        if value_dim is None:
            stored: tuple[int, ...] = (2, kv_heads, page_size, padded or head_dim)
        else:
            stored = (kv_heads, page_size, head_dim + value_dim)
        self.pages = torch.full((sum(counts) + 5, *stored), UNWRITTEN, dtype=dtype)
        if value_dim is None:
            self.pages[..., head_dim:] = 0
        self.qo_indptr, self.indptr = starts_of(queries), starts_of(counts)
        self.indices = order.int()
        self.last_page_len = torch.tensor([(length - 1) % page_size + 1 for length in lengths], dtype=torch.int32)
        self.scale = head_dim**-0.5

    @property
    def table(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.indptr, self.indices, self.last_page_len

    def slots(self, starts: Sequence[int], ends: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = [row for row, (start, end) in enumerate(zip(starts, ends, strict=True)) for _ in range(start, end)]
        positions = [at for start, end in zip(starts, ends, strict=True) for at in range(start, end)]
        return torch.tensor(rows, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32)

    def append(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        key, value = (
            torch.cat([states[row][start:end] for row, (start, end) in enumerate(zip(starts, ends, strict=True))])
            for states in (self.keys, self.values)
        )
        append_paged_kv(key, value, self.pages, *self.slots(starts, ends), *self.table)

    def in_fp8(self) -> Batch:
        self.pages = self.pages.clamp(-448, 448).to(FP8)
        return self

    def filled(self) -> Batch:
        self.append([0] * len(self.lengths), self.lengths)
        return self

    def arguments(self) -> tuple[Any, ...]:
        return self.query, self.pages, self.qo_indptr, *self.table, *UNREAD, self.scale

    def decode_arguments(self) -> tuple[Any, ...]:
        """The newest keys and values, as many a row as queries, are still to be written."""
        pages, (new,) = self.pages.clone(), set(self.queries)
        for row, length in enumerate(self.lengths):
            for at in range(length - new, length):
                page = pages[int(self.indices[self.indptr[row] + at // self.page_size])]
                size = page.shape[-1] if page.dim() == 3 else self.query.shape[2]
                unwritten = torch.tensor(UNWRITTEN).to(page.dtype)  # torch 2.15 assigns no number beyond a dtype's
                page[..., at % self.page_size, :size] = unwritten
        key, value = (torch.cat([row[-new:] for row in states]) for states in (self.keys, self.values))
        starts, lengths = self.indptr[:-1], torch.tensor(self.lengths, dtype=torch.int32)
        return self.query, key, value, pages, starts, lengths, self.indices, self.scale

    def expected(self, scale: float, window_left: int = -1, soft_cap: float = 0.0) -> Tensor:
        """`[T, H, D]` by HuggingFace's eager attention, in float32."""
        module, rows, taken = SimpleNamespace(num_key_value_groups=self.group, training=False), [], 0
        for row, (length, count) in enumerate(zip(self.lengths, self.queries, strict=True)):
            query = self.query[taken : taken + count].float().transpose(0, 1)[None]
            key, value = (states[row].float().transpose(0, 1)[None] for states in (self.keys, self.values))
            if count:
                mask = self.mask(length, count, window_left)
                out, _ = eager_attention_forward(
                    module, query, key, value, mask, scaling=scale, softcap=soft_cap or None
                )
                rows.append(out[0])
            taken += count
        return torch.cat(rows)

    @staticmethod
    def mask(length: int, count: int, window_left: int) -> Tensor:
        hidden = [
            [key > at or (0 <= window_left < at - key) for key in range(length)] for at in range(length - count, length)
        ]
        return torch.zeros(count, length).masked_fill(torch.tensor(hidden), -math.inf)[None, None]


def starts_of(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)


def planned_table(rows: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The `starts`, `lengths` and `indices` that `decode_attention` takes, as a table for the ops that are planned."""
    size = rows.pages.shape[3]
    counts = (rows.lengths - 1) // size + 1
    own = [rows.indices[start:][:count] for start, count in zip(rows.starts.tolist(), counts.tolist(), strict=True)]
    return starts_of(counts.tolist()), torch.cat(own), (rows.lengths - 1) % size + 1


def check_outputs(batch: Batch, expected: Tensor, out: Tensor, with_lse: Tensor, lse: Tensor) -> None:
    for actual in (out, with_lse):
        torch.testing.assert_close(actual.float(), expected, **TOLERANCE[batch.query.dtype])
        assert actual.dtype == batch.query.dtype
        assert actual.is_contiguous()
    assert (lse.dtype, lse.shape, lse.is_contiguous()) == (torch.float32, batch.query.shape[:2], True)


FP8 = torch.float8_e4m3fn
SCALES = torch.tensor([0.5, 0.02]), torch.tensor([0.3, 0.001])
"""Of the keys and the values of two heads."""


def fp8_arguments() -> tuple[Tensor, Tensor, Tensor]:
    """What pages of fp8 may be given."""
    return *(scale.clone() for scale in SCALES), torch.zeros(1, dtype=torch.int64)


MIXES = {
    "decode": ([1, 4, 5, 17], [1, 1, 1, 1]),
    "several new tokens": ([3, 4, 5, 17], [3, 3, 3, 3]),
    "prefill": ([1, 4, 5, 17], [1, 4, 5, 17]),
    "extend": ([9, 8, 12], [3, 4, 5]),
    "mixed": ([20, 7, 1, 8, 13], [1, 7, 1, 3, 2]),
    "page boundaries": ([3, 4, 5, 7, 8, 9], [1, 2, 3, 4, 5, 6]),
    "a row without queries": ([5, 6, 7], [2, 0, 3]),
    "one row": ([11], [11]),
}


def attention_cases() -> list[tuple[Any, ...]]:
    cases: list[tuple[Any, ...]] = []
    for mix, options in (("mixed", ()), ("decode", (3,)), ("extend", (-1, 1.5))):
        batch = Batch(*MIXES[mix], padded=16).filled()
        cases.append((*batch.arguments(), *options))
    cases.append(Batch(*MIXES["mixed"], value_dim=6).filled().arguments())
    batch = Batch(*MIXES["mixed"], dtype=torch.bfloat16).filled()
    cases.append((batch.query.transpose(0, 1).contiguous().transpose(0, 1), *batch.arguments()[1:]))
    fp8 = Batch(*MIXES["mixed"], padded=16).in_fp8()
    return [*cases, (*fp8.filled().arguments(), -1, 0.0, *SCALES)]


def plan_cases() -> list[tuple[Any, ...]]:
    cases = []
    for mix, options in (("mixed", ()), ("decode", (64, 1))):
        batch = Batch(*MIXES[mix])
        buffers = torch.zeros(8, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
        geometry = Geometry(4, 2, 8, 4, -1, 0.0, torch.bfloat16, torch.float16)
        table = batch.qo_indptr, batch.indptr, batch.last_page_len
        cases.append((*buffers, *table, torch.zeros(4, dtype=torch.uint8), *geometry, *options))
    return cases


def decode_cases() -> list[tuple[Any, ...]]:
    batches = [Batch(*MIXES["decode"], padded=16).filled() for _ in range(3)]
    cases = [(*batch.decode_arguments(), *own) for batch, own in zip(batches, ((), (3,), (-1, 1.5)), strict=True)]
    query, key, value, *others = Batch(*MIXES["decode"], dtype=torch.bfloat16).filled().decode_arguments()
    strided = (states.transpose(0, 1).contiguous().transpose(0, 1) for states in (query, key, value))
    several = Batch(*MIXES["several new tokens"], padded=16).filled().decode_arguments()
    batch = Batch(*MIXES["decode"], padded=16).filled()
    cases += [several, Batch(*MIXES["decode"], value_dim=6).filled().decode_arguments()]
    fp8 = Batch(*MIXES["decode"], padded=16).in_fp8().filled()
    cases.append((*fp8.decode_arguments(), -1, 0.0, *preparation(fp8.query), False, *fp8_arguments()))
    return [*cases, (*strided, *others), (*batch.decode_arguments(), -1, 0.0, *preparation(batch.query), True)]


def listed_cases() -> list[tuple[Any, ...]]:
    """With lists of pages."""
    kinds: list[dict[str, int]] = [{}, {"new_tokens": 2}, {"fp8": True}]
    cases = [
        _finite(ListedRows([2, 5, 9], page_size=4, seed=seed, **kind).arguments()) for seed, kind in enumerate(kinds)
    ]
    return [*decode_cases(), *cases]


def _variants() -> list[tuple[str, list[Tensor]]]:
    """Variants, and their tensors for 4 query heads."""
    bias = register_variant(
        "case_bias",
        lambda logit, row, head, query, key, bias: logit + bias[head, query - key],
        tensors={"bias": (("head", "position"), torch.float32)},
    )
    even = register_variant("case_even", visible=lambda row, head, query, key: (key % 2 == 0) | (head == 1))
    return [(bias.key, [torch.randn(4, 5)]), (even.name, [])]


def variant_cases() -> list[tuple[Any, ...]]:
    cases: list[tuple[Any, ...]] = []
    for name, tensors in _variants():
        query, pages, qo_indptr, *table, _, _, scale = Batch(*MIXES["mixed"], padded=16).filled().arguments()
        cases.append((query, pages, qo_indptr, *table, name, tensors, scale))
    query, pages, qo_indptr, *table, _, _, scale = Batch(*MIXES["mixed"]).in_fp8().filled().arguments()
    return [*cases, (query, pages, qo_indptr, *table, *_variants()[1], scale, 3, *SCALES)]


def planned_variant_cases() -> list[tuple[Any, ...]]:
    cases: list[tuple[Any, ...]] = []
    for name, tensors in _variants():
        query, pages, qo_indptr, *table, plan, workspace, scale = Batch(*MIXES["mixed"], padded=16).filled().arguments()
        cases.append((query, pages, qo_indptr, *table, plan, workspace, name, tensors, scale))
    return cases


def decode_variant_cases() -> list[tuple[Any, ...]]:
    cases: list[tuple[Any, ...]] = []
    for mix, variant in zip(("decode", "several new tokens"), _variants(), strict=True):
        *arguments, scale = Batch(*MIXES[mix], padded=16).filled().decode_arguments()
        cases.append((*arguments, *variant, scale))
    batch = Batch(*MIXES["decode"]).in_fp8().filled()
    *arguments, scale = batch.decode_arguments()
    prepared = (*preparation(batch.query), True)
    return [*cases, (*arguments, *_variants()[0], scale, 3, *prepared, *fp8_arguments())]


def cascade_cases() -> list[tuple[Any, ...]]:
    runs = [([0, 1, 2, 4], 2), ([1, 4], 1)]
    batches = [CascadeRows(runs, [3, 5, 1, 17, 2], padded=16, max_items=9) for _ in range(3)]
    cases = [(*each.arguments(), *own) for each, own in zip(batches, ((), (9,), (-1, 1.5)), strict=True)]
    query, *others = CascadeRows([], [3, 5], dtype=torch.bfloat16).arguments()
    cases.append((query.transpose(0, 1).contiguous().transpose(0, 1), *others))
    rows = CascadeRows(runs, [3, 5, 1, 17, 2])
    cases.append((*rows.arguments(), -1, 0.0, *preparation(rows.query), True))
    rows.pages = rows.pages.to(FP8)
    return [*cases, (*rows.arguments(), -1, 0.0, *preparation(rows.query), False, *fp8_arguments())]


def preparation(query: Tensor) -> tuple[Any, ...]:
    """What queries and keys are normed and turned with."""
    rows, _, size = query.shape
    norms, angles = torch.rand(2, size) + 0.5, (torch.rand(rows, size // 2) * 6).repeat(1, 2)
    return (*norms.to(query.dtype), 0.01, angles.cos().to(query.dtype), angles.sin().to(query.dtype))


def append_cases() -> list[tuple[Any, ...]]:
    cases = []
    for padded, value_dim in ((8, None), (16, None), (None, 6)):
        batch = Batch([6, 9], [1, 1], padded=padded, value_dim=value_dim)
        key, value = torch.cat(batch.keys), torch.cat(batch.values)
        cases.append((key, value, batch.pages, *batch.slots([0, 0], [6, 9]), *batch.table))
    key, value, pages, *others = cases[0]
    return [*cases, (key * 200, value, pages.to(FP8), *others, "flashinfer", *fp8_arguments())]


def rope_append_cases() -> list[tuple[Any, ...]]:
    spans, sizes = [(0, 1), (2, 8), (0, 5)], Sizes(head_dim=8, stored=16)
    cases = [tuple(packed_tokens(spans, sizes, given, torch.float32)) for given in ("all", "nothing", "query norm")]
    query, *others = packed_tokens(spans, sizes, "all", torch.bfloat16)._replace(overlap=True)
    cases.append((query.transpose(0, 1).contiguous().transpose(0, 1), *others))
    args = packed_tokens(spans, sizes, "all", torch.float32)
    fp8 = dict(zip(("key_scale", "value_scale", "saturated"), fp8_arguments(), strict=True))
    return [*cases, tuple(args._replace(pages=args.pages.to(FP8), **fp8))]


def sample_cases() -> list[SampleTokens]:
    settings = [Sampling(**EVERYTHING, temperature=0.8, top_k=3), Sampling(temperature=1.3, top_p=0.9)]
    logits = (torch.randn(2, 11), torch.randn(11, 2).T, torch.randn(2, 11).bfloat16())
    cases = [arguments(own, torch.randint(2**62, (2,)), settings) for own in logits]
    return [*cases, cases[0]._replace(before=torch.tensor([[4, -1], [3, 2]]))]


def ngram_cases() -> list[tuple[Any, ...]]:
    texts, sizes = torch.randint(3, (4, 30), dtype=torch.int32), torch.tensor([3, 1, 2, 2], dtype=torch.int32)
    return [
        (texts, torch.tensor([2, 0]), torch.tensor([30, 9], dtype=torch.int32), sizes, sizes // 2, k) for k in (1, 3)
    ]


def text_cases() -> list[tuple[Any, ...]]:
    starts = torch.tensor([1, 0], dtype=torch.int32)
    return [
        (torch.zeros(3, 6, dtype=torch.int32), torch.tensor([2, 0]), starts, torch.randint(9, (2, count)))
        for count in (1, 3)
    ]


def acceptance_cases() -> list[tuple[Any, ...]]:
    settings = [Sampling(**EVERYTHING), Sampling()]
    tables = arguments(torch.randn(2, 11), torch.randint(2**62, (2,)), settings)
    sampled = torch.tensor([[4, 7, 7], [3, 2, 1]])
    drafts, offered = torch.tensor([[4, 7], [3, 3]]), torch.tensor([2, 2], dtype=torch.int32)
    next_token = torch.zeros(3, dtype=torch.int64)
    written = (next_token, tables.counts, tables.recent)
    return [(sampled, drafts, offered, tables.slots, tables.positions, tables.adjustments, *written)]


def states_of(*shape: int) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps; the first has seen no key, and holds NaN."""
    outputs, lses = torch.randn(*shape, 8), 3 * torch.randn(shape)
    lses[0], outputs[0] = -torch.inf, torch.nan
    return outputs, lses


def merge_state_cases() -> list[tuple[Any, ...]]:
    return [(*states_of(4, 2), *(part.flip(0) for part in states_of(4, 2)))]


def merge_states_cases() -> list[tuple[Any, ...]]:
    return [states_of(3, count, 2) for count in (1, 5)]


def merge_in_place_cases() -> list[tuple[Any, ...]]:
    return [(*case, mask) for mask in (None, torch.tensor([True, False, True, False])) for case in merge_state_cases()]


def linear_cases() -> list[tuple[Any, ...]]:
    weight = torch.randn(7, 5)
    return [(torch.randn(count, 5), weight) for count in (1, 4, 5)] + [(torch.randn(5, 3).T, weight)]


def invariant_linear_cases() -> list[tuple[Any, ...]]:
    weight, bias = torch.randn(7, 5), torch.randn(7)
    cases = [(torch.randn(*shape, 5), weight, bias) for shape in ((1,), (2, 17))]
    return [*cases, (torch.randn(5, 3).T, torch.randn(5, 7).T), (torch.randn(3, 5).bfloat16(), weight.bfloat16())]


def invariant_bmm_cases() -> list[tuple[Any, ...]]:
    return [
        (torch.randn(3, 1, 5), torch.randn(3, 5, 7)),
        (torch.randn(17, 2, 5).transpose(0, 1), torch.randn(2, 7, 5).mT),
    ]


def invariant_sum_cases() -> list[tuple[Any, ...]]:
    return [(torch.randn(7),), (torch.randn(2, 17, 5),), (torch.randn(9, 4).T.bfloat16(),)]


def packed_linear_cases() -> list[tuple[Any, ...]]:
    cases = [make(name, 16, 64).arguments(torch.randn(2, 3, 64)) for name in FORMATS if "FP8" not in name]
    return [*cases, make("torchao int8", 5, 7).arguments(torch.randn(7, 3).T, torch.randn(5))]


def packed_linears_cases() -> list[tuple[Any, ...]]:
    cases = []
    for name, shape in itertools.product(ANYWHERE, ((2, 3, 128), (1, 128))):
        weights = [make(name, outputs, 128).weight for outputs in (16, 8)]
        cases.append(arguments_together(torch.randn(*shape), weights, torch.randn(24) if len(shape) == 2 else None))
    return [*cases, arguments_together(torch.randn(3, 128), [weights[0]._replace(zeros=None)])]


def norm_cases() -> list[tuple[Any, ...]]:
    return [(*torch.randn(2, *shape), torch.randn(shape[-1]), 1e-6) for shape in ((3, 16), (2, 1, 8))]


def normed_linear_cases() -> list[tuple[Any, ...]]:
    cases = []
    for shape, outputs, gated in (((1, 1, 16), 6, False), ((1, 1, 16), 6, True), ((3, 16), 5, False)):
        states, norm, weight = torch.randn(2, *shape), torch.randn(16), torch.randn(outputs, 16)
        cases.append((*states, norm, 1e-6, weight, gated))
    return cases


def chained_linear_cases() -> list[tuple[Any, ...]]:
    cases = []
    for shape, outputs, gated in (((2, 1), 6, False), ((2, 1), 6, True), ((3,), 5, False)):
        rows, weight, states = torch.randn(*shape, 12), torch.randn(16, 12), torch.randn(*shape, 16)
        cases.append((rows, weight, states, torch.randn(16), 1e-6, torch.randn(outputs, 16), gated))
    rows, *others = cases[0]
    return [*cases, (rows.transpose(0, 2).contiguous().transpose(0, 2), *others)]


def logprob_cases() -> list[tuple[Any, ...]]:
    return [(torch.randn(rows, 40), torch.randint(40, (rows,)), most) for rows, most in ((1, 0), (3, 5))]


def append_latent_cases() -> list[tuple[Any, ...]]:
    return [_finite(LatentRows([9, 4, 6], [2, 1, 6], seed=1).append_arguments())]


def latent_cases() -> list[tuple[Any, ...]]:
    rows = [LatentRows(*mix, seed=2, chosen=chosen) for mix in LATENT_MIXES.values() for chosen in (None, 5)]
    made = [own.arguments() for own in rows]
    return [_finite(own) for own in (*made, made[0]._replace(invariant=True))]


def planned_latent_cases() -> list[tuple[Any, ...]]:
    mixes = ([1], [1]), ([9, 13, 30], [2, 5, 1])
    return [_finite(LatentRows(*mix, seed=2).planned_arguments()) for mix in mixes]


def latent_decode_cases() -> list[tuple[Any, ...]]:
    rows = [LatentRows(lengths, seed=3, chosen=chosen) for lengths in ([1, 4, 5], [0, 9]) for chosen in (None, 5)]
    made = [own.decode_arguments() for own in rows]
    return [_finite(own) for own in (*made, made[0]._replace(invariant=True))]


def ragged_cases() -> list[tuple[Any, ...]]:
    return [RaggedRows(counts, key_heads=2, seed=4).arguments() for counts in ([3, 0, 5], [1, 7])]


def segment_cases() -> list[tuple[Any, ...]]:
    made = []
    for starts, longest in (([0, 3, 6, 6, 8], 3), ([0, 8], 0)):
        states = torch.randn(3, 8, 2, 8)
        made.append((*states, torch.tensor(starts, dtype=torch.int32), 0.5, longest))
    return made


def conv_cases() -> list[tuple[Any, ...]]:
    rows = [RecurrentRows(COUNTS[name], seed=5) for name in ("decode", "mixed")]
    own = [*(own.conv() for own in rows), rows[1].conv(bias=False, activation="none")]
    return [*map(tuple, own), tuple(own[-1]._replace(invariant=True))]


def delta_rule_cases() -> list[tuple[Any, ...]]:
    rows = [RecurrentRows(counts, seed=6) for counts in ([1, 1, 1], [3, 0, 5])]
    made = [own.delta(of_channels=of_channels) for own in rows for of_channels in (False, True)]
    return [*map(tuple, made), tuple(made[-1]._replace(invariant=True))]


def selective_scan_cases() -> list[tuple[Any, ...]]:
    rows = [RecurrentRows(counts, seed=7) for counts in ([1, 1, 1], [3, 0, 5])]
    made = [own.scan(of_numbers=of_numbers) for own in rows for of_numbers in (False, True)]
    return [*map(tuple, made), tuple(made[-1]._replace(invariant=True))]


def experts_linear_cases() -> list[tuple[Any, ...]]:
    rows = [ExpertRows(rows, chosen, seed=8) for rows, chosen in ((3, 2), (70, 3))]
    return [
        tuple(own.linear(of_pairs=different, bias=different, transposed=different))
        for own in rows
        for different in (False, True)
    ]


def fused_experts_cases() -> list[tuple[Any, ...]]:
    rows = [ExpertRows(rows, chosen, choice="some without", seed=9) for rows, chosen in ((3, 2), (70, 3))]
    without_a_gate = rows[0].fused("relu2", gated=False, transposed=True, bias=True)
    return [*(tuple(own.fused()) for own in rows), tuple(without_a_gate)]


def _finite(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Without NaN, which opcheck does not compare."""
    return tuple(
        own.float().nan_to_num(0.0).to(own.dtype) if isinstance(own, Tensor) and own.is_floating_point() else own
        for own in args
    )


CASES: dict[str, Callable[[], Sequence[tuple[Any, ...]]]] = {
    "accept_drafts": acceptance_cases,
    "add_rms_norm": norm_cases,
    "append_latent": append_latent_cases,
    "append_paged_kv": append_cases,
    "cascade_attention": cascade_cases,
    "cascade_attention_lse": cascade_cases,
    "causal_conv1d": conv_cases,
    "chained_linear": chained_linear_cases,
    "decode_attention": listed_cases,
    "decode_attention_lse": listed_cases,
    "decode_attention_variant": decode_variant_cases,
    "decode_attention_variant_lse": decode_variant_cases,
    "experts_linear": experts_linear_cases,
    "fused_experts": fused_experts_cases,
    "gated_delta_rule": delta_rule_cases,
    "invariant_attention": decode_cases,
    "invariant_attention_lse": decode_cases,
    "invariant_bmm": invariant_bmm_cases,
    "invariant_linear": invariant_linear_cases,
    "invariant_sum": invariant_sum_cases,
    "latent_attention": latent_cases,
    "latent_attention_lse": latent_cases,
    "latent_decode": latent_decode_cases,
    "latent_decode_lse": latent_decode_cases,
    "merge_state": merge_state_cases,
    "merge_state_in_place": merge_in_place_cases,
    "merge_states": merge_states_cases,
    "ngram_drafts": ngram_cases,
    "normed_linear": normed_linear_cases,
    "packed_linear": packed_linear_cases,
    "packed_linears": packed_linears_cases,
    "paged_attention": attention_cases,
    "paged_attention_lse": attention_cases,
    "paged_attention_variant": variant_cases,
    "paged_attention_variant_lse": variant_cases,
    "plan_paged_attention": plan_cases,
    "planned_attention_variant": planned_variant_cases,
    "planned_attention_variant_lse": planned_variant_cases,
    "planned_latent_attention": planned_latent_cases,
    "planned_latent_attention_lse": planned_latent_cases,
    "ragged_attention": ragged_cases,
    "ragged_attention_lse": ragged_cases,
    "rope_append_paged_kv": rope_append_cases,
    "sample_tokens": sample_cases,
    "segment_attention": segment_cases,
    "selective_scan": selective_scan_cases,
    "skinny_linear": linear_cases,
    "top_logprobs": logprob_cases,
    "write_texts": text_cases,
}
