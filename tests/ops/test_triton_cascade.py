"""The kernels of cascade attention: under Triton's interpreter on the CPU, and compiled; on a GPU see
`test_cascade_gpu.py`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm_ops import CascadeTables
from compiled_llm_ops.attention.cascade.contract import CascadeAttention
from compiled_llm_ops.attention.cascade.kernels.tiling import CascadeTiling, choose_cascade_tiling
from compiled_llm_ops.kernels.attention.decode_tiling import AttentionTiling
from support.ops.cascade_rows import CascadeRows, turned
from support.ops.compiling import compiled, in_order, resources_of
from support.ops.fp8_pages import KINDS, fp8_cascade, fp8_written, scales_of, stored
from support.ops.interpreting import interpreted, needs_triton, not_interpreted
from support.ops.op_cases import preparation

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]

LARGE = 2.5e-3
"""How far float16 is off for values of about 1."""


def launch(
    rows: CascadeRows, programs: int = 3, block: int = 64, tables: CascadeTables | None = None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The three launches, and the pages that they have written."""
    from compiled_llm_ops.attention.cascade.kernels.shared_prefix import attend_over_runs, merge_parts
    from compiled_llm_ops.kernels.attention.decode import prepare_decode

    args = CascadeAttention(*rows.arguments(tables), **options)
    lse = torch.full(args.query.shape[:2], torch.nan)
    stored = args.pages.shape[-1]
    tiling = AttentionTiling(len(args.starts), len(args.starts) + 2, 1, 1, block=8192 // stored, stages=3, warps=4)
    out, attend_over_tails = prepare_decode(
        args.whole_rows, lse, tiling=tiling, pdl=False, shared_lengths=args.shared_lengths
    )
    parts, lses = attend_over_runs(args, tiling=CascadeTiling(programs, block, 3, 4), pdl=False)
    attend_over_tails()
    merge_parts(out, lse, parts, lses, args.merge_parts, pdl=False)
    return out, lse, args.pages


def check(rows: CascadeRows, window_left: int = -1, soft_cap: float = 0.0, **how: Any) -> None:
    expected, expected_lse = rows.expected(window_left, soft_cap)
    out, lse, pages = launch(rows, window_left=window_left, logits_soft_cap=soft_cap, **how)
    torch.testing.assert_close(out.float(), expected, rtol=LARGE, atol=LARGE)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(pages, rows.written(), rtol=0, atol=0, equal_nan=True)


def rows_of(runs: Sequence[tuple[Sequence[int], int]], tails: Sequence[int], seed: int, **sizes: Any) -> CascadeRows:
    return CascadeRows(runs, tails, **{"head_dim": 64, "page_size": 16, "dtype": torch.half, "seed": seed, **sizes})


TREE = [([0, 1, 2, 3, 5], 9), ([1, 2, 5], 4), ([2, 5], 1)]
TAILS = [1, 16, 70, 17, 33, 2]


@interpreted
@pytest.mark.parametrize("group", [1, 2, 4, 7], ids="group={}".format)
def test_groups_of_heads_in_trees_of_runs(group, seed):
    check(rows_of(TREE, TAILS, seed, group=group))


@interpreted
@pytest.mark.parametrize(
    ("head_dim", "sizes"),
    [(64, {"page_size": 1}), (64, {"page_size": 5}), (128, {}), (96, {"padded": 128}), (256, {"kv_heads": 1})],
    ids=str,
)
def test_heads_and_pages_of_any_size(head_dim, sizes, seed):
    check(rows_of(TREE, TAILS, seed, head_dim=head_dim, **sizes))


@interpreted
@pytest.mark.parametrize(("programs", "block"), [(1, 64), (2, 128), (40, 64)])
def test_any_number_of_programs_reads_every_item(programs, block, seed):
    """One takes all items in turn, and of more than there are items some take none."""
    rows = rows_of([([0, 1], 30), ([2, 3, 4], 25)], [5, 20, 1, 9, 40], seed)
    assert 3 < sum(rows.tables().work_items[:, 4] > 0) < 40
    check(rows, programs=programs, block=block)


@pytest.mark.whole
@interpreted
def test_more_members_than_a_tile_has_room_for(seed):
    check(rows_of([(range(20), 5), (range(1, 20), 2)], [1 + row % 7 for row in range(21)], seed, group=7))


@interpreted
@pytest.mark.parametrize("window_left", [0, 20, 75, 130, 10_000], ids="window={}".format)
def test_windows_end_in_a_run_or_before_it(window_left, seed):
    """Of rows of different lengths, whose windows begin in different blocks of a run, or after it."""
    rows = rows_of([([0, 1, 2], 9), ([1, 2], 5)], [90, 3, 200], seed)
    check(rows, window_left)
    check(rows, window_left, 1.5)


@interpreted
def test_nothing_outside_of_the_windows_is_read(seed):
    """Nor used of what one reads and another one does not."""
    rows = rows_of([([0, 1, 2], 12), ([1, 2], 5)], [7, 3, 20], seed)
    expected = launch(rows, window_left=120)  # from key 78 on, of an item that begins at 0
    rows.forget_before(78)
    for actual, other in zip(launch(rows, window_left=120)[:2], expected[:2], strict=True):
        assert torch.equal(actual, other)


@interpreted
def test_logits_are_capped(seed):
    rows = rows_of(TREE, TAILS, seed)
    check(rows, soft_cap=0.7)


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window_left", "soft_cap"), [(-1, 0.0), (75, 1.5)])
def test_shared_pages_may_be_of_fp8(window_left, soft_cap, kind, seed):
    scales = scales_of(kind, 2)
    rows, read = fp8_cascade(rows_of(TREE, TAILS, seed, group=3), scales)
    expected, expected_lse = read.expected(window_left, soft_cap)
    fp8 = scales.given
    out, lse, pages = launch(rows, window_left=window_left, logits_soft_cap=soft_cap, **fp8)
    torch.testing.assert_close(out.float(), expected, rtol=2 * LARGE, atol=2 * LARGE)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=2e-3)
    assert torch.equal(pages.view(torch.uint8), fp8_written(rows, scales))
    newest = zip((rows.key, rows.value), scales, strict=True)
    assert fp8["saturated"].tolist() == [sum(stored(states, scale).clamped for states, scale in newest)]


