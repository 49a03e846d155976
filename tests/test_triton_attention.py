"""The decode kernel on CUDA: here under Triton's interpreter on the CPU; on a GPU see `test_ops_gpu.py`.

Triton decides at import whether it interprets, so the tests run in a process of their own.

Shapes: B rows, L tokens of one row, H query heads, K kv heads, D head dimension, P pages, S page size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from compiled_llm_ops import attention_tiling, paged_attention_lse
from compiled_llm_ops.attention_tiling import Tiling, choose
from interpreting import check_interpreted, interpreted, needs_triton, not_interpreted

pytestmark = [needs_triton, pytest.mark.usefixtures("scalars_are_numbers")]

KV_HEADS = 2
SCALE = 0.3


@pytest.mark.slow
@not_interpreted
def test_kernel_under_the_interpreter(seed: int) -> None:
    check_interpreted(__file__, seed)


# ---- rows in pages


class Batch(NamedTuple):
    """Rows that decode: what the op takes, in float16, which the interpreter multiplies as it should."""

    query: Tensor
    key: Tensor
    value: Tensor
    pages: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor

    def appended(self) -> Tensor:
        """The pages with the newest keys and values."""
        pages, newest = self.pages.clone(), self.indices[self.indptr[1:] - 1]
        states = torch.stack([self.key, self.value], 1)
        pages[newest, :, :, self.last_page_len - 1, : self.key.shape[2]] = states
        return pages


def int32(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def batch_of(lengths: Sequence[int], group: int, page_size: int, head_dim: int, stored: int = 0) -> Batch:
    """Rows in pages of random order; free pages and free slots hold NaN, and so do those of the newest tokens."""
    counts = [-(-length // page_size) for length in lengths]
    total = sum(counts)
    numbers = torch.randperm(total) + 1
    pages = torch.full((total + 2, 2, KV_HEADS, page_size, stored or head_dim), torch.nan, dtype=torch.float16)
    pages[..., head_dim:] = 0
    starts = [0]
    for length, count in zip(lengths, counts, strict=True):
        own = numbers[starts[-1] : starts[-1] + count]
        states = torch.randn(2, KV_HEADS, count * page_size, head_dim).half()
        states[:, :, length - 1 :] = torch.nan
        pages[own, :, :, :, :head_dim] = states.unflatten(2, (count, page_size)).permute(2, 0, 1, 3, 4)
        starts.append(starts[-1] + count)
    last = [length - (count - 1) * page_size for length, count in zip(lengths, counts, strict=True)]
    indices = int32([*numbers.tolist(), *[total + 1] * 40])
    query = torch.randn(len(lengths), KV_HEADS * group, head_dim).half()
    key, value = torch.randn(2, len(lengths), KV_HEADS, head_dim).half()
    return Batch(query, key, value, pages, int32(starts), indices, int32(last))


def launch(batch: Batch, splits: int, window_left: int = -1, soft_cap: float = 0.0) -> tuple[Tensor, Tensor]:
    from compiled_llm_ops.triton_attention import decode

    lse = torch.empty(batch.query.shape[:2])
    return decode(*batch, SCALE, window_left, soft_cap, lse, tiling=tiling_of(batch, splits), pdl=False), lse


def tiling_of(batch: Batch, splits: int, alone: int = 2, least: int = 1) -> Tiling:
    """Blocks small enough for short rows to have several."""
    return Tiling(splits, alone, least, block=8192 // batch.pages.shape[4], stages=3, warps=4)


def check(batch: Batch, splits: int, window_left: int = -1, soft_cap: float = 0.0) -> None:
    pages = batch.appended()
    out, lse = launch(batch, splits, window_left, soft_cap)
    torch.testing.assert_close(batch.pages, pages, rtol=0, atol=0, equal_nan=True)
    one_each = torch.arange(len(batch.query) + 1).int()
    expected, expected_lse = paged_attention_lse(
        batch.query.float(), pages, one_each, *batch[4:], SCALE, window_left, soft_cap
    )
    assert expected.isfinite().all()
    assert out.is_contiguous()
    torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


SPLITS = pytest.mark.parametrize("splits", [1, 3, 9], ids="splits={}".format)
LENGTHS = [1, 15, 16, 17, 64, 65, 300, 513]


@interpreted
@SPLITS
@pytest.mark.parametrize("head_dim", [64, 128], ids="D={}".format)
@pytest.mark.parametrize("group", [1, 2, 4, 5, 8], ids="group={}".format)
def test_rows_of_any_length(group: int, head_dim: int, splits: int, seed: int) -> None:
    check(batch_of(LENGTHS, group, 16, head_dim), splits)


@interpreted
@SPLITS
@pytest.mark.parametrize("page_size", [1, 5, 64, 1024], ids="S={}".format)
def test_pages_of_any_size(page_size: int, splits: int, seed: int) -> None:
    check(batch_of([1, page_size, page_size + 1, 700], 2, page_size, 64), splits)


@interpreted
@pytest.mark.parametrize("splits", [1, 4, 7], ids="splits={}".format)
def test_long_rows_are_shared_by_all_programs(splits: int, seed: int) -> None:
    check(batch_of([5000, 3, 2049], 2, 16, 128), splits)


@interpreted
def test_of_many_rows_only_long_ones_are_shared(seed: int) -> None:
    from compiled_llm_ops.triton_attention import decode

    batch = batch_of([256, 512, 513, 3000], 2, 16, 128)  # blocks: 4, 8, 9, 47
    alone, _ = launch(batch, 1)

    def equal_rows(most_alone: int, least: int) -> list[bool]:
        shared = decode(*batch, SCALE, tiling=tiling_of(batch, 4, most_alone, least), pdl=False)
        torch.testing.assert_close(shared, alone, rtol=2e-3, atol=2e-3)
        return [torch.equal(*row) for row in zip(shared, alone, strict=True)]

    assert equal_rows(3, 1) == [False] * 4
    assert equal_rows(8, 1) == [True, True, False, False]
    assert equal_rows(3, 9) == [True, True, True, False]


@interpreted
@SPLITS
@pytest.mark.parametrize("window_left", [0, 1, 20, 300, 10_000], ids="window={}".format)
def test_nothing_outside_of_the_window_is_read(window_left: int, splits: int, seed: int) -> None:
    batch = batch_of(LENGTHS, 2, 16, 128)
    check(batch, splits, window_left)
    expected = launch(batch, splits, window_left)
    for row, length in enumerate(LENGTHS):
        own = batch.indices[batch.indptr[row] : batch.indptr[row + 1]]
        for position in range(length - 1 - window_left):
            batch.pages[own[position // 16], :, :, position % 16] = torch.nan
    for actual, other in zip(launch(batch, splits, window_left), expected, strict=True):
        assert torch.equal(actual, other)


@interpreted
@SPLITS
@pytest.mark.parametrize("window_left", [-1, 100], ids="window={}".format)
def test_capped_logits(window_left: int, splits: int, seed: int) -> None:
    batch = batch_of(LENGTHS, 4, 16, 64)
    check(batch, splits, window_left, soft_cap=2.0)
    check(batch._replace(query=batch.query * 1000), splits, window_left, soft_cap=30.0)


@interpreted
@SPLITS
@pytest.mark.parametrize(("head_dim", "stored"), [(16, 64), (80, 128), (96, 128)])
def test_stored_heads_may_be_wider(head_dim: int, stored: int, splits: int, seed: int) -> None:
    check(batch_of(LENGTHS, 4, 16, head_dim, stored), splits)


@interpreted
def test_log_sum_exp_may_be_left_out(seed: int) -> None:
    from compiled_llm_ops.triton_attention import decode

    batch = batch_of([40, 700], 17, 16, 64)
    out, _ = launch(batch, 3)
    assert torch.equal(out, decode(*batch, SCALE, tiling=tiling_of(batch, 3), pdl=False))


@interpreted
def test_queries_keys_and_values_may_have_any_strides(seed: int) -> None:
    batch = batch_of([40, 700], 2, 16, 64)
    fused = torch.randn(2, 8, 65).half()
    check(batch._replace(query=fused[:, :4, 1:], key=fused[:, 4:6, 1:], value=fused[:, 6:, :64]), 3)
    query, key, value = torch.randn(64, 8, 2).half().permute(2, 1, 0).split([4, 2, 2], dim=1)
    check(batch._replace(query=query, key=key, value=value), 3)


@interpreted
@SPLITS
def test_rows_of_padding_are_harmless(splits: int, seed: int) -> None:
    """They write to the null page and read it, and may all be the same row of it."""
    batch = batch_of([30, 1, 600], 2, 16, 64)
    alone = launch(batch, splits)
    used = int(batch.indptr[-1])
    padding = torch.ones(5, KV_HEADS, 64).half()
    padded = Batch(
        torch.cat([batch.query, torch.zeros(5, *batch.query.shape[1:]).half()]),
        torch.cat([batch.key, padding]),
        torch.cat([batch.value, padding]),
        batch.pages,
        torch.cat([batch.indptr, int32(range(used + 1, used + 6))]),
        torch.cat([batch.indices[:used], torch.zeros(5, dtype=torch.int32)]),
        torch.cat([batch.last_page_len, torch.ones(5, dtype=torch.int32)]),
    )
    together = launch(padded, splits)
    for actual, expected in zip(together, alone, strict=True):
        assert torch.equal(actual[:3], expected)
    assert bool((together[0][3:] == 1).all())


@interpreted
def test_counters_are_zero_again(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ones serve launch after launch, over rows that grow and shrink."""
    from compiled_llm_ops import triton_attention

    counters = torch.zeros(4 * KV_HEADS, dtype=torch.int32)
    monkeypatch.setattr(triton_attention.zeros, "take", lambda count, device: counters[:count])
    for lengths in ([1, 2, 3, 4], [900, 1, 300, 257], [2000, 2000, 16, 16], [5, 1000]):
        check(batch_of(lengths, 2, 16, 128), 6)
        assert not counters.any()


