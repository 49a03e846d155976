"""The ops of latent attention on the CPU against dense attention in float32, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from compiled_llm_ops import append_latent, latent_attention, latent_attention_lse, latent_decode, latent_decode_lse
from compiled_llm_ops.attention.latent import plain
from support.ops.interpreting import needs_triton
from support.ops.latent_rows import MIXES, LatentRows, check_any_batch

pytestmark = pytest.mark.core

TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


def check(rows: LatentRows) -> None:
    """All ops on these rows; decode if each row has one new token."""
    written = rows.written()
    if -1 not in rows.places[1]:
        append = rows.append_arguments()
        append_latent(*append)
        torch.testing.assert_close(append.pages, written, rtol=0, atol=0, equal_nan=True)
    _compare(rows, latent_attention(*rows.arguments()), *latent_attention_lse(*rows.arguments()))
    if set(rows.queries) == {1}:
        args, other = rows.decode_arguments(), rows.decode_arguments()
        _compare(rows, latent_decode(*args), *latent_decode_lse(*other))
        for pages in (args.pages, other.pages):
            torch.testing.assert_close(pages, written, rtol=0, atol=0, equal_nan=True)


def _compare(rows: LatentRows, out: torch.Tensor, with_lse: torch.Tensor, lse: torch.Tensor) -> None:
    expected, expected_lse = rows.expected()
    assert torch.equal(out, with_lse)
    assert out.is_contiguous()
    assert out.dtype == rows.query.dtype
    torch.testing.assert_close(out.float(), expected, **TOLERANCE[out.dtype])
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("mix", MIXES)
def test_latent_attention_equals_dense_attention(mix, dtype, seed):
    check(LatentRows(*MIXES[mix], dtype=dtype, seed=seed))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "rank", "size"), [(4, 32, 16), (20, 5, 3)])
def test_invariant_bits_depend_on_a_rows_tokens_alone(heads, rank, size, dtype, seed):
    lengths = [70, 3, 1, 64, 129]
    rows = LatentRows(lengths, lengths, heads=heads, rank=rank, size=size, dtype=dtype, seed=seed)
    ops = (lambda args: latent_attention_lse(*args)), (lambda args: latent_decode_lse(*args))
    check_any_batch(rows, *ops, seed)


def test_invariant_is_for_all_tokens():
    args = LatentRows([9], [2], chosen=5).arguments()._replace(invariant=True)
    with pytest.raises(ValueError, match=r"^latent_attention: invariant must be False with chosen"):
        latent_attention(*args)


@pytest.mark.parametrize(("heads", "rank", "size"), [(1, 8, 2), (20, 5, 3), (7, 64, 8)])
def test_sizes_may_be_any(heads, rank, size, seed):
    check(LatentRows([9, 4, 1], heads=heads, rank=rank, size=size, seed=seed))


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    rows=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=5),
    page_size=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
def test_any_rows_equal_dense_attention(rows, page_size, seed):
    if any(new for _, new in rows):
        check(LatentRows(*zip(*rows, strict=True), page_size=page_size, seed=seed))
    check(LatentRows([length for length, _ in rows], page_size=page_size, seed=seed))


@pytest.mark.parametrize("chosen", [1, 4, 9])
@pytest.mark.parametrize("mix", MIXES)
def test_chosen_tokens(mix, chosen, seed):
    """What no query of a row reads is NaN; some queries see none of those that are listed."""
    check(LatentRows(*MIXES[mix], chosen=chosen, seed=seed))


def test_a_stale_list_is_seen(seed):
    rows = LatentRows([30, 30], chosen=6, seed=seed)
    rows.chosen = [[0, 3, 6, 9, 12, 15], [1, 4, 7, 10, 13, 29]]
    args = rows.decode_arguments()
    args = args._replace(pages=rows.written().nan_to_num(0.5))
    for row in range(2):
        for at, states in enumerate(rows.states[row]):
            args.pages[rows._page(row, at), at % 4] = states
    expected, _ = rows.expected()
    torch.testing.assert_close(latent_decode(*args), expected, rtol=1e-4, atol=1e-5)
    assert args.chosen is not None
    out = latent_decode(*args._replace(chosen=args.chosen.flip(0)))
    assert not torch.allclose(out, expected, rtol=1e-2, atol=1e-2)


def test_long_prompts_are_computed_in_parts(seed, monkeypatch):
    monkeypatch.setattr(plain, "LOGITS_AT_ONCE", 100)
    check(LatentRows([40, 3], [40, 1], seed=seed))
    check(LatentRows([40, 3], [40, 1], chosen=7, seed=seed))


def test_no_token_gives_nothing():
    rows = LatentRows([3])
    args = rows.arguments()
    none = [tensor[:0] for tensor in (args.query_latent, args.query_rope)]
    out, lse = latent_attention_lse(*none, args.pages, args.token_rows[:0], args.token_positions[:0], *args[5:])
    assert (out.shape, lse.shape) == ((0, 4, 32), (0, 4))


def test_another_rows_page_and_a_row_that_lags_show(seed):
    """The faults that a caller could make: the oracle is not blind to them."""
    rows = LatentRows([9, 9], seed=seed)
    expected, _ = rows.expected()
    args = rows.decode_arguments()
    wrong = args.indices.clone()
    wrong[0] = wrong[3]
    for change in ({"indices": wrong}, {"lengths": torch.tensor([8, 9], dtype=torch.int32)}):
        args = rows.decode_arguments()._replace(**change)
        args.pages.nan_to_num_(0.0)
        assert not torch.allclose(latent_decode(*args)[0], expected[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        (latent_decode, {"latent": torch.zeros(2, 31)}, r"latent and rope must be \[2, 32\] and \[2, 16\]"),
        (latent_decode, {"rope": torch.zeros(2, 16).half()}, r"torch\.float16"),
        (latent_decode, {"starts": torch.zeros(1, dtype=torch.int32)}, "one new token a row"),
        (latent_decode, {"lengths": torch.ones(2)}, "lengths must be int32"),
        (latent_decode, {"pages": torch.zeros(3, 4, 47)}, r"must be \[P, S, 32 \+ 16\].* got \(3, 4, 47\)"),
        (latent_attention, {"query_rope": torch.zeros(2, 4, 15)}, r"must be \[P, S, 32 \+ 15\]"),
        (latent_attention, {"query_rope": torch.zeros(2, 16)}, r"query_rope \[T, H, E\]"),
        (latent_attention, {"query_rope": torch.zeros(2, 3, 16)}, r"\(2, 3, 16\)"),
        (latent_attention, {"token_rows": torch.zeros(1, dtype=torch.int32)}, "one entry a token"),
        (latent_attention, {"indptr": torch.zeros(3)}, "indptr must be int32"),
        (latent_attention, {"chosen": torch.zeros(2, 1)}, "chosen must be int32"),
        (latent_attention, {"chosen": torch.zeros(1, 3, dtype=torch.int32)}, r"chosen must be \[2, n\] on cpu"),
        (latent_decode, {"chosen": torch.zeros(2, dtype=torch.int32)}, r"chosen must be \[2, n\] on cpu"),
        (latent_decode, {"chosen": torch.zeros(2, 0, dtype=torch.int32)}, r"n from 1 to the 36 tokens"),
        (latent_decode, {"chosen": torch.zeros(2, 37, dtype=torch.int32)}, r"36 tokens.*got \(2, 37\)"),
        (append_latent, {"latent": torch.zeros(2, 1, 32)}, r"latent must be \[T, R\]"),
        (append_latent, {"rope": torch.zeros(2, 8)}, r"must be \[P, S, 32 \+ 8\]"),
        (append_latent, {"token_positions": torch.zeros(3, dtype=torch.int32)}, "one entry a token"),
        (append_latent, {"indices": torch.zeros(3)}, "indices must be int32"),
    ],
)
def test_wrong_arguments_raise_before_anything_is_written(op: Any, change: dict[str, Any], message: str) -> None:
    rows = LatentRows([3, 5])
    given_args = {
        latent_decode: rows.decode_arguments,
        latent_attention: rows.arguments,
        append_latent: rows.append_arguments,
    }[op]()
    args = given_args._replace(**change)
    before = args.pages.clone()
    with pytest.raises(ValueError, match=message):
        op(*args)
    assert torch.equal(args.pages.nan_to_num(7.0), before.nan_to_num(7.0))


@needs_triton
def test_sizes_without_a_kernel_are_named():
    from compiled_llm_ops.kernels.latent.step import check_kernel

    for sizes, message in (
        ({"rank": 24}, "no kernel for R=24; there are some for powers of two, 16 to 512"),
        ({"rank": 1024}, "no kernel for R=1024"),
        ({"size": 8}, "no kernel for E=8; there are some for powers of two, 16 to 128"),
        ({"dtype": torch.float32}, r"no kernel for torch\.float32"),
    ):
        rows = LatentRows([3], **{"dtype": torch.float16, **sizes})
        with pytest.raises(ValueError, match=message):
            check_kernel("latent_decode", rows.decode_arguments())
    args = LatentRows([3], dtype=torch.float16).decode_arguments()
    with pytest.raises(ValueError, match="pages must be contiguous"):
        check_kernel("latent_decode", args._replace(pages=args.pages.transpose(0, 1)))


@pytest.mark.whole
def test_a_function_of_the_ops_compiles_whole_and_once_for_all_shapes(seed):
    """By Inductor, which writes pages in place; it makes whole models of them with --whole."""

    def layer(append, packed, newest):
        latent, rope, pages, *places = append
        append_latent(latent * 1.0, rope, pages, *places)
        out = latent_attention(*packed[:2], pages, *packed[3:])
        own, lse = latent_decode_lse(*newest)
        return out + 1, own, lse * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    no_guards_on_equal_sizes = torch.fx.experimental._config.patch(use_duck_shape=False)
    with torch._dynamo.config.patch(error_on_recompile=True), no_guards_on_equal_sizes:
        for number, (lengths, queries) in enumerate((([9, 6, 4, 3, 2], [3, 6, 2, 2, 1]), ([5, 11], [2, 4]))):
            rows = LatentRows(lengths, queries, chosen=5 - number, seed=seed + number)
            decode = LatentRows([7, 1, 3, 12][number:], chosen=4 + number, seed=seed)
            results = [
                function(tuple(rows.append_arguments()), tuple(rows.arguments()), tuple(decode.decode_arguments()))
                for function in (compiled, layer)
            ]
            torch.testing.assert_close(*results)


def test_a_row_that_is_expanded_to_its_tokens_is_refused() -> None:
    """Kernels read the row of each token next to that of the one before; one that is expanded has no step between."""
    latent, rope, pages = torch.zeros(4, 16), torch.zeros(4, 8), torch.zeros(2, 4, 24)
    rows, positions = torch.zeros(1, dtype=torch.int32).expand(4), torch.arange(4, dtype=torch.int32)
    table = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"append_latent: token_rows must be contiguous; got strides \(0,\)"):
        append_latent(latent, rope, pages, rows, positions, *table)
    append_latent(latent, rope, pages, rows.contiguous(), positions, *table)