@interpreted
@pytest.mark.parametrize("options", [{}, {"window_left": 40, "logits_soft_cap": 2.0}], ids=str)
def test_the_op_launches_all_three_with_tilings_for_the_device(options, seed, monkeypatch):
    """With a real device's numbers, and what it would be given on one."""
    from compiled_llm_ops.attention import decode
    from compiled_llm_ops.attention.cascade import attention as cascade
    from compiled_llm_ops.contracts.devices import CudaDevice

    for module in (cascade, decode):
        monkeypatch.setattr(module, "device_of", lambda _: CudaDevice(132, 228 * 1024))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    rows = rows_of(TREE, TAILS, seed, max_items=20)
    expected, expected_lse = rows.expected(*options.values())
    for wants_lse in (False, True):
        args = CascadeAttention(*rows.arguments(), **options)
        out, lse = cascade._cuda(args, wants_lse)
        torch.testing.assert_close(out.float(), expected, rtol=LARGE, atol=LARGE)
        assert out.is_contiguous()
        torch.testing.assert_close(args.pages, rows.written(), rtol=0, atol=0, equal_nan=True)
        assert (lse is not None) == wants_lse
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=2e-3)


@interpreted
def test_rows_without_runs_are_left_as_they_are(seed):
    check(rows_of([], [3, 40, 16], seed))
    check(rows_of([([2, 3], 2)], [3, 40, 16, 1], seed))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_whose_keys_nobody_sees_are_not_used(dtype, seed):
    """Parts of FlashInfer's kernels are of 16 bits."""
    from compiled_llm_ops.attention.cascade.kernels.shared_prefix import merge_parts

    v, s = torch.randn(2, 3, 8), torch.randn(2, 3)
    parts, lses = torch.randn(5, 3, 8).to(dtype), torch.randn(5, 3)
    lses[1], parts[1] = -torch.inf, torch.nan
    table = torch.zeros(2, 3, 3, dtype=torch.int32)
    table[0, 0], table[0, 1] = torch.tensor([[1, 2, 2], [0, 1, 9]])
    expected = v.clone(), s.clone()
    lse = torch.stack([s[0], lses[3], lses[0]])
    weights = torch.softmax(lse * 0.6931471805599453, 0)[..., None]
    expected[0][0] = (torch.stack([v[0], parts[3].float(), parts[0].float()]) * weights).sum(0)
    expected[1][0] = torch.logsumexp(lse * 0.6931471805599453, 0) / 0.6931471805599453
    merge_parts(v, s, parts, lses, table, pdl=False)
    torch.testing.assert_close((v, s), expected)