@interpreted
def test_any_number_of_splits_is_the_same_kernel(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it would be compiled anew when batches grow, and for types that no test has compiled."""
    from compiled_llm_ops import triton_attention

    variants = []

    def noted(*given: Any, **constants: Any) -> None:
        variants.append(([getattr(value, "dtype", type(value)) for value in given], constants))

    monkeypatch.setattr(triton_attention, "_decode_paged_attention", {(2, KV_HEADS, n): noted for n in (1, 7)})
    for splits in (1, 7):
        launch(batch_of([40, 700], 2, 16, 64), splits)
    assert variants[0] == variants[1]
    assert variants[0][0][9:12] == [torch.float32, torch.float32, torch.int32]


@interpreted
@pytest.mark.parametrize("change", ["dtype", "pages"])
def test_what_the_kernel_cannot_read_raises(change: str, seed: int) -> None:
    batch = batch_of([40], 2, 16, 64)
    if change == "dtype":
        batch = batch._replace(query=batch.query.float())
    else:
        batch = batch._replace(pages=batch.pages.transpose(1, 2))
    with pytest.raises(ValueError, match=r"torch\.bfloat16 or torch\.float16|must be contiguous"):
        launch(batch, 1)


# ---- compiled, without a GPU


H200 = {"processors": 132, "shared_memory": 228 * 1024}

COMPILED = [
    ("bf16", 2, 128, 1, {}),
    ("bf16", 16, 128, 1, {}),
    ("fp16", 8, 64, 32, {"CAPPED": True}),
    ("bf16", 71, 64, 1, {}),
    ("bf16", 4, 256, 64, {"HEAD": 160, "PAGE": 1}),
    ("bf16", 8, 512, 1, {}),
]


@pytest.mark.slow
@not_interpreted
@pytest.mark.parametrize(("dtype", "group", "head_dim", "rows", "changes"), COMPILED)
@pytest.mark.parametrize("with_lse", [False, True], ids=["out", "out and lse"])
def test_memory_is_touched_between_waiting_and_letting_go(
    dtype: str,
    group: int,
    head_dim: int,
    rows: int,
    changes: dict[str, Any],
    with_lse: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels in front may still write before `gdc_wait`, those behind may write after `gdc_launch_dependents`."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from compiled_llm_ops import triton_attention as module

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    padded, kernel = 1 << (group - 1).bit_length(), module._decode_paged_attention
    tiling = choose(rows, 8, group, head_dim, 40_960, **H200)
    constants = {
        "GROUP": group, "PADDED": padded, "HEAD": head_dim, "DIM": head_dim, "PAGE": 16,
        "BLOCK": tiling.block, "CHUNK": max(1, module.MERGED_NUMBERS // (padded * head_dim)),
        "STAGES": tiling.stages, "CAPPED": False, "PDL": True, **changes,
        **({} if with_lse else {"lse": None}),
    }  # fmt: skip
    types = {
        **dict.fromkeys(("query", "key", "value", "pages", "out"), f"*{dtype}"),
        **dict.fromkeys(("lse", "partials", "partial_lses"), "*fp32"),
        **dict.fromkeys(("indptr", "indices", "last_page_len", "arrivals"), "*i32"),
        **dict.fromkeys((name for name in kernel.arg_names if name.endswith("_stride")), "i32"),
        **dict.fromkeys(("window_left", "alone", "least"), "i32"),
        **dict.fromkeys(("scale", "cap"), "fp32"),
    }
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in ("query", "pages", "row_stride")}
    source = ASTSource(kernel, signature, places, aligned)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tiling.warps, "launch_pdl": True})
    large = tiling.block * head_dim == 2**14
    assert made.metadata.shared <= (attention_tiling.LARGE_PROGRAM if large else 99 * 1024), "8.9 has no more"
    touching = r"cp\.async\.\w+\.shared|(?:ld|st|atom)\.global"
    code = made.asm["ptx"]
    before, _ = code.split("griddepcontrol.wait")
    assert not re.findall(touching, before)
    _, after = code.split("griddepcontrol.launch_dependents")
    alone, end = re.split(r"bra\.uni\s+", after, maxsplit=1)
    assert set(re.findall(touching, alone)) == {"st.global"}
    label = end.split(";")[0]
    assert not re.findall(touching, code.split(f"{label}:")[1])
