"""Norm, rotary embedding and the way into the pages as one op, on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from compiled_llm_ops import append_paged_kv, rope_append_paged_kv
from support.ops.fp8_pages import KINDS, check_codes, scales_of, stored_pages
from support.ops.packed_tokens import GIVEN, Sizes, check, expected, packed_tokens

pytestmark = pytest.mark.core

SPANS = [(0, 1), (0, 3), (0, 4), (3, 9), (7, 8), (0, 17), (4, 4)]
"""Whole rows and parts of rows, to and from ends of pages, and a row without new tokens."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("prepared", GIVEN)
def test_queries_are_returned_and_keys_and_values_lie_in_their_slots(prepared, dtype, seed):
    args = packed_tokens(SPANS, Sizes(), prepared, dtype)
    assert not args.query.is_contiguous()
    pages = args.pages.clone()
    check(args, rope_append_paged_kv(*args._replace(pages=pages)), pages, TOLERANCE[dtype])


@pytest.mark.parametrize(
    "sizes", [Sizes(stored=32), Sizes(3, 3, 6, 8), Sizes(8, 1), Sizes(page_size=1), Sizes(page_size=64)], ids=str
)
def test_heads_and_pages_of_any_size(sizes, seed):
    args = packed_tokens(SPANS, sizes, "all", torch.float32)
    pages = args.pages.clone()
    check(args, rope_append_paged_kv(*args._replace(pages=pages)), pages, 1e-5)


def test_odd_heads_may_be_normed(seed):
    args = packed_tokens(SPANS, Sizes(head_dim=5, stored=8), "norms", torch.float32)
    pages = args.pages.clone()
    check(args, rope_append_paged_kv(*args._replace(pages=pages)), pages, 1e-5)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5),
    page_size=st.integers(1, 9),
    prepared=st.sampled_from(GIVEN),
    seed=st.integers(0, 1000),
)
def test_any_batch(rows, page_size, prepared, seed):
    torch.manual_seed(seed)
    args = packed_tokens([(min(pair), max(pair)) for pair in rows], Sizes(page_size=page_size), prepared, torch.float32)
    pages = args.pages.clone()
    check(args, rope_append_paged_kv(*args._replace(pages=pages)), pages, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("prepared", GIVEN)
def test_it_rounds_as_huggingface_and_append_do(prepared, dtype, seed):
    """To the bit, so that on a CPU the tokens are those that they were."""
    args = packed_tokens(SPANS, Sizes(stored=32), prepared, dtype)
    states = {"query": args.query, "key": args.key}
    for name, weight in (("query", args.query_norm), ("key", args.key_norm)):
        if weight is not None:
            norm = Qwen3RMSNorm(16, args.epsilon)
            norm.weight = torch.nn.Parameter(weight, requires_grad=False)
            states[name] = norm(states[name])
    if args.cos is not None and args.sin is not None:
        both = [heads[None].transpose(1, 2) for heads in states.values()]
        turned = apply_rotary_pos_emb(*both, args.cos[None], args.sin[None])
        states = {name: heads.transpose(1, 2)[0] for name, heads in zip(states, turned, strict=True)}
    pages, expected = args.pages.clone(), args.pages.clone()
    places = (args.token_rows, args.token_positions, args.indptr, args.indices)
    append_paged_kv(states["key"], args.value, expected, *places, torch.empty(0, dtype=torch.int32))
    out = rope_append_paged_kv(*args._replace(pages=pages))
    torch.testing.assert_close(out, states["query"], rtol=0, atol=0)
    torch.testing.assert_close(pages, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("prepared", ["nothing", "all"])
def test_inputs_may_have_any_strides_and_results_share_no_memory_with_them(prepared, seed):
    def strided(states: Tensor) -> Tensor:
        return states.transpose(0, 2).contiguous().transpose(0, 2)

    args = packed_tokens(SPANS, Sizes(), prepared, torch.float32)
    pages, others = args.pages.clone(), args.pages.clone()
    out = rope_append_paged_kv(*args._replace(pages=pages))
    kept = out.clone()
    args.query.fill_(torch.nan)
    assert torch.equal(out, kept)
    args.query.copy_(torch.randn(args.query.shape))
    expected = rope_append_paged_kv(*args._replace(pages=args.pages.clone()))
    states = {name: strided(getattr(args, name)) for name in ("query", "key", "value")}
    torch.testing.assert_close(rope_append_paged_kv(*args._replace(pages=others, **states)), expected)
    torch.testing.assert_close(others, pages, equal_nan=True)


@pytest.mark.parametrize("prepared", ["nothing", "all"])
def test_of_no_tokens_nothing_is_written(prepared):
    args = packed_tokens([(4, 4)], Sizes(), prepared, torch.float32)
    pages = args.pages.clone()
    assert rope_append_paged_kv(*args._replace(pages=pages)).shape == (0, 4, 16)
    torch.testing.assert_close(pages, args.pages, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prepared", ["nothing", "all"])
def test_it_rounds_to_fp8_last(prepared, kind, seed):
    """Up to what the order of float32 arithmetic changes, which is seldom another number of fp8."""
    args, scales = packed_tokens(SPANS, Sizes(stored=32), prepared, torch.float32), scales_of(kind, 2)
    dense = expected(args)
    codes = stored_pages(dense.pages, scales).pages
    codes.view(torch.uint8)[..., 16:] = 0
    pages, fp8 = args.pages.to(torch.float8_e4m3fn), scales.given
    out = rope_append_paged_kv(*args._replace(pages=pages, **fp8))
    torch.testing.assert_close(out, dense.query, rtol=1e-5, atol=1e-5)
    check_codes(pages, codes, exact=prepared == "nothing")
    parts = zip(dense.pages.unbind(1), scales, strict=True)
    clamped = [part.abs() > 448 * (1 if scale is None else scale[:, None, None]) for part, scale in parts]
    assert fp8["saturated"].tolist() == [sum(int(part.sum()) for part in clamped)]


def test_it_stores_in_the_type_of_the_pages(seed):
    args = packed_tokens(SPANS, Sizes(), "all", torch.float32)
    exact, rounded = args.pages.clone(), args.pages.bfloat16()
    rope_append_paged_kv(*args._replace(pages=exact))
    rope_append_paged_kv(*args._replace(pages=rounded))
    torch.testing.assert_close(rounded, exact.bfloat16(), rtol=0, atol=0, equal_nan=True)