@interpreted
@pytest.mark.parametrize("given", ["norms", "positions", "both"])
def test_queries_and_keys_are_normed_and_turned_first(given, seed):
    rows = rows_of(TREE, TAILS, seed, group=3, head_dim=96, padded=128)
    names = ("query_norm", "key_norm", "epsilon", "cos", "sin")
    options = dict(zip(names, preparation(rows.query), strict=True))
    for name in {"norms": ("cos", "sin"), "positions": ("query_norm", "key_norm"), "both": ()}[given]:
        options[name] = None
    query, key = (
        turned(states, options[norm], 0.01, options["cos"], options["sin"])
        for states, norm in ((rows.query, "query_norm"), (rows.key, "key_norm"))
    )
    expected, expected_lse = rows.expected(query=query, key=key.half())
    out, lse, pages = launch(rows, **options)
    torch.testing.assert_close(out.float(), expected, rtol=2 * LARGE, atol=2 * LARGE)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(pages, rows.written(key.half()), rtol=2e-3, atol=2e-3, equal_nan=True)


@interpreted
def test_queries_may_have_any_strides(seed):
    rows = rows_of(TREE, TAILS, seed)
    fused = torch.randn(6, 9, 65).half()
    rows.query = fused[:, :4, 1:]
    check(rows)
    rows.query = torch.randn(64, 4, 6).half().permute(2, 1, 0)
    check(rows)


@interpreted
@pytest.mark.parametrize("change", ["dtype", "pages"])
def test_what_the_kernel_cannot_read_raises(change, seed):
    from compiled_llm_ops.attention.cascade.kernels.shared_prefix import attend_over_runs

    args = CascadeAttention(*rows_of(TREE, TAILS, seed).arguments())
    changed = {"query": args.query.float()} if change == "dtype" else {"pages": args.pages.transpose(1, 2)}
    with pytest.raises(ValueError, match=r"use torch\.float16, torch\.bfloat16$|must be contiguous"):
        attend_over_runs(args._replace(**changed), tiling=CascadeTiling(1, 64, 3, 4), pdl=False)


# ---- the tiling


H100, A100, L4 = (132, 228 * 1024), (108, 164 * 1024), (58, 100 * 1024)
"""Multiprocessors, and the shared memory of each."""


def test_programs_are_no_more_than_the_device_or_the_items_need():
    assert choose_cascade_tiling(8, 128, 512, *H100).programs == 16
    assert choose_cascade_tiling(8, 128, 5, *H100).programs == 5
    assert choose_cascade_tiling(200, 128, 512, *H100).programs == 1
    assert choose_cascade_tiling(8, 256, 512, *H100).warps > choose_cascade_tiling(8, 128, 512, *H100).warps


def test_blocks_are_as_large_as_shared_memory_allows():
    blocks = [choose_cascade_tiling(8, 128, 512, *device).block for device in (H100, A100, L4)]
    assert blocks == [128, 64, 32]


# ---- compiled, without a GPU

TABLES = ("lengths", "indices", "members", "work_items")


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("head_dim", [64, 128, 256], ids="D={}".format)
@pytest.mark.parametrize("options", [{}, {"WINDOWED": True, "CAPPED": True}], ids=str)
def test_registers_and_shared_memory_suffice(head_dim, options, tmp_path):
    from compiled_llm_ops.attention.cascade.kernels import shared_prefix

    kernel = shared_prefix._shared_prefix_attention
    tiling = choose_cascade_tiling(8, head_dim, 512, *H100)
    constants = {
        "QUERIES": 64, "GQA": 3, "PADDED": 4, "HEAD": head_dim, "DIM": head_dim, "PAGE": 16, "BLOCK": tiling.block,
        "STAGES": tiling.stages, "CAPPED": False, "WINDOWED": False, "PDL": True, **options,
    }  # fmt: skip
    types = {
        **dict.fromkeys(("query", "pages", "query_norm", "cos", "sin"), "*bf16"),
        **dict.fromkeys(("parts", "lses"), "*fp32"),
        **dict.fromkeys(TABLES, "*i32"),
        **dict.fromkeys(("row_stride", "head_stride", "items", "window_left"), "i32"),
        **dict.fromkeys(("scale", "cap", "epsilon"), "fp32"),
    }
    aligned = ("query", "pages", "row_stride", "head_stride", "parts", "cos", "sin", "query_norm")
    made = compiled(kernel, constants, types, tiling.warps, aligned, launch_pdl=True)
    resources = resources_of(made.asm["cubin"], tmp_path / "cubin")
    (stack,) = re.findall(r"STACK:(\d+)", resources)
    assert int(stack) <= 16, f"registers spill: {resources}"
    assert made.metadata.shared <= 227 * 1024
    assert "wgmma" in made.asm["ptx"]
    steps = in_order(made.asm["ptx"])
    before = steps[: steps.index("griddepcontrol.wait")]
    assert before == ["ld.global"], "the first item's members"
    assert steps[len(before) + 1] == "griddepcontrol.launch_dependents"


