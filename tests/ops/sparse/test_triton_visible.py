"""Lists of pages in the decode kernel: under Triton's interpreter on the CPU, and compiled without a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from compiled_llm_ops.contracts.devices import CudaDevice
from compiled_llm_ops.kernels.attention.decode_tiling import MAX_ROWS, MAX_SHARES, AttentionTiling, choose_listed_tiling
from support.ops.compiling import compiled, in_order, resources_of
from support.ops.interpreting import interpreted, needs_triton, not_interpreted
from support.ops.listed_pages import OPTIONS, SIZES, ListedRows, lengths_of

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]


def check(rows: ListedRows, spare: int | None, window_left: int = -1, soft_cap: float = 0.0) -> None:
    """Decode with so many programs besides one for each row, or one a row."""
    from compiled_llm_ops.kernels.attention.decode import decode

    tile = 1 if spare is None else len(rows.lengths)
    args = rows.arguments(window_left, soft_cap)
    block = 4096 // args.pages.shape[4]
    tiling = AttentionTiling(tile, tile + (spare or 0), 1, 1, block, stages=3, warps=4)
    lse = torch.full(args.query.shape[:2], torch.nan)
    out = decode(args, lse, tiling=tiling, pdl=False)
    expected, expected_lse = rows.expected(window_left, soft_cap)
    assert torch.equal(args.pages.view(torch.uint8), rows.written())
    torch.testing.assert_close(out.float(), expected, rtol=3e-3, atol=3e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.drawn(most=6)
@interpreted
@pytest.mark.parametrize("spare", [None, 6], ids="spare={}".format)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_lists_of_any_size(sizes, spare, seed):
    check(ListedRows(lengths_of(sizes), seed=seed, **sizes), spare)


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize(("window_left", "soft_cap"), OPTIONS[1:])
@pytest.mark.parametrize("new_tokens", [1, 3])
def test_windows_and_caps_apply_on_top(new_tokens, window_left, soft_cap, seed):
    """Parts in which a query sees no key are merged with others."""
    lengths = [5, 64, 65, 300, 513]
    check(ListedRows(lengths, listed=8, new_tokens=new_tokens, seed=seed), 12, window_left, soft_cap)


@interpreted
def test_lists_without_pages_and_programs_without_keys(seed):
    rows = ListedRows([1, 700, 33], listed=20, seed=seed)
    rows.lists = [[[-1] * 20, [-1] * 19 + [0]] for _ in rows.lengths]
    rows._lay(64)
    check(rows, 30)


def test_as_many_programs_as_listed_keys_need(seed, monkeypatch):
    """Not as all keys of the table would."""
    from compiled_llm_ops.attention import decode

    found: list[int] = []

    def noted(*numbers: int) -> Any:
        found.append(numbers[4])
        raise InterruptedError

    monkeypatch.setattr("compiled_llm_ops.kernels.attention.decode_tiling.choose_listed_tiling", noted)
    monkeypatch.setattr(decode, "device_of", lambda _: CudaDevice(132, 228 * 1024))
    for new_tokens in (1, 2):
        args = ListedRows([5, 1000], listed=6, new_tokens=new_tokens, seed=seed).arguments()
        with pytest.raises(InterruptedError):
            decode.prepare_on_cuda(args, False)
    assert found == [7 * 16, 8 * 16]


@pytest.mark.whole
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("group", "head_dim", "page_size", "new_tokens"),
    [
        pytest.param(2, 128, 16, 1, marks=pytest.mark.whole),
        (8, 128, 64, 1),
        pytest.param(4, 64, 16, 1, marks=pytest.mark.whole),
        (2, 128, 16, 2),
    ],
)
def test_nothing_but_the_page_table_is_touched_before_waiting(group, head_dim, page_size, new_tokens, tmp_path):
    """Lists may be written by the kernel in front."""
    from compiled_llm_ops.kernels.attention import decode as module

    padded, kernel = 1 << (group * new_tokens - 1).bit_length(), module._decode_paged_attention
    tiling = choose_listed_tiling(8, 8, group * new_tokens, head_dim, 2048, 132, 228 * 1024)
    constants = {
        "ROWS": MAX_ROWS, "MOST": MAX_SHARES, "NEW": new_tokens, "GQA": group, "PADDED": padded, "HEAD": head_dim,
        "DIM": head_dim, "PAGE": page_size, "BLOCK": tiling.block,
        "CHUNK": max(1, module.MERGED_VALUES // (padded * head_dim)), "STAGES": tiling.stages, "CAPPED": False,
        "SHARE_EQUAL": tiling.share_equal, "PDL": True, "lse": None,
    }  # fmt: skip
    types = {
        **dict.fromkeys(("query", "key", "value", "pages", "out"), "*bf16"),
        **dict.fromkeys(("partials", "partial_lses"), "*fp32"),
        **dict.fromkeys(("starts", "lengths", "indices", "arrivals", "visible"), "*i32"),
        **dict.fromkeys((name for name in kernel.arg_names if name.endswith("_stride")), "i32"),
        **dict.fromkeys(("rows", "row_tile", "window_left", "unsplit", "min_share", "listed"), "i32"),
        **dict.fromkeys(("scale", "cap", "epsilon"), "fp32"),
    }
    made = compiled(kernel, constants, types, tiling.warps, ("query", "pages", "row_stride"), launch_pdl=True)
    (stack,) = re.findall(r"STACK:(\d+)", resources_of(made.asm["cubin"], tmp_path / "cubin"))
    assert int(stack) <= 16, "registers spill"
    assert made.metadata.shared <= 227 * 1024
    steps = in_order(made.asm["ptx"])
    before = steps[: steps.index("griddepcontrol.wait")]
    assert before == ["ld.global"] * len(before)
    assert len(before) <= 4, "where the row's pages begin, its length, the page of its newest token"
    assert "cp.async.cg" in steps, "keys are loaded while others are multiplied"
