"""`visible` of `decode_attention`: each row and kv head reads the pages of its own list; here on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm_ops import decode_attention, decode_attention_lse, invariant_attention
from compiled_llm_ops.attention.decode import check
from support.ops.listed_pages import OPTIONS, SIZES, ListedRows, lengths_of

pytestmark = pytest.mark.core


@pytest.mark.parametrize(("window_left", "soft_cap"), OPTIONS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_kv_head_reads_its_own_pages(sizes, window_left, soft_cap, seed):
    rows = ListedRows(lengths_of(sizes), dtype=torch.float32, seed=seed, **sizes)
    args = rows.arguments(window_left, soft_cap)
    out, lse = decode_attention_lse(*args)
    expected, expected_lse = rows.expected(window_left, soft_cap)
    assert torch.equal(args.pages.view(torch.uint8), rows.written())
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(decode_attention(*rows.arguments(window_left, soft_cap)), out)


def test_values_of_another_size(seed):
    rows = ListedRows([1, 40, 300], dtype=torch.float32, seed=seed)
    args = rows.arguments()
    keys, values = args.pages.unbind(1)
    out = decode_attention(*args._replace(value=args.value[..., :24], pages=torch.cat([keys, values[..., :24]], -1)))
    torch.testing.assert_close(out, rows.expected()[0][..., :24], rtol=1e-5, atol=1e-5)


def test_a_list_of_all_pages_changes_nothing(seed):
    rows = ListedRows([1, 16, 17, 100], listed=9, dtype=torch.float32, seed=seed)
    rows.lists = [[list(range(9))] * 2 for _ in rows.lengths]
    rows._lay(64)
    args = rows.arguments()
    out, lse = decode_attention_lse(*args)
    for actual, expected in zip((out, lse), decode_attention_lse(*args._replace(visible=None)), strict=True):
        torch.testing.assert_close(actual, expected)


def test_a_stale_list_is_seen(seed):
    """A list of another row changes what comes out."""
    rows = ListedRows([300, 300], dtype=torch.float32, seed=seed)
    rows.lists = [[[0, 1, 2]] * 2, [[3, 4, 5]] * 2]
    rows._lay(64)
    args = rows.arguments()
    args.pages.nan_to_num_(1.0)
    stale = args.visible
    assert stale is not None
    expected = rows.expected()[0]
    torch.testing.assert_close(decode_attention(*args), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(decode_attention(*args._replace(visible=stale.flip(0))), expected, rtol=1e-2, atol=1e-2)


def test_compiled_whole_and_once_for_all_shapes(seed):
    def step(query: Tensor, others: tuple[Any, ...], visible: Tensor) -> Tensor:
        return decode_attention(query * 2, *others, visible=visible + 0) + 1

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for number, (lengths, listed) in enumerate((([9, 6, 40, 30, 2], 7), ([50, 110], 3), ([30, 200, 2, 70], 7))):
        rows = ListedRows(lengths, listed=listed, dtype=torch.float32, seed=seed + number)
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            found = [
                function(args.query, tuple(args[1:8]), args.visible)
                for function, args in ((compiled, rows.arguments()), (step, rows.arguments()))
            ]
        torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lists: lists.long(), "visible must be int32; got torch.int64"),
        (lambda lists: lists[:, :1], r"visible must be \[2, 2, n\] on cpu.*got \(2, 1, 3\)"),
        (lambda lists: lists[0], r"visible must be \[2, 2, n\]"),
        (lambda lists: lists.repeat(1, 1, 9), r"lists no longer than the \d+ pages; got \(2, 2, 27\)"),
    ],
)
def test_lists_that_do_not_fit_are_refused_before_anything_is_written(change, message, seed):
    args = ListedRows([5, 40], dtype=torch.float32, seed=seed).arguments()
    before = args.pages.clone()
    with pytest.raises(ValueError, match=message):
        decode_attention(*args._replace(visible=change(args.visible)))
    torch.testing.assert_close(args.pages, before, rtol=0, atol=0, equal_nan=True)


def test_lists_lie_where_the_pages_do(seed):
    args = ListedRows([5, 40], dtype=torch.float32, seed=seed).arguments()
    with pytest.raises(ValueError, match=r"visible must be \[2, 2, n\] on cpu.*on meta"):
        check("decode_attention", args._replace(visible=torch.zeros(2, 2, 1, dtype=torch.int32, device="meta")))


def test_batch_invariant_attention_takes_no_lists(seed):
    args = ListedRows([5, 40], dtype=torch.float32, seed=seed).arguments()
    with pytest.raises(ValueError, match="invariant_attention: visible must be None; lists of pages take decode"):
        invariant_attention(*args)
