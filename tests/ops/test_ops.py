"""The ops on the CPU against HuggingFace's dense attention over contiguous keys and values, and what they refuse.

Shapes: B rows, T packed tokens, L tokens of one row, Q queries of one row, H query heads, K kv heads, D head dimension,
P pages, S page size.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from compiled_llm_ops import (
    add_rms_norm,
    append_paged_kv,
    chained_linear,
    decode_attention,
    decode_attention_lse,
    normed_linear,
    paged_attention,
    paged_attention_lse,
    rope_append_paged_kv,
    sample_tokens,
    skinny_linear,
    top_logprobs,
)
from compiled_llm_ops.attention.decode import SharedPlaces
from compiled_llm_ops.contracts import (
    AppendPagedKv,
    DecodeAttention,
    check_capability,
    check_scales as check_fp8_arguments,
)
from support.ops.cascade_rows import turned
from support.ops.fp8_pages import KINDS, LARGEST, Fp8Batch
from support.ops.op_cases import (
    MIXES,
    UNREAD,
    Batch,
    append_cases,
    attention_cases,
    chained_linear_cases,
    check_outputs,
    decode_cases,
    linear_cases,
    logprob_cases,
    norm_cases,
    normed_linear_cases,
    preparation,
    rope_append_cases,
    sample_cases,
    starts_of,
)

pytestmark = pytest.mark.core


def check(batch: Batch, scale: float | None = None, window_left: int = -1, soft_cap: float = 0.0) -> None:
    """The ops against the oracle, and their outputs' form."""
    scale = batch.scale if scale is None else scale
    arguments = (*batch.arguments()[:-1], scale, window_left, soft_cap)
    expected = batch.expected(scale, window_left, soft_cap)
    with_lse, lse = paged_attention_lse(*arguments)
    check_outputs(batch, expected, paged_attention(*arguments), with_lse, lse)
    if len(set(batch.queries)) == 1:
        with_lse, decode_lse = decode_attention_lse(*batch.decode_arguments()[:-1], scale, window_left, soft_cap)
        arguments = (*batch.decode_arguments()[:-1], scale, window_left, soft_cap)
        check_outputs(batch, expected, decode_attention(*arguments), with_lse, decode_lse)
        torch.testing.assert_close(decode_lse, lse)
        torch.testing.assert_close(arguments[3], batch.pages, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [1, 2, 4, 7])
@pytest.mark.parametrize("mix", MIXES)
def test_attention_equals_dense_attention(mix, group, dtype, seed):
    check(Batch(*MIXES[mix], group=group, dtype=dtype, seed=seed).filled())


@pytest.mark.parametrize(("head_dim", "padded"), [(8, 8), (16, 16), (5, 8), (80, 128), (64, 64)])
def test_pages_may_be_wider_than_the_heads(head_dim, padded, seed):
    check(Batch(*MIXES["mixed"], head_dim=head_dim, padded=padded, seed=seed).filled())


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 6), (5, 12)])
def test_values_may_have_another_size_than_keys(mix, head_dim, value_dim, seed):
    check(Batch(*MIXES[mix], head_dim=head_dim, value_dim=value_dim, seed=seed).filled())
    check(Batch(*MIXES[mix], head_dim=head_dim, value_dim=value_dim, seed=seed).filled(), 1.3, 4, 1.5)


@pytest.mark.parametrize("mix", ["decode", "extend", "mixed"])
@pytest.mark.parametrize("options", [{"scale": 1.3}, {"window_left": 0}, {"window_left": 4}, {"window_left": 100}])
def test_scale_and_window_are_honoured(mix, options, seed):
    check(Batch(*MIXES[mix], seed=seed).filled(), **options)


@pytest.mark.parametrize("mix", ["decode", "mixed"])
@pytest.mark.parametrize(("soft_cap", "window_left"), [(1.5, -1), (0.4, 3)])
def test_soft_cap_is_honoured(mix, soft_cap, window_left, seed):
    check(Batch(*MIXES[mix], seed=seed).filled(), 2.0, window_left, soft_cap)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5),
    page_size=st.integers(1, 9),
    group=st.sampled_from([1, 2, 3]),
    window_left=st.integers(-1, 12),
    seed=st.integers(0, 1000),
)
def test_any_batch_equals_dense_attention(rows, page_size, group, window_left, seed):
    lengths, queries = [length for length, _ in rows], [min(pair) for pair in rows]
    check(Batch(lengths, queries, page_size=page_size, group=group, seed=seed).filled(), window_left=window_left)


