"""`visible` of `decode_attention` on a GPU, against dense attention, and replayed with other rows and lists."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from compiled_llm_ops import decode_attention, decode_attention_lse
from compiled_llm_ops.kernels.pdl import has_pdl
from support.gpu import captured
from support.ops.listed_pages import OPTIONS, SIZES, ListedRows, lengths_of

pytestmark = pytest.mark.gpu


def rows_of(lengths: list[int], **sizes: Any) -> ListedRows:
    return ListedRows(lengths, **{"dtype": torch.bfloat16, "device": "cuda", **sizes})


@pytest.mark.parametrize(("window_left", "soft_cap"), OPTIONS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_each_kv_head_reads_its_own_pages(dtype, sizes, window_left, soft_cap, seed):
    rows = rows_of(lengths_of(sizes), dtype=dtype, seed=seed, **sizes)
    args = rows.arguments(window_left, soft_cap)
    out, lse = decode_attention_lse(*args)
    expected, expected_lse = rows.expected(window_left, soft_cap)
    assert torch.equal(args.pages.view(torch.uint8), rows.written())
    tolerance = 4e-3 if dtype is torch.float16 else 2e-2
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 16])
def test_long_rows_and_lists(group, head_dim, seed):
    rows = rows_of([4000, 1, 2500, 700], group=group, head_dim=head_dim, listed=64, seed=seed)
    expected, expected_lse = rows.expected()
    out, lse = decode_attention_lse(*rows.arguments())
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("new_tokens", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_captured_launch_is_replayed_with_any_lengths_and_lists(overlap, new_tokens, seed):
    if overlap and not has_pdl(torch.device("cuda")):
        pytest.skip("needs compute capability 9.0")
    rows = rows_of([4000, 2000, 700, 2], head_dim=128, listed=40, new_tokens=new_tokens, seed=seed)
    args = rows.arguments()._replace(overlap=overlap)
    args.pages.nan_to_num_(0.5)
    visible = args.visible
    assert visible is not None
    graph, out = captured(lambda: decode_attention(*args))
    for lengths in ([2, 2, 2, 2], [33, 17, 700, 2], [4000, 1999, 16, 2], [17, 2000, 3, 2], [3999, 32, 699, 2]):
        args.lengths.copy_(torch.tensor(lengths))
        visible.copy_(torch.rand(4, 2, 260).argsort(-1)[..., :40] - 5)
        before = args.pages.clone()
        graph.replay()
        assert torch.equal(out, decode_attention(*args._replace(pages=before))), lengths
        assert torch.equal(args.pages, before), lengths


def test_replays_with_other_tables_lists_and_lengths_equal_launches(seed, whole):
    """Rows change their places in the table, and pages, lengths and lists are drawn for each replay."""
    rows = rows_of([2000] * 6, head_dim=128, listed=40, seed=seed)
    args = rows.arguments()
    args.pages.nan_to_num_(0.5)
    visible = args.visible
    assert visible is not None
    graph, out = captured(lambda: decode_attention(*args))
    draw, starts = random.Random(seed), args.starts.clone()
    numbers = args.indices[: 6 * 125].clone()
    for replay in range(1000 if whole else 40):
        args.lengths.copy_(torch.tensor([draw.choice([1, 16, 17, draw.randint(1, 2000)]) for _ in range(6)]))
        args.starts.copy_(starts[torch.randperm(6, device="cuda")])
        args.indices[: len(numbers)].copy_(numbers[torch.randperm(len(numbers), device="cuda")])
        visible.copy_(torch.rand(6, 2, 130, device="cuda").argsort(-1)[..., :40] - 3)
        before = args.pages.clone()
        graph.replay()
        assert torch.equal(out, decode_attention(*args._replace(pages=before))), replay
        assert torch.equal(args.pages, before), replay