@pytest.mark.whole
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_runs_of_fp8_are_read_as_they_are_and_converted_once(dtype, tmp_path):
    from compiled_llm_ops.attention.cascade.kernels import shared_prefix

    kernel = shared_prefix._shared_prefix_attention
    constants = {
        "QUERIES": 64, "GQA": 3, "PADDED": 4, "HEAD": 128, "DIM": 128, "PAGE": 16, "BLOCK": 64, "STAGES": 3,
        "CAPPED": False, "WINDOWED": False, "PDL": True,
    }  # fmt: skip
    types = {
        **dict.fromkeys(("query", "query_norm", "cos", "sin"), f"*{dtype}"),
        "pages": "*fp8e4nv",
        **dict.fromkeys(("parts", "lses", "key_scale", "value_scale"), "*fp32"),
        **dict.fromkeys(TABLES, "*i32"),
        **dict.fromkeys(("row_stride", "head_stride", "items", "window_left"), "i32"),
        **dict.fromkeys(("scale", "cap", "epsilon"), "fp32"),
    }
    aligned = ("query", "pages", "row_stride", "head_stride", "parts", "cos", "sin", "query_norm")
    made = compiled(kernel, constants, types, 4, aligned, launch_pdl=True)
    (stack,) = re.findall(r"STACK:(\d+)", resources_of(made.asm["cubin"], tmp_path / "cubin"))
    assert int(stack) <= 16, "registers spill"
    assert made.metadata.shared <= 56 * 1024, "blocks of bfloat16 take 80 KB"
    ptx = made.asm["ptx"]
    assert "cvt.rn.f16x2.e4m3x2" in ptx
    assert "e4m3x2.f32" not in ptx, "only what is stored is rounded"
    assert "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16" in ptx, "bfloat16 takes more instructions to make"
    steps = in_order(ptx)
    assert steps[: steps.index("griddepcontrol.wait")] == ["ld.global"], "the first item's members"


@pytest.mark.whole
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
def test_tails_wait_for_nothing_but_at_their_end(tmp_path):
    from compiled_llm_ops.kernels.attention import decode

    kernel = decode._decode_paged_attention
    constants = {
        "ROWS": 32, "MOST": 64, "NEW": 1, "GQA": 2, "PADDED": 2, "HEAD": 128, "DIM": 128, "PAGE": 16, "BLOCK": 64,
        "CHUNK": 16, "STAGES": 5, "CAPPED": False, "SHARE_EQUAL": True, "PDL": True,
    }  # fmt: skip
    types = {
        **dict.fromkeys(("query", "key", "value", "pages", "out"), "*bf16"),
        **dict.fromkeys(("query_norm", "key_norm", "cos", "sin"), "*bf16"),
        **dict.fromkeys(("lse", "partials", "partial_lses"), "*fp32"),
        **dict.fromkeys(("starts", "lengths", "indices", "shared_lengths", "arrivals"), "*i32"),
        **dict.fromkeys((name for name in kernel.arg_names if name.endswith("_stride")), "i32"),
        **dict.fromkeys(("rows", "row_tile", "window_left", "unsplit", "min_share"), "i32"),
        **dict.fromkeys(("scale", "cap", "epsilon"), "fp32"),
    }
    made = compiled(kernel, constants, types, 2, ("query", "pages", "row_stride"), launch_pdl=True)
    (stack,) = re.findall(r"STACK:(\d+)", resources_of(made.asm["cubin"], tmp_path / "cubin"))
    assert int(stack) <= 16, "registers spill"
    steps = in_order(made.asm["ptx"])
    begun, waits = steps.index("griddepcontrol.launch_dependents"), steps.index("griddepcontrol.wait")
    assert steps[:begun] == ["ld.global"] * begun
    assert begun <= 4, "where pages begin, lengths, shared lengths, the page of the newest token"
    assert begun < waits == len(steps) - 1, "runs are read meanwhile"


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_merge_reads_nothing_but_its_table_before_it_waits(dtype, tmp_path):
    from compiled_llm_ops.attention.cascade.kernels import shared_prefix as merge

    constants = {"LEVELS": 3, "DIM": 128, "BLOCK": 128, "CHUNK": merge.PARTS_AT_ONCE, "PDL": True}
    types = {"v": "*bf16", "parts": f"*{dtype}", **dict.fromkeys(("s", "lses"), "*fp32"), "merge_parts": "*i32"}
    types["heads"] = "i32"
    made = compiled(merge._merge_state_parts, constants, types, 1, ("v", "parts"), launch_pdl=True)
    (stack,) = re.findall(r"STACK:(\d+)", resources_of(made.asm["cubin"], tmp_path / "cubin"))
    assert int(stack) == 0, "registers spill"
    steps = in_order(made.asm["ptx"])
    before = steps[: steps.index("griddepcontrol.wait")]
    assert before == ["ld.global"] * 3, "how many parts each level has"