@pytest.mark.parametrize("window_left", [-1, 2])
def test_new_rows_of_one_length_attend_together(window_left, seed):
    check(Batch([6, 6, 9, 9, 9, 10], [6, 6, 9, 9, 3, 3], group=2, seed=seed).filled(), window_left=window_left)


@pytest.mark.parametrize("lengths", [[9], [9, 9], [9, 10, 12], [3, 40]], ids=str)
def test_layers_attend_where_the_first_of_them_has_found_the_rows(lengths, seed):
    batch = Batch(lengths, [1] * len(lengths), group=2, seed=seed).filled()
    places = SharedPlaces()
    for window_left in (-1, 4, -1, 0):
        arguments = DecodeAttention(*batch.decode_arguments()[:-1], batch.scale, window_left)
        out, lse = places.attend(arguments, wants_lse=False)
        assert lse is None
        torch.testing.assert_close(out, batch.expected(batch.scale, window_left, 0.0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(arguments.pages, batch.pages, rtol=0, atol=0)


@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
def test_lse_is_the_base_two_log_of_the_sum(soft_cap, seed):
    batch = Batch([9, 6], [3, 1], group=2, seed=seed).filled()
    _, lse = paged_attention_lse(*batch.arguments(), -1, soft_cap)
    taken = 0
    for row, count in enumerate(batch.queries):
        for query in range(count):
            seen = batch.lengths[row] - count + query + 1
            for head in range(4):
                logits = batch.keys[row][:seen, head // 2] @ batch.query[taken, head] * batch.scale
                if soft_cap:
                    logits = soft_cap * torch.tanh(logits / soft_cap)
                assert lse[taken, head].item() == pytest.approx(math.log2(logits.exp().sum().item()), abs=1e-4)
            taken += 1


def test_two_halves_combined_by_their_lse_are_the_whole(seed):
    """Cascade attention: the first two pages of each row in one call, the rest in another."""
    batch = Batch([13, 10], [1, 1], seed=seed).filled()
    whole, whole_lse = paged_attention_lse(*batch.arguments())
    first, rest = ([batch.indices[start:end] for start, end in spans] for spans in (((0, 2), (4, 6)), ((2, 4), (6, 7))))
    parts = [
        paged_attention_lse(
            batch.query, batch.pages, batch.qo_indptr, starts_of([len(own) for own in half]), torch.cat(half), last,
            *UNREAD, batch.scale,
        )
        for half, last in ((first, torch.tensor([4, 4]).int()), (rest, batch.last_page_len))
    ]  # fmt: skip
    lses = torch.stack([lse for _, lse in parts])
    weights = torch.exp2(lses - torch.logsumexp(lses * math.log(2), 0) / math.log(2))
    torch.testing.assert_close(sum(w[..., None] * out for w, (out, _) in zip(weights, parts, strict=True)), whole)
    torch.testing.assert_close(torch.logsumexp(lses * math.log(2), 0) / math.log(2), whole_lse)


# ---- writing


@pytest.mark.parametrize("padded", [8, 16])
def test_append_writes_its_slots_and_nothing_else(padded, seed):
    batch = Batch([10, 3, 8], [1, 1, 1], padded=padded, seed=seed)
    before = batch.pages.clone()
    batch.append([5, 0, 7], [10, 2, 8])
    expected = before.clone()
    for row, (start, end) in enumerate([(5, 10), (0, 2), (7, 8)]):
        for at in range(start, end):
            page = batch.indices[batch.indptr[row] + at // 4]
            expected[page, 0, :, at % 4, :8] = batch.keys[row][at]
            expected[page, 1, :, at % 4, :8] = batch.values[row][at]
    torch.testing.assert_close(batch.pages, expected, rtol=0, atol=0)


def test_append_stores_in_the_type_of_the_pages(seed):
    batch = Batch([6], [1], seed=seed)
    batch.pages = batch.pages.bfloat16()
    batch.filled()
    stored = batch.pages[batch.indices.long(), 0].transpose(1, 2).flatten(0, 1)[:6]
    torch.testing.assert_close(stored, batch.keys[0].bfloat16(), rtol=0, atol=0)


def test_inputs_may_have_any_strides(seed):
    def strided(states: torch.Tensor) -> torch.Tensor:
        states = states.transpose(0, 1).contiguous().transpose(0, 1)
        assert not states.is_contiguous()
        return states

    batch, other = (Batch(*MIXES["mixed"], seed=seed) for _ in range(2))
    query, *others = batch.filled().arguments()
    expected = paged_attention(query, *others)
    out, lse = paged_attention_lse(strided(query), *others)
    for actual in (out, paged_attention(strided(query), *others)):
        torch.testing.assert_close(actual, expected)
        assert actual.is_contiguous()
    assert lse.is_contiguous()
    key, value = (strided(torch.cat(rows)) for rows in (other.keys, other.values))
    append_paged_kv(key, value, other.pages, *other.slots([0] * 5, other.lengths), *other.table)
    torch.testing.assert_close(other.pages, batch.pages, rtol=0, atol=0)


# ---- pages of fp8


def check_fp8(batch: Fp8Batch, window_left: int = -1, soft_cap: float = 0.0) -> None:
    """What is written, counted and read, against the table of fp8's numbers and dense attention over these."""
    pages = batch.filled().pages
    assert torch.equal(pages.view(torch.uint8), batch.expected_pages())
    assert batch.given["saturated"].tolist() == [batch.clamped()]
    how, scales = (
        (batch.scale, window_left, soft_cap),
        {"key_scale": batch.scales.key, "value_scale": batch.scales.value},
    )
    expected, expected_lse = batch.read().expected(*how), batch.expected_lse(*how)
    arguments = (*batch.arguments()[:-1], *how)
    with_lse, lse = paged_attention_lse(*arguments, **scales)
    check_outputs(batch, expected, paged_attention(*arguments, **scales), with_lse, lse)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)
    if len(set(batch.queries)) == 1:
        outs = []
        for op in (decode_attention, decode_attention_lse):
            arguments, given = (*batch.decode_arguments()[:-1], *how), batch.scales.given
            outs.append(op(*arguments, **given))
            assert given["saturated"].tolist() == [batch.clamped(batch.queries[0])]
            assert torch.equal(arguments[3].view(torch.uint8), pages.view(torch.uint8))
        out, (with_lse, lse) = outs
        check_outputs(batch, expected, out, with_lse, lse)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mix", MIXES)
def test_attention_over_fp8_equals_dense_attention_over_what_is_read(mix, kind, dtype, seed):
    check_fp8(Fp8Batch(*MIXES[mix], kind=kind, dtype=dtype, seed=seed))


@pytest.mark.parametrize(
    "sizes", [{"group": 1}, {"group": 7}, {"padded": 16}, {"page_size": 1}, {"kv_heads": 3}], ids=str
)
@pytest.mark.parametrize(("window_left", "soft_cap"), [(0, 0.0), (4, 0.0), (-1, 1.5), (3, 0.4)])
@pytest.mark.parametrize("mix", ["decode", "mixed"])
def test_windows_caps_and_sizes_of_any_kind_with_pages_of_fp8(mix, window_left, soft_cap, sizes, seed):
    check_fp8(Fp8Batch(*MIXES[mix], seed=seed, **sizes), window_left, soft_cap)


@pytest.mark.parametrize("window_left", [-1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_about_equal_lengths_decode_together_over_fp8(kind, window_left, seed):
    """Slots past the ends of shorter rows are masked, so they must hold numbers, as with pages of other dtypes."""
    check_fp8(Fp8Batch([9, 10, 12], [1, 1, 1], kind=kind, unwritten=LARGEST, seed=seed), window_left)


def test_numbers_beyond_the_largest_are_clamped_and_counted(seed):
    """In every dtype, whatever casting makes of them; a NaN stays one, and is not counted."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        batch = Fp8Batch([6], [1], kind="none", dtype=dtype, seed=seed)
        batch.keys[0][0, 0, :6] = torch.tensor([448.0, 449.0, -1e4, 65504.0, math.inf, math.nan]).to(dtype)
        batch.filled()
        page = batch.pages[int(batch.indices[0]), 0, 0, 0]
        assert page[:5].float().tolist() == [448.0, 448.0, -448.0, 448.0, 448.0]
        assert bool(page[5].isnan())
        large = 3 if dtype == torch.bfloat16 else 4  # 449 is 448 there
        assert batch.given["saturated"].tolist() == [large]
        batch.filled()
        assert batch.given["saturated"].tolist() == [2 * large], "it is added to"


@pytest.mark.parametrize("kind", KINDS)
def test_decode_norms_and_turns_before_it_rounds_to_fp8(kind, seed):
    """So scales go into logits and outputs: a norm would undo them."""
    batch = Fp8Batch(*MIXES["decode"], kind=kind, seed=seed).filled()
    query_norm, key_norm, epsilon, cos, sin = own = preparation(batch.query)
    arguments, given = batch.decode_arguments(), batch.scales.given
    out, lse = decode_attention_lse(*arguments, -1, 0.0, *own, **given)
    newest = turned(arguments[1], key_norm, epsilon, cos, sin)
    for row, key in enumerate(newest):
        batch.keys[row][-1] = key
    batch.query = turned(batch.query, query_norm, epsilon, cos, sin)
    torch.testing.assert_close(out, batch.read().expected(batch.scale), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse, batch.expected_lse(batch.scale, -1, 0.0), rtol=1e-4, atol=1e-4)
    assert torch.equal(arguments[3].view(torch.uint8), batch.expected_pages())
    assert given["saturated"].tolist() == [batch.clamped(1)]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5),
    page_size=st.integers(1, 9),
    group=st.sampled_from([1, 2, 3]),
    window_left=st.integers(-1, 12),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 1000),
)
def test_any_batch_in_pages_of_fp8_equals_dense_attention(rows, page_size, group, window_left, kind, seed):
    torch.manual_seed(seed)
    lengths, queries = [length for length, _ in rows], [min(pair) for pair in rows]
    check_fp8(Fp8Batch(lengths, queries, kind=kind, page_size=page_size, group=group, seed=seed), window_left)


# ---- errors come before anything is written

Row = tuple[dict[str, Callable[[Any], Any]], str]
"""What replaces arguments, and the message."""

APPEND: list[Row] = [
    ({"key": lambda key: key[:, :1]}, r"key and value.*one shape.*\(15, 1, 8\)"),
    ({"key": lambda key: key[0], "value": lambda value: value[0]}, r"\[T, K, D\]"),
    ({"key": lambda key: key[:, :1], "value": lambda value: value[:, :1]}, r"pages must be"),
    ({"pages": lambda pages: pages[..., :4]}, r"pages must be.*D >= 8"),
    ({"pages": lambda pages: pages[:, :1]}, r"pages must be"),
    ({"pages": lambda pages: pages[0]}, r"pages must be"),
    ({"token_rows": lambda rows: rows[:-1]}, r"token_rows.*\[15\]"),
    ({"token_positions": lambda positions: positions[:3]}, r"token_positions.*\[15\]"),
    ({"token_rows": lambda rows: rows.float()}, r"token_rows.*int32"),
    ({"token_positions": lambda positions: positions.long()}, r"token_positions.*int32"),
    ({"indptr": lambda indptr: indptr.float()}, r"indptr.*int32"),
    ({"indices": lambda indices: indices.bool()}, r"indices.*int32"),
    ({"value": lambda value: value.double()}, r"value.*dtype|dtype.*value"),
]
PLANNED: list[Row] = [
    ({"query": lambda query: query[0]}, r"query must be \[T, H, D\]"),
    ({"pages": lambda pages: pages[0]}, r"pages \[P, 2, K, S, D\]"),
    ({"pages": lambda pages: pages[:, :1]}, r"pages"),
    ({"query": lambda query: query[:, :3]}, r"3 query heads.*2 kv heads"),
    ({"query": lambda query: torch.cat([query] * 3, -1)}, r"heads of size 24.*size 16"),
    ({"qo_indptr": lambda indptr: indptr[:-1]}, r"qo_indptr.*\[6\].*\[5\]"),
    ({"indptr": lambda indptr: indptr[:-1]}, r"indptr.*\[6\].*\[5\]"),
    ({"last_page_len": lambda last: last[:-1]}, r"indptr.*\[5\]"),
    ({"indptr": lambda indptr: indptr.long()}, r"indptr.*int32"),
    ({"indices": lambda indices: indices.float()}, r"indices.*int32"),
]
DECODE: list[Row] = [
    ({"query": lambda query: query[0]}, r"query must be \[T, H, D\]"),
    ({"pages": lambda pages: pages[0]}, r"pages \[P, 2, K, S, D\]"),
    ({"query": lambda query: query[:, :3]}, r"3 query heads.*2 kv heads"),
    ({"query": lambda query: torch.cat([query] * 3, -1)}, r"heads of size 24.*size 16"),
    ({"query": lambda query: query[:-1]}, r"for 3 tokens"),
    ({"key": lambda key: key[:-1]}, r"key and value must be \(4, 2, 8\).*\(3, 2, 8\)"),
    ({"value": lambda value: value[:, :1]}, r"key and value must be.*\(4, 1, 8\)"),
    ({"value": lambda value: value.double()}, r"of one dtype.*float64"),
    ({"starts": lambda starts: starts[:-1]}, r"starts and lengths must be \[B\].*\(3,\) and \(4,\)"),
    ({"lengths": lambda lengths: lengths[:-1]}, r"starts and lengths must be \[B\].*\(4,\) and \(3,\)"),
    ({"lengths": lambda lengths: lengths.long()}, r"lengths.*int32"),
    ({"indices": lambda indices: indices.float()}, r"indices.*int32"),
]
PREPARED: list[Row] = [
    ({"query_norm": lambda norm: norm[1:]}, r"query_norm must be \(8,\) torch.float32; got \(7,\)"),
    ({"key_norm": lambda norm: norm.double()}, r"key_norm must be \(8,\) torch.float32.*float64"),
    ({"cos": lambda cos: cos[:2]}, r"cos must be \(4, 8\).*\(2, 8\)"),
    ({"sin": lambda sin: sin[:, :4]}, r"sin must be \(4, 8\).*\(4, 4\)"),
    ({"cos": lambda cos: None}, r"cos and sin must be given together"),
]
ROPE_APPEND: list[Row] = [
    ({"query": lambda query: query[0]}, r"query must be \[T, H, D\]"),
    ({"query": lambda query: query[:, :3]}, r"3 query heads.*2 kv heads"),
    ({"query": lambda query: query[:-1]}, r"for 11 tokens"),
    ({"key": lambda key: key[:, :1]}, r"key and value must be \(12, 2, 8\) torch.float32.*\(12, 1, 8\)"),
    ({"key": lambda key: key.double()}, r"key and value must be.*float64"),
    ({"value": lambda value: value[..., :4]}, r"key and value must be.*\(12, 2, 4\)"),
    ({"pages": lambda pages: pages[:, :1]}, r"pages"),
    ({"pages": lambda pages: pages[:, 0]}, r"backend='reference' only"),
    ({"pages": lambda pages: pages[..., :4]}, r"do not fit pages"),
    ({"token_rows": lambda rows: rows[:-1]}, r"token_rows.*\[12\]"),
    ({"token_positions": lambda positions: positions.long()}, r"token_positions.*int32"),
    ({"indptr": lambda indptr: indptr.float()}, r"indptr.*int32"),
    ({"indices": lambda indices: indices.bool()}, r"indices.*int32"),
    ({"query_norm": lambda norm: norm[1:]}, r"query_norm must be \(8,\) torch.float32; got \(7,\)"),
    ({"key_norm": lambda norm: norm.double()}, r"key_norm must be \(8,\) torch.float32.*float64"),
    ({"cos": lambda cos: cos[:2]}, r"cos must be \(12, 8\).*\(2, 8\)"),
    ({"sin": lambda sin: None}, r"cos and sin must be given together"),
]
NORM: list[Row] = [
    (
        {"states": lambda states: states[:, :15]},
        r"states and update must be \[..., I\] and weight \[I\]; got \(3, 15\)",
    ),
    ({"weight": lambda weight: weight[:15]}, r"\(3, 16\) and \(15,\)"),
    ({"update": lambda update: update.double()}, r"of one dtype; got torch.float32, torch.float64"),
]
NORMED: list[Row] = [
    ({"update": lambda update: update[..., :15]}, r"states and update must be \[..., I\]"),
    ({"norm": lambda norm: norm[:15]}, r"\(1, 1, 16\) and \(15,\)"),
    (
        {"weight": lambda weight: weight[:, :15]},
        r"states must be \[..., I\] and weight \[O, I\].*got \(1, 1, 16\).*\(6, 15\)",
    ),
    ({"weight": lambda weight: weight.double()}, r"of one dtype; got .*torch.float32 and \(6, 16\) torch.float64"),
    ({"weight": lambda weight: weight[:5]}, r"5 outputs have no two halves"),
]
CHAINED: list[Row] = [
    ({"rows": lambda rows: rows[..., :11]}, r"rows must be \[..., J\].*got \(2, 1, 11\), \(16, 12\) and \(2, 1, 16\)"),
    ({"states": lambda states: states[:1]}, r"states \[..., I\]; got \(2, 1, 12\), \(16, 12\) and \(1, 1, 16\)"),
    ({"norm": lambda norm: norm[:15]}, r"norm must be \[16\] and next_weight \[O, 16\]; got \(15,\) and \(6, 16\)"),
    ({"next_weight": lambda weight: weight[:, :15]}, r"got \(16,\) and \(6, 15\)"),
    ({"next_weight": lambda weight: weight[:5]}, r"5 outputs have no two halves"),
    ({"norm": lambda norm: norm.double()}, r"all must be of one dtype; got torch.float32,.*torch.float64"),
]
SKINNY: list[Row] = [
    ({"weight": lambda weight: weight[:, :4]}, r"skinny_linear: rows must be \[M, I\].*got \(1, 5\)"),
    ({"weight": lambda weight: weight.bfloat16()}, r"skinny_linear: rows must be \[M, I\].*got \(1, 5\)"),
    ({"weight": lambda weight: weight[0]}, r"skinny_linear: rows must be \[M, I\].*got \(1, 5\)"),
]
LOGPROBS: list[Row] = [
    ({"tokens": lambda tokens: tokens.repeat(2)}, r"tokens must be \[3\] int64; got \[6\]"),
    ({"num_logprobs": lambda number: 41}, "num_logprobs=41 must be from 0 to 40"),
    ({"logits": lambda logits: logits[0]}, r"logits must be \[R, V\] floats"),
]
SAMPLE: list[Row] = [
    ({"logits": lambda logits: torch.zeros(11)}, r"logits must be \[B, V\]"),
    ({"logits": lambda logits: logits.long()}, r"logits must be.*int64"),
    ({"seeds": lambda seeds: seeds.float()}, r"seeds must be \[2\] torch.int64.*float32"),
    ({"slots": lambda slots: torch.zeros(3, dtype=torch.int64)}, r"slots must be \[2\]"),
    ({"top_k": lambda table: table.long()}, r"top_k must be \[3\] torch.int32"),
    ({"counts": lambda table: table.repeat(1, 2)}, r"counts must be \[3, 11\] torch.int16"),
    ({"allowed": lambda table: table.repeat(1, 2)}, r"allowed must be \[3, 1\] torch.int32"),
    ({"recent": lambda table: table[:, 1:]}, r"recent must be \[3, 8\] torch.int32"),
    ({"biases": lambda table: table[:, :4, :9]}, r"biases must be \[3, 11, 512\] torch.int32"),
]
FP8: list[Row] = [
    ({"key_scale": lambda scale: scale[:1]}, r"key_scale must be \(2,\) torch.float32 on cpu.*got \(1,\)"),
    ({"key_scale": lambda scale: scale.double()}, r"key_scale must be \(2,\) torch.float32.*torch.float64"),
    ({"value_scale": lambda scale: scale[:, None]}, r"value_scale must be \(2,\).*got \(2, 1\)"),
    ({"pages": lambda pages: pages.bfloat16()}, r"key_scale, value_scale.*must be None for pages of torch.bfloat16"),
]
COUNTED: list[Row] = [
    *FP8,
    ({"saturated": lambda count: count.int()}, r"saturated must be \(1,\) torch.int64.*torch.int32"),
    ({"saturated": lambda count: count[0]}, r"saturated must be \(1,\) torch.int64.*got \(\)"),
    ({"pages": lambda pages: pages.half(), "key_scale": lambda _: None, "value_scale": lambda _: None},
     r": saturated must be None for pages of torch.float16"),
]  # fmt: skip
REFUSED: list[tuple[list[Callable[..., Any]], Callable[[], Any], list[Row]]] = [
    ([append_paged_kv], lambda: append_cases()[0], APPEND),
    ([paged_attention, paged_attention_lse], lambda: attention_cases()[0], PLANNED),
    ([decode_attention, decode_attention_lse], lambda: decode_cases()[0], DECODE),
    ([decode_attention, decode_attention_lse], lambda: decode_cases()[-1], PREPARED),
    ([rope_append_paged_kv], lambda: rope_append_cases()[0], ROPE_APPEND),
    ([append_paged_kv], lambda: append_cases()[-1], COUNTED),
    ([rope_append_paged_kv], lambda: rope_append_cases()[-1], COUNTED),
    ([decode_attention, decode_attention_lse], lambda: decode_cases()[5], COUNTED),
    ([paged_attention, paged_attention_lse], lambda: attention_cases()[-1], FP8),
    ([add_rms_norm], lambda: norm_cases()[0], NORM),
    ([normed_linear], lambda: normed_linear_cases()[1], NORMED),
    ([chained_linear], lambda: chained_linear_cases()[1], CHAINED),
    ([skinny_linear], lambda: linear_cases()[0], SKINNY),
    ([top_logprobs], lambda: logprob_cases()[1], LOGPROBS),
    ([sample_tokens], lambda: sample_cases()[0], SAMPLE),
]


@pytest.mark.parametrize(
    ("op", "case_of", "changes", "message"),
    [
        pytest.param(op, case_of, *row, id=f"{op.__name__}, {', '.join(row[0])}: {row[1]}")
        for ops, case_of, rows in REFUSED
        for op in ops
        for row in rows
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(op, case_of, changes, message):
    case, names = case_of(), list(inspect.signature(op).parameters)
    before = [value.clone() if torch.is_tensor(value) else value for value in case]
    given = [changes.get(name, lambda value: value)(value) for name, value in zip(names, case, strict=False)]
    with pytest.raises(ValueError, match=message):
        op(*given)
    for now, then in zip(case, before, strict=True):
        if torch.is_tensor(now):
            torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
    op(*case)


def test_scales_lie_where_the_pages_do():
    args = AppendPagedKv(*append_cases()[-1])
    with pytest.raises(ValueError, match=r"value_scale must be \(2,\) torch.float32 on cpu.*on meta"):
        check_fp8_arguments("append_paged_kv", args.pages, args.key_scale, torch.zeros(2, device="meta"))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
def test_older_gpus_have_no_instructions_for_fp8(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    pages: Any = SimpleNamespace(dtype=torch.float8_e4m3fn, is_cuda=True, device="cuda")
    with pytest.raises(ValueError, match=r"need compute capability 8\.9") if capability < (8, 9) else nullcontext():
        check_capability("decode_attention", pages)
    check_capability("decode_attention", torch.zeros(1))


def test_heads_of_two_sizes_are_not_stored_in_fp8():
    key, value, pages, *others = append_cases()[2]
    with pytest.raises(ValueError, match=r"pages of torch.float8_e4m3fn must be \[P, 2, K, S, D\]"):
        append_paged_kv(key, value, pages.to(torch.float8_e4m3fn), *others)


# ---- queries and keys, sums and their norms


@pytest.mark.parametrize("attend", [decode_attention, decode_attention_lse])
@pytest.mark.parametrize("given", ["norms", "query norm", "key norm", "positions", "all"])
def test_decode_norms_and_turns_queries_and_keys_as_huggingface_does(attend, given, seed):
    batch = Batch(*MIXES["decode"], padded=16).filled()
    query, key, value, pages, *others = batch.decode_arguments()
    query_norm, key_norm, epsilon, cos, sin = preparation(query)
    query_norm = query_norm if given in ("norms", "query norm", "all") else None
    key_norm = key_norm if given in ("norms", "key norm", "all") else None
    turned = given in ("positions", "all")
    states = {}
    for name, heads, weight in (("query", query, query_norm), ("key", key, key_norm)):
        if weight is not None:
            norm = Qwen3RMSNorm(heads.shape[-1], epsilon)
            norm.weight = torch.nn.Parameter(weight, requires_grad=False)
            heads = norm(heads)
        states[name] = heads[:, :, None]
    if turned:
        states["query"], states["key"] = apply_rotary_pos_emb(
            states["query"], states["key"], cos[:, None], sin[:, None]
        )
    expected_pages = pages.clone()
    expected = attend(states["query"][:, :, 0], states["key"][:, :, 0], value, expected_pages, *others)
    own = (query_norm, key_norm, epsilon, *((cos, sin) if turned else ()))
    out = attend(query, key, value, pages, *others, -1, 0.0, *own)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(pages, expected_pages, rtol=0, atol=0)


def test_heads_of_odd_size_cannot_be_turned():
    batch = Batch(*MIXES["decode"], head_dim=5, padded=8).filled()
    angles = torch.zeros(4, 5)
    with pytest.raises(ValueError, match=r"heads of size 5 cannot be turned"):
        decode_attention(*batch.decode_arguments(), cos=angles, sin=angles)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_normed_as_huggingface_does_it(dtype, seed):
    states, update = torch.randn(2, 3, 1, 16).to(dtype)
    norm = Qwen3RMSNorm(16, 0.01).to(dtype)
    norm.weight = torch.nn.Parameter(torch.randn(16).to(dtype), requires_grad=False)
    total, normed = add_rms_norm(states, update, norm.weight, 0.01)
    assert torch.equal(total, states + update)
    assert torch.equal(normed, norm(states + update))


@pytest.mark.parametrize("gated", [False, True])
def test_normed_rows_are_multiplied_as_huggingface_does_it(gated, seed):
    states, update = torch.randn(2, 1, 1, 16)
    norm, weight = Qwen3RMSNorm(16, 0.01), torch.randn(12, 16)
    norm.weight = torch.nn.Parameter(torch.randn(16), requires_grad=False)
    total, product = normed_linear(states, update, norm.weight, 0.01, weight, gated)
    expected = norm(states + update) @ weight.T
    if gated:
        expected = torch.nn.functional.silu(expected[..., :6]) * expected[..., 6:]
    assert torch.equal(total, states + update)
    torch.testing.assert_close(product, expected)


@pytest.mark.parametrize("gated", [False, True])
def test_a_matmul_is_added_normed_and_multiplied_as_huggingface_does_it(gated, seed):
    rows, weight, states, _, _, next_weight, _ = chained_linear_cases()[0]
    norm = Qwen3RMSNorm(16, 0.01)
    norm.weight = torch.nn.Parameter(torch.randn(16), requires_grad=False)
    total, product = chained_linear(rows, weight, states, norm.weight, 0.01, next_weight, gated)
    expected_total = states + rows @ weight.T
    expected = norm(expected_total) @ next_weight.T
    if gated:
        expected = torch.nn.functional.silu(expected[..., :3]) * expected[..., 3:]
    torch.testing.assert_close(total, expected_total)
    torch.testing.assert_close(product, expected)


# ---- empty rows


def test_rows_without_queries_are_not_taken_for_decode(seed):
    """As many queries as rows, but not one each."""
    torch.manual_seed(seed)
    pages, query = torch.randn(4, 2, 1, 4, 8), torch.randn(2, 2, 8)
    table = [torch.tensor(column, dtype=torch.int32) for column in ([0, 2, 2], [0, 1, 2], [1, 2], [3, 3])]
    alone = [torch.tensor(column, dtype=torch.int32) for column in ([0, 2], [0, 1], [1], [3])]
    torch.testing.assert_close(
        paged_attention(query, pages, *table, *UNREAD, scale=0.3),
        paged_attention(query, pages, *alone, *UNREAD, scale=0.3),
    )
