"""Batch-invariant attention on the CPU: against dense attention, and the same bits however rows are batched and cut."""

from __future__ import annotations

import random

import pytest
import torch

from compiled_llm_ops import decode_attention_lse, invariant_attention, invariant_attention_lse
from support.ops.fp8_pages import KINDS, Fp8Batch
from support.ops.invariant_rows import InvariantRows, Span
from support.ops.op_cases import MIXES, Batch, check_outputs, preparation

pytestmark = pytest.mark.core

LENGTHS = [1, 3, 17, 63, 64, 65, 130, 200]
"""Around the edges of blocks of 64 keys and pages of 4."""

OPTIONS = [{}, {"window_left": 5}, {"window_left": 70}, {"logits_soft_cap": 1.5, "window_left": 128}]


@pytest.mark.drawn(most=6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_row_has_the_same_bits_in_any_batch(options, dtype, seed):
    InvariantRows(LENGTHS, dtype=dtype, **options).check_all_ways(seed)


@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize(("head_dim", "stored"), [(24, 64), (64, None)])
def test_heads_of_any_number_and_size(group, head_dim, stored, seed):
    InvariantRows(LENGTHS, group=group, head_dim=head_dim, stored=stored).check_all_ways(seed)


def test_a_row_decodes_with_the_same_bits_among_up_to_64(seed):
    rng = random.Random(seed)
    rows = InvariantRows([rng.randint(1, 150) for _ in range(64)])
    alone = rows.alone()
    for count in (1, 2, 5, 16, 33, 64):
        spans = [Span(row, rows.lengths[row] - 1, rows.lengths[row]) for row in rng.sample(range(64), count)]
        rows.check(spans, rows.decode(spans), alone)


@pytest.mark.parametrize("threads", [1, 2])
def test_any_number_of_threads_will_do(threads, seed):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        InvariantRows([300, 5, 129], kv_heads=4, group=4, head_dim=64).check_all_ways(seed, batches=2)
    finally:
        torch.set_num_threads(before)


def test_pages_before_all_windows_may_be_free(seed):
    """Those hold NaN from then on."""
    rows = InvariantRows([200], window_left=70)
    (whole,) = rows.alone()
    for number in rows.own[0][: (150 - 70) // rows.page_size]:
        rows.pages[number] = torch.nan
    span = Span(0, 150, 200)
    rows.check([span], rows.prefill([span]), [whole])
    span = Span(0, 199, 200)
    rows.check([span], rows.decode([span]), [whole])


@pytest.mark.parametrize("window_left", [-1, 3])
@pytest.mark.parametrize("mix", ["decode", "several new tokens"])
def test_queries_and_keys_are_normed_and_turned_as_in_decode_attention(mix, window_left, seed):
    batch = Batch(*MIXES[mix], padded=16, seed=seed).filled()
    arguments, how = batch.decode_arguments(), (window_left, 1.5, *preparation(batch.query))
    expected, expected_lse = decode_attention_lse(*arguments, *how)
    written = arguments[3].clone()
    arguments = batch.decode_arguments()
    out, lse = invariant_attention_lse(*arguments, *how)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert torch.equal(arguments[3], written)
    check_outputs(batch, expected, invariant_attention(*batch.decode_arguments(), *how), out, lse)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window_left", "soft_cap"), [(-1, 0.0), (3, 1.5)])
def test_pages_may_be_of_fp8(window_left, soft_cap, kind, seed):
    batch = Fp8Batch(*MIXES["several new tokens"], kind=kind, seed=seed).filled()
    given = batch.scales.given
    out, lse = invariant_attention_lse(*batch.decode_arguments(), window_left, soft_cap, **given)
    torch.testing.assert_close(out, batch.read().expected(batch.scale, window_left, soft_cap), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse, batch.expected_lse(batch.scale, window_left, soft_cap), rtol=1e-4, atol=1e-4)
    assert given["saturated"].tolist() == [batch.clamped(3)]


def test_what_does_not_fit_is_refused_by_the_name_of_the_op(seed):
    query, *others = Batch(*MIXES["decode"]).filled().decode_arguments()
    with pytest.raises(ValueError, match=r"^invariant_attention: key and value must be \(4, 2, 7\)"):
        invariant_attention(query[..., :7], *others)
