"""Norm, rotary embedding and the way into the pages as one kernel, on a GPU, against the separate way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compiled_llm.compat.torch.inductor import make_kernels_wait_first
from compiled_llm_ops import append_paged_kv, rope_append_paged_kv
from compiled_llm_ops.contracts import RopeAppendPagedKv
from compiled_llm_ops.kernels.attention.rope_append import RopeAppendTiling, rope_append
from support.gpu import by_dtype, captured, close, needs_cuda, seeded
from support.ops.packed_tokens import GIVEN, Sizes, check, packed_tokens

pytestmark = [pytest.mark.gpu, needs_cuda]

SPANS = [(0, 1), (0, 16), (15, 33), (100, 101), (0, 333), (7, 7), (1000, 1024)]
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3}
QWEN3 = Sizes(16, 8, 128, 128, 16)
SIZES = [QWEN3, Sizes(32, 8, 128, 128, 16), Sizes(14, 2, 64, 64, 32), Sizes(4, 1, 256, 256, 16)]
SIZES += [Sizes(8, 8, 96, 128, 1), Sizes(71, 1, 64, 128, 16), Sizes(6, 3, 80, 128, 7)]


def tokens(spans: list[tuple[int, int]], sizes: Sizes, given: str, dtype: torch.dtype, seed: int) -> RopeAppendPagedKv:
    torch.manual_seed(seed)
    return packed_tokens(spans, sizes, given, dtype, "cuda")


def separately(args: RopeAppendPagedKv, pages: Tensor) -> Tensor:
    """As prefill does it without the op: functions in the model's type, and the backend's kernel."""

    def prepared(states: Tensor, norm: Tensor | None) -> Tensor:
        states = states.float()
        if norm is not None:
            states = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + args.epsilon) * norm.float()
        if args.cos is not None and args.sin is not None:
            first, second = states.chunk(2, -1)
            mates = torch.cat([-second, first], -1)
            states = states * args.cos.float()[:, None] + mates * args.sin.float()[:, None]
        return states.to(args.query.dtype)

    table = (args.token_rows, args.token_positions, args.indptr, args.indices)
    ends = torch.ones(len(args.indptr) - 1, dtype=torch.int32, device="cuda")
    append_paged_kv(prepared(args.key, args.key_norm), args.value, pages, *table, ends)
    return prepared(args.query, args.query_norm)


@seeded
@by_dtype
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_queries_and_pages_are_those_of_the_separate_way(
    sizes: Sizes, given: str, dtype: torch.dtype, seed: int
) -> None:
    args = tokens(SPANS, sizes, given, dtype, seed)
    pages, expected_pages = args.pages.clone(), args.pages.clone()
    expected = separately(args, expected_pages)
    for overlap in (False, True):
        pages.copy_(args.pages)
        out = rope_append_paged_kv(*args._replace(pages=pages, overlap=overlap))
        close(out, expected, TOLERANCE[dtype], "queries")
        torch.testing.assert_close(pages, expected_pages, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)
        torch.testing.assert_close(pages[:, 1], expected_pages[:, 1], rtol=0, atol=0, equal_nan=True)


@seeded
@by_dtype
def test_queries_and_pages_are_those_of_a_dense_computation(dtype: torch.dtype, seed: int) -> None:
    args = tokens(SPANS[:4], QWEN3, "all", dtype, seed)
    pages = args.pages.clone()
    check(args, rope_append_paged_kv(*args._replace(pages=pages)), pages, TOLERANCE[dtype])


@seeded
@pytest.mark.parametrize("numbers", [512, 1024, 2048, 4096], ids="numbers={}".format)
@pytest.mark.parametrize("warps", [2, 4, 8], ids="warps={}".format)
def test_any_tiling_gives_the_same(numbers: int, warps: int, seed: int) -> None:
    args = tokens(SPANS, QWEN3, "all", torch.bfloat16, seed)
    pages, expected_pages = args.pages.clone(), args.pages.clone()
    expected = rope_append_paged_kv(*args._replace(pages=expected_pages))
    out = rope_append(args._replace(pages=pages), pdl=False, tiling=RopeAppendTiling(numbers, warps))
    close(out, expected, 2e-2, "queries")
    torch.testing.assert_close(pages, expected_pages, rtol=2e-2, atol=2e-2, equal_nan=True)


@seeded
def test_of_no_tokens_nothing_is_written(seed: int) -> None:
    args = tokens([(7, 7)], QWEN3, "all", torch.bfloat16, seed)
    pages = args.pages.clone()
    assert rope_append_paged_kv(*args._replace(pages=pages)).shape == (0, 16, 128)
    torch.testing.assert_close(pages, args.pages, rtol=0, atol=0, equal_nan=True)


@seeded
def test_a_captured_launch_waits_for_what_is_in_front_of_it(seed: int) -> None:
    """Chains in which each launch reads what a kernel has made of the one before, and which let go early."""
    args = tokens([(0, 512)], QWEN3, "all", torch.bfloat16, seed)

    def step(states: Tensor) -> Tensor:
        numbers = states.float()
        return (numbers * torch.rsqrt(numbers.pow(2).mean((1, 2), keepdim=True))).to(states.dtype)

    def chain(query: Tensor, pages: Tensor, overlap: bool) -> Tensor:
        for _ in range(12):
            given = args._replace(query=query, key=query[:, :8], value=query[:, 8:], pages=pages, overlap=overlap)
            query = compiled_step(rope_append_paged_kv(*given))
        return query

    make_kernels_wait_first()
    torch._dynamo.reset()
    compiled_step = torch.compile(step, options={"triton.enable_pdl": torch.cuda.get_device_capability() >= (9, 0)})
    query, pages, expected_pages = args.query.contiguous(), args.pages.clone(), args.pages.clone()
    expected = chain(query, expected_pages, False)
    graph, out = captured(lambda: chain(query, pages, True))
    for _ in range(20):
        pages.copy_(args.pages)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
        torch.testing.assert_close(pages, expected_pages, rtol=0, atol=0, equal_nan=True)
