"""`tools/bench/attention.py`: cases, contenders on the CPU and with stand-ins for FlashInfer and flash-attn, tables."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from compiled_llm_ops.protocol import NothingToBuild
from support.imports import CHECKOUT, module_at
from support.ops.varlen_packages import PACKAGES, stand_in_for

TOOLS = CHECKOUT / "tools" / "bench"
pytestmark = pytest.mark.skipif(not TOOLS.is_dir(), reason="no checkout")
CPU = torch.device("cpu")
QWEN = (16, 8, 128)
SMALL = (4, 2, 16)
ROWS = {
    "decode": [(1, 1), (1, 16), (1, 17), (1, 300)],
    "prefill": [(16, 16), (5, 40), (33, 33)],
    "mixed": [(1, 40), (1, 1), (1, 300), (30, 50)],
    "shared": [(1, 257), (1, 300), (1, 530)],
}
SHARED = 256
"""Keys with which all rows of the last one begin."""


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))


def part_of(name: str) -> Any:
    return importlib.import_module(f"attention_ops.{name}")


def case_of(kind: str, rows: list[tuple[int, int]] | None = None) -> Any:
    cases = part_of("cases")
    shared = SHARED if kind == "shared" and rows is None else 0
    return cases.Case(kind, "by hand", tuple(cases.Row(*row) for row in rows or ROWS[kind]), shared)


def inputs_of(kind: str) -> Any:
    return part_of("inputs").Inputs(case_of(kind), part_of("cases").Heads(*SMALL), CPU, torch.float32)


def contenders() -> dict[str, Any]:
    return {one.name: one for one in part_of("contenders").CONTENDERS}


# ---- cases


@pytest.mark.parametrize(
    ("rows", "nbytes", "flops"),
    [
        # 4096 bytes of keys and values a key, 8192 of queries and results a token, 8192 FLOP a pair
        ([(1, 100), (1, 607)], 707 * 4096 + 2 * 8192, 707 * 8192),
        ([(3, 5)], 5 * 4096 + 3 * 8192, (3 + 4 + 5) * 8192),
        ([(4, 4)], 4 * 4096 + 4 * 8192, (1 + 2 + 3 + 4) * 8192),
        ([(1, 10), (2, 2)], 12 * 4096 + 3 * 8192, (10 + 1 + 2) * 8192),
    ],
)
def test_bytes_and_work_are_those_counted_by_hand(rows: Any, nbytes: int, flops: int) -> None:
    case, heads = case_of("prefill", rows), part_of("cases").Heads(*QWEN)
    assert case.nbytes(heads, itemsize=2) == nbytes
    assert case.flops(heads) == flops


def test_keys_that_rows_share_move_once() -> None:
    case, heads = case_of("shared"), part_of("cases").Heads(*QWEN)
    assert case.nbytes(heads, itemsize=2) == (257 + 44 + 274) * 4096 + 3 * 8192
    assert case.flops(heads) == (257 + 300 + 530) * 8192
    inputs = inputs_of("shared")
    assert len(inputs.pages[0]) == 16 + 1 + 3 + 18
    numbers = inputs.whole.host.indices.split([17, 19, 34])
    assert len({tuple(own[:16].tolist()) for own in numbers}) == 1
    assert len(inputs.whole.host.indices.unique()) == len(inputs.pages[0])


def test_quick_cases_are_among_all_and_these_are_always_the_same() -> None:
    cases = part_of("cases")
    every, quick = cases.cases_of(cases.KINDS, False), cases.cases_of(cases.KINDS, True)
    assert every == cases.cases_of(cases.KINDS, False)
    assert set(quick) < set(every)
    assert {case.kind for case in quick} == {*cases.KINDS}
    assert len({case.name for case in every}) == len(every)
    assert {len(case.rows) for case in every if case.kind == "decode"} == {1, 8, 32, 64, 128, 192, 256}
    assert cases.cases_of(["mixed"], False) == [case for case in every if case.kind == "mixed"]
    for case in every:
        assert all(1 <= row.new <= row.keys <= part_of("inputs").MAX_KEYS for row in case.rows)


def test_in_mixed_cases_rows_that_decode_come_first_and_a_chunk_last() -> None:
    cases = part_of("cases").cases_of(["mixed"], False)
    assert len(cases) == 3 * 2 * 4
    for case in cases:
        *rows, chunk = case.rows
        assert {row.new for row in rows} == {1}
        assert chunk.new == chunk.keys > 1


# ---- what contenders compute


def keys_and_values(inputs: Any, row: int) -> tuple[Tensor, Tensor]:
    """``[L, K, D]`` of a row, one token after the other."""
    numbers, first = inputs.whole.host.indices, int(inputs.whole.host.indptr[row])
    tokens = [
        inputs.pages[0][int(numbers[first + token // 16]), :, :, token % 16]
        for token in range(inputs.case.rows[row].keys)
    ]
    return torch.stack([both[0] for both in tokens]), torch.stack([both[1] for both in tokens])


def dense_row(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """``[Q, H, D]`` of queries that are the last tokens of a row; shares no code with the ops."""
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1).double(), values.repeat_interleave(group, 1).double()
    logits = torch.einsum("qhd,lhd->hql", query.double(), keys) * query.shape[2] ** -0.5
    own = torch.arange(len(query))[:, None] + len(keys) - len(query)
    logits = logits.masked_fill(torch.arange(len(keys)) > own, -torch.inf)
    return torch.einsum("hql,lhd->qhd", logits.softmax(-1), values).float()


def dense(inputs: Any) -> Tensor:
    queries = inputs.whole.query.split([row.new for row in inputs.case.rows])
    return torch.cat([dense_row(query, *keys_and_values(inputs, row)) for row, query in enumerate(queries)])


def check(inputs: Any, launch: Any) -> None:
    before, expected = inputs.pages[0].clone(), dense(inputs)
    for number in (0, 1, len(inputs.pages)):
        torch.testing.assert_close(torch.cat([*launch(number)]), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(inputs.pages[0], before), "the next contender finds what this one has found"
    assert part_of("checking").deviation(launch(0), expected) < 1e-4


OURS = [
    "decode_attention",
    "paged_attention",
    "paged_attention:graph",
    "decode_attention+paged_attention",
    "cascade_attention",
]


@pytest.mark.parametrize("kind", ROWS)
def test_our_ops_equal_dense_attention(kind: str) -> None:
    inputs = inputs_of(kind)
    torch.testing.assert_close(part_of("checking").dense(inputs), dense(inputs), rtol=1e-4, atol=1e-5)
    taking_part = [contenders()[name] for name in OURS if kind in contenders()[name].kinds]
    assert len(taking_part) == (3 if kind in ("mixed", "shared") else 2)
    for contender in taking_part:
        check(inputs, contender.prepare(inputs))


def test_pages_lie_in_any_order_and_parts_are_batches_of_their_own() -> None:
    inputs = inputs_of("mixed")
    order = inputs.whole.host.indices.tolist()
    assert sorted(order) == list(range(len(order))) != order
    rows, chunk = inputs.one_each, inputs.others
    assert (len(rows.rows), chunk.rows) == (3, (part_of("cases").Row(30, 50),))
    assert rows.host.indices.tolist() + chunk.host.indices.tolist() == order
    assert chunk.host.qo_indptr.tolist() == [0, 30]
    assert chunk.host.last_page_len.tolist() == [2]
    assert len(inputs.with_room(rows)) == 3 * 40_960 // 16
    assert inputs_of("decode").others is None
    assert inputs_of("prefill").one_each is None


@pytest.mark.parametrize("kind", ROWS)
def test_what_needs_cuda_says_so(kind: str) -> None:
    inputs = inputs_of(kind)
    others = [one for name, one in contenders().items() if name not in OURS and kind in one.kinds]
    assert others
    for contender in others:
        assert str(contender.prepare(inputs)).endswith("needs CUDA")


# ---- FlashInfer and flash-attn, on stand-ins


def attend(query: Tensor, pages: Tensor, starts: Tensor, indptr: Tensor, indices: Tensor, last: Tensor) -> Tensor:
    """From what a wrapper's plan was given."""
    results = []
    for row, (first, end) in enumerate(pairwise(indptr.tolist())):
        length = (end - first - 1) * 16 + int(last[row])
        both = pages[indices[first:end].long()].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]  # [2, L, K, D]
        results.append(dense_row(query[starts[row] : starts[row + 1]], *both))
    return torch.cat(results)


class StandIn:
    """Each of FlashInfer's wrappers: remembers what it was to plan, and computes it."""

    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.name, self.layout = name, kwargs.get("kv_layout") or args[-1]

    def plan(self, *args: Any, **given: Any) -> None:
        self.table, self.given = args or tuple(given[name] for name in HOLISTIC), given

    def run(self, query: Tensor, pages: Tensor, *rest: Any, out: Tensor | None = None, **given: Any) -> Any:
        assert self.layout == "HND"
        assert self.given["sm_scale"] == 16**-0.5
        if self.name == "MultiLevelCascadeAttentionWrapper":
            assert self.given["causal"]
            return self.together(query, pages)
        if self.name == "BatchPODWithPagedKVCacheWrapper":
            assert given == {"causal_p": True}
            return attend(query, pages, *self.table[:4]), attend(rest[0], rest[1], *self.table[4:])
        assert out is not None
        if self.name == "BatchDecodeWithPagedKVCacheWrapper":
            return out.copy_(attend(query, pages, torch.arange(len(query) + 1), *self.table))
        assert self.given["causal"]
        if self.name == "BatchPrefillWithPagedKVCacheWrapper":
            return out.copy_(attend(query, pages, *self.table))
        starts, indptr, indices, lengths = self.table
        return out.copy_(attend(query, pages, starts, indptr, indices, (lengths - 1) % 16 + 1)), given["lse"]

    def together(self, query: Tensor, pages: Tensor) -> Tensor:
        """Of each row what it shares, and then its own pages, as one row."""
        starts, indptr, indices, last = (level[:2] for level in self.table[:4])
        assert starts[0].tolist() == [0, len(query)]
        shared, own = indices[0], indices[1].split(indptr[1].diff().tolist())
        assert len(shared) == int(indptr[0][1])
        assert last[0].tolist() == [16]
        whole = [torch.cat([shared, numbers]) for numbers in own]
        ends = torch.tensor([0, *(len(numbers) for numbers in whole)]).cumsum(0)
        return attend(query, pages, starts[1], ends, torch.cat(whole), last[1])


HOLISTIC = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")


FLASHINFER = [
    "flashinfer:decode",
    "flashinfer:decode-tensor-cores",
    "flashinfer:fa2",
    "flashinfer:fa3",
    "flashinfer:batch-attention",
    "flashinfer:batch-pod",
    "flashinfer:cascade",
]


@pytest.mark.parametrize("name", FLASHINFER)
def test_flashinfers_wrappers_are_given_the_right_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrappers = part_of("flashinfer_wrappers")
    monkeypatch.setattr(wrappers, "_class_of", lambda of, _: lambda *args, **given: StandIn(of, *args, **given))
    for kind in contenders()[name].kinds:
        inputs = inputs_of(kind)
        check(inputs, contenders()[name].prepare(inputs))


def test_calls_fit_flashinfers_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer = pytest.importorskip("flashinfer", exc_type=ImportError)
    wrappers = part_of("flashinfer_wrappers")

    def specified(name: str, _: object) -> mock.Mock:
        found: mock.Mock = mock.create_autospec(getattr(flashinfer, name))
        found.return_value.run.return_value = (torch.zeros(0), torch.zeros(0))
        return found

    monkeypatch.setattr(wrappers, "_class_of", specified)
    for name in FLASHINFER:
        for kind in contenders()[name].kinds:
            contenders()[name].prepare(inputs_of(kind))(0)


def test_a_flashinfer_that_lacks_a_wrapper_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(__version__="0.1"))
    inputs = SimpleNamespace(device=torch.device("cuda"))
    assert part_of("flashinfer_wrappers").batch_pod(inputs) == "FlashInfer 0.1 has no BatchPODWithPagedKVCacheWrapper"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "this is 8.0" in part_of("flashinfer_wrappers").prefill_fa3(inputs)


class FlashAttn:
    """flash-attn's two functions."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, softmax_scale: float, causal: bool, block_table: Tensor,
    ) -> Tensor:  # fmt: skip
        assert causal
        assert softmax_scale == 16**-0.5
        starts, ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        assert max_seqlen_q == max(end - start for start, end in pairwise(starts))
        lengths = [end - start for start, end in pairwise(ends)]
        assert max_seqlen_k == max(lengths)
        assert (k.shape[1], block_table.dtype) == (256, torch.int32)
        rows = [
            [pages[block_table[row].long()].flatten(0, 1)[:length] for pages in (k, v)]
            for row, length in enumerate(lengths)
        ]
        of_rows = [(q[start:end], *both) for (start, end), both in zip(pairwise(starts), rows, strict=True)]
        return torch.cat([dense_row(*row) for row in of_rows])

    @classmethod
    def flash_attn_with_kvcache(
        cls, q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, **given: Any
    ) -> Tensor:
        starts = torch.arange(len(q) + 1)
        ends = torch.tensor([0, *cache_seqlens.cumsum(0).tolist()])
        given |= {"cu_seqlens_q": starts, "cu_seqlens_k": ends, "max_seqlen_q": 1}
        most = int(cache_seqlens.max())
        return cls.flash_attn_varlen_func(q[:, 0], k_cache, v_cache, max_seqlen_k=most, **given)[:, None]


@pytest.mark.parametrize("kind", ROWS)
def test_flash_attn_is_given_the_right_batch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", FlashAttn)
    flash_attention, inputs = part_of("flash_attention"), inputs_of(kind)
    monkeypatch.setattr(flash_attention, "needs_cuda", lambda _: False)
    check(inputs, flash_attention.with_table(inputs))


@pytest.mark.parametrize("kind", ROWS)
def test_flash_attn_3_is_given_the_right_batch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", FlashAttn3)
    flash_attention, inputs = part_of("flash_attention"), inputs_of(kind)
    monkeypatch.setattr(flash_attention, "needs_cuda", lambda _: False)
    check(inputs, flash_attention.version_3(inputs))


class FlashAttn3:
    """flash-attn 3's function, which takes packed queries."""

    @staticmethod
    def flash_attn_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor, cu_seqlens_q: Tensor,
        max_seqlen_q: int, softmax_scale: float, causal: bool,
    ) -> Tensor:  # fmt: skip
        assert (causal, softmax_scale, page_table.dtype) == (True, 16**-0.5, torch.int32)
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        rows = [
            [pages[page_table[row].long()].flatten(0, 1)[:length] for pages in (k_cache, v_cache)]
            for row, length in enumerate(cache_seqlens.tolist())
        ]
        queries = q.split(cu_seqlens_q.diff().tolist())
        return torch.cat([dense_row(query, *both) for query, both in zip(queries, rows, strict=True)])


@pytest.mark.parametrize("kind", ROWS)
def test_torch_is_given_the_right_batch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_varlen, inputs, real = part_of("torch_varlen"), inputs_of(kind), importlib.import_module

    def varlen_attn(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
        scale: float, window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor, block_table: Tensor,
        num_splits: int | None,
    ) -> Tensor:  # fmt: skip
        how = ((-1, -1), None) if max_q == 1 else ((-1, 0), 1)
        assert (window_size, num_splits, enable_gqa) == (*how, True)
        assert cu_seq_k.diff().tolist() == seqused_k.tolist()
        return FlashAttn.flash_attn_varlen_func(
            query, key, value, cu_seqlens_q=cu_seq_q, cu_seqlens_k=cu_seq_k, max_seqlen_q=max_q, max_seqlen_k=max_k,
            softmax_scale=scale, causal=True, block_table=block_table,
        )  # fmt: skip

    stand_in = SimpleNamespace(varlen_attn=varlen_attn)
    monkeypatch.setattr(torch_varlen, "importlib", SimpleNamespace(import_module=lambda name: stand_in))
    monkeypatch.setattr(torch_varlen, "needs_cuda", lambda _: False)
    monkeypatch.setattr(torch_varlen, "backend_named", lambda _: SimpleNamespace(installation=NothingToBuild()))
    check(inputs, torch_varlen.with_table(inputs))
    assert importlib.import_module is real


@pytest.mark.parametrize("package", ["flash-attn 2", "flash-attn 3", "torch"])
@pytest.mark.parametrize("kind", ["prefill", "mixed"])
def test_backends_of_other_packages_are_given_pages_that_they_take(
    package: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed = stand_in_for(package, monkeypatch)
    monkeypatch.setattr(part_of("ours"), "needs_cuda", lambda _: False)
    inputs, name = inputs_of(kind), f"paged_attention:{PACKAGES[package]}"
    launch = contenders()[name].prepare(inputs)
    for number in (0, 1):
        found = launch(number)[0][: inputs.case.tokens]
        torch.testing.assert_close(found, dense(inputs), rtol=1e-4, atol=1e-5)
    assert {call.keys.shape[1] for call in handed.calls} == {16 if package == "flash-attn 3" else 256}


# ---- how they are checked and timed


@pytest.mark.parametrize("kind", ROWS)
def test_one_wrong_head_of_one_token_is_found(kind: str) -> None:
    checking, inputs = part_of("checking"), inputs_of(kind)
    expected = checking.dense(inputs)
    wrong = expected.clone()
    wrong[-1, 2] *= 1.03
    assert checking.deviation([wrong[:1], wrong[1:]], expected) == pytest.approx(0.03, rel=1e-3)
    assert checking.deviation([expected], expected) == 0
    wrong[0, 0, 0] = torch.nan
    assert checking.deviation([wrong], expected) == torch.inf
    with pytest.raises(ValueError, match="it returned"):
        checking.deviation([wrong[:-1]], expected)


def test_what_rounds_to_bfloat16_passes_and_a_missing_key_does_not() -> None:
    checking, inputs = part_of("checking"), inputs_of("decode")
    expected = dense(inputs)
    assert checking.deviation([expected.bfloat16()], expected) < checking.TOLERANCE
    keys, values = keys_and_values(inputs, 3)
    without = torch.cat([expected[:3], dense_row(inputs.whole.query[3:], keys[:-1], values[:-1])])
    assert checking.deviation([without], expected) > checking.TOLERANCE


def contender_of(prepare: Callable[[Any], Any], name: str = "one") -> Any:
    return part_of("contenders").OpContender(name, part_of("cases").KINDS, prepare)


def raises(*_: object) -> Any:
    raise RuntimeError("no kernel\nfor this")


def test_whatever_goes_wrong_is_the_remark_of_a_row() -> None:
    measuring, inputs = part_of("measuring"), inputs_of("decode")
    expected = part_of("checking").dense(inputs)

    def measured(prepare: Callable[[Any], Any]) -> Any:
        return measuring.measure(contender_of(prepare), inputs, expected)

    assert measured(lambda _: "no such thing") == measuring.Measured(remark="no such thing")
    assert measured(raises) == measuring.Measured(remark="RuntimeError: no kernel")
    assert measured(lambda _: raises).remark == "RuntimeError: no kernel"
    assert "it returned [3, 4, 16]" in measured(lambda _: lambda number: (expected[1:],)).remark
    off = measured(lambda _: lambda number: (2 * expected,))
    assert (off.differs, off.us > 0) == (True, True)
    right = measured(lambda _: lambda number: (expected,))
    assert (right.differs, right.off, right.timed) == (False, 0.0, "by the clock")


def on_cuda(copies: int) -> Any:
    return torch.device("cuda"), copies


@pytest.mark.parametrize(
    ("us", "copies", "launches"), [(10.0, 1, 20), (10.0, 200, 200), (1000.0, 200, 30), (20_000.0, 1, 3)]
)
def test_launches_go_through_all_copies_unless_they_are_long(
    us: float, copies: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring = part_of("measuring")
    monkeypatch.setattr(measuring, "launched", lambda *_, **__: us)
    monkeypatch.setattr(measuring, "captured", lambda launch, launches: us)
    found = measuring.timed_launches(lambda number: (), *on_cuda(copies))
    assert found == (us, f"a graph of {launches}", "")


def test_what_cannot_be_captured_is_timed_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring = part_of("measuring")
    monkeypatch.setattr(measuring, "launched", lambda *_, **__: 50.0)
    monkeypatch.setattr(measuring, "captured", raises)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    found = measuring.timed_launches(lambda number: (), *on_cuda(1))
    assert found == (50.0, "20 by the host", "not captured: RuntimeError: no kernel")
    monkeypatch.setattr(torch.cuda, "synchronize", raises)
    with pytest.raises(measuring.LostDeviceError):
        measuring.timed_launches(lambda number: (), *on_cuda(1))


@pytest.mark.parametrize(
    ("size", "most", "copies"), [(2**26, 20, 3), (2**28, 20, 1), (2**17, 20, 21), (2**17, 511, 512)]
)
def test_there_are_as_many_copies_as_no_cache_holds(size: int, most: int, copies: int) -> None:
    launches = importlib.import_module("cold_launches")
    assert len(launches.copies_of(torch.empty(size, dtype=torch.uint8, device="meta"), most)) == copies


def test_a_graph_of_launches_is_timed_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = importlib.import_module("cold_launches")
    numbers: list[int] = []
    done: list[str] = []

    class FakeGraph:
        def replay(self) -> None:
            done.append("replay")

        def reset(self) -> None:
            done.append("reset")

    class FakeEvent:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None: ...

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: object) -> float:
            return 6.0 - 0.5 * len(done)  # milliseconds, each replay faster

    monkeypatch.setattr(launches, "new_graph", FakeGraph)
    monkeypatch.setattr(launches, "captured_into", lambda graph, pool, device, launch: launch())
    monkeypatch.setattr(launches, "_stream_of_captures", lambda: None)
    for name in ("synchronize", "current_device", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    assert launches.captured(numbers.append, launches=10, replays=3) == (6.0 - 0.5 * 4) * 1000 / 10
    assert numbers == [0, *range(10)]
    assert done == ["replay"] * 4 + ["reset"]
    done.clear()
    numbers.clear()
    assert launches.launched(numbers.append, launches=4, replays=2) == 6.0 * 1000 / 4
    assert numbers == [*range(4)] * 3


def test_modules_are_built_once_and_those_that_need_another_later(monkeypatch: pytest.MonkeyPatch) -> None:
    building, built = part_of("building"), []
    monkeypatch.setattr(building, "_build", lambda one, *_: built.append((one.name, _[-1] is not None)))
    lines: list[str] = []
    heads = part_of("cases").Heads(*SMALL)
    building.build([*contenders().values()], heads, torch.device("cuda"), torch.bfloat16, lines.append)
    assert len(built) == 5
    assert [name for name, waits in built if waits] == ["flashinfer:batch-pod"]
    assert {"fa2", "fa3", "pod"} < set(lines[1].partition(": ")[2].split(", "))
    built.clear()
    building.build([*contenders().values()], heads, CPU, torch.float32, lines.append)
    assert built == []


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ROWS)
def test_our_ops_are_captured_and_equal_dense_attention(kind: str) -> None:
    measuring, heads = part_of("measuring"), part_of("cases").Heads(*QWEN)
    with torch.inference_mode():
        inputs = part_of("inputs").Inputs(case_of(kind), heads, torch.device("cuda"), torch.bfloat16)
        for contender in (contenders()[name] for name in OURS if kind in contenders()[name].kinds):
            found = measuring.measure(contender, inputs, part_of("checking").dense(inputs))
            assert (found.differs, found.remark) == (False, "")
            assert found.timed.startswith("a graph of")


@pytest.mark.gpu
def test_after_a_capture_that_fails_others_are_captured() -> None:
    launches, numbers = importlib.import_module("cold_launches"), torch.ones(1000, device="cuda")
    for _ in range(2):
        with pytest.raises(RuntimeError):
            launches.captured(lambda number: (numbers + 1).sum().item(), launches=2)
        assert 0 < launches.captured(lambda number: numbers + 1) < launches.launched(lambda number: numbers + 1, 1)


# ---- the script


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Runs it in this process on the tiny shape, with two cases; returns what it printed, and its JSON."""
    attention = importlib.import_module("attention")
    monkeypatch.setattr(importlib.import_module("common"), "read_bandwidth", lambda *_: 1e10)
    some = [case_of(kind)._replace(name=f"{kind} by hand") for kind in ROWS]
    monkeypatch.setattr(attention, "cases_of", lambda kinds, quick: [case for case in some if case.kind in kinds])

    def run(*arguments: str) -> tuple[Any, dict[str, Any]]:
        app, file = typer.Typer(), tmp_path / "attention.json"
        app.command()(attention.main)
        monkeypatch.setattr(sys, "argv", ["attention.py", *arguments])
        common = ["--size", "tiny", "--device", "cpu", "--json", str(file), "--commit", "none"]
        done = CliRunner().invoke(app, [*common, *arguments])
        return done, json.loads(file.read_text()) if file.exists() else {}

    return run


def test_the_script_prints_tables_and_writes_json(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring = part_of("measuring")
    times = iter([1000.0, *range(10, 100)])
    monkeypatch.setattr(measuring, "by_the_clock", lambda launch: float(next(times)))
    done, found = script("--check")
    assert done.exit_code == 0, done.output
    results = found["attention"]
    assert len(results) == 9 + 11 + 13 + 11
    assert found["machine"]["commit"] == "none"
    assert {"torch", "triton"} & {*found["machine"]["versions"]}
    first = results[0]
    assert (first["contender"], first["case"], first["figures"]["us"]) == ("decode_attention", "decode by hand", 10)
    assert (first["keys"], first["rows"], first["new_tokens"]) == (334, 4, 4)
    assert first["nbytes"] == 4 * (334 * 2 * 2 * 16 + 4 * 2 * 4 * 16)
    assert first["figures"]["bytes_per_s"] == pytest.approx(first["nbytes"] / 10e-6)
    assert first["figures"]["of_bandwidth"] == pytest.approx(first["nbytes"] / 10e-6 / found["read_bandwidth"])
    assert first["product"]["flops_per_s"] == pytest.approx(2 * 512**3 / 1e-3)
    assert first["figures"]["of_product"] == pytest.approx(first["flops"] / 10e-6 / first["product"]["flops_per_s"])
    assert first["off"] < 1e-5
    printed = done.output
    for title in ("Decode", "Prefill", "Mixed", "Shared"):
        assert f"**{title}: 4 query heads, 2 kv heads of 16**" in printed
    lines = [line for line in printed.splitlines() if line.startswith("| decode by hand")]
    assert [line.split(" | ")[1:4] for line in lines[:2]] == [
        ["decode_attention", "10.0", "1.00"],
        ["paged_attention", "11.0", "1.10"],
    ]
    assert len(lines) == 9
    assert printed.count("needs CUDA") == 7 + 9 + 10 + 8


def result(contender: str, case: str, us: float | None = None, remark: str = "") -> dict[str, Any]:
    measuring, heads = part_of("measuring"), part_of("cases").Heads(*SMALL)
    found, peaks = measuring.Measured(us, remark=remark), measuring.Peaks(1e12, 1e14, "two matrices")
    named = case_of("decode")._replace(name=case)
    return dict(measuring.result_of(contender_of(raises, contender), named, heads, 2, found, peaks))


def test_the_fastest_come_first_and_what_never_runs_is_one_row() -> None:
    results = [
        result("a", "first", 30.0),
        result("b", "first", 20.0),
        result("missing", "first", remark="not there"),
        result("some", "first", remark="too large"),
        result("a", "second", 10.0),
        result("b", "second", 12.5),
        result("missing", "second", remark="not there"),
        result("some", "second", 25.0),
    ]
    (table,) = part_of("table").attention_tables(results)
    assert list(table.columns)[:4] == ["case", "contender", "us", "x best"]
    assert [row[:4] for row in table.rows] == [
        ["first", "b", "20.0", "1.00"],
        ["first", "a", "30.0", "1.50"],
        ["first", "some", "", ""],
        ["second", "a", "10.0", "1.00"],
        ["second", "b", "12.5", "1.25"],
        ["second", "some", "25.0", "2.50"],
        ["all", "missing", "", ""],
    ]
    assert [row[-1] for row in table.rows] == ["", "", "too large", "", "", "", "not there"]
    assert "two matrices: 100.0 TFLOP/s" in table.note


def test_what_differs_is_marked_and_ends_in_an_error(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    contenders_module = importlib.import_module("attention_ops.contenders")
    wrong = contender_of(lambda inputs: lambda number: (inputs.whole.query,), "wrong")
    monkeypatch.setattr(contenders_module, "CONTENDERS", (*contenders_module.CONTENDERS, wrong))
    done, found = script("--check", "--only", "prefill", "--contenders", "wrong,paged_attention")
    assert done.exit_code == 1
    assert "DIFFERS" in done.output
    assert found["failures"] == ["prefill by hand: wrong differs from dense attention"]
    assert [one["differs"] for one in found["attention"]] == [False, True]
    done, found = script("--only", "prefill", "--contenders", "wrong,paged_attention")
    assert done.exit_code == 0, "without --check nothing is compared"
    assert [one["off"] for one in found["attention"]] == [None, None]


def test_a_lost_device_ends_the_run_with_what_there_is(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attention, measuring = importlib.import_module("attention"), part_of("measuring")
    measured = iter([measuring.Measured(us=5.0)])

    def measure(*_: object) -> Any:
        for found in measured:
            return found
        raise measuring.LostDeviceError("illegal memory access")

    monkeypatch.setattr(attention, "measure", measure)
    done, found = script("--only", "decode")
    assert done.exit_code == 1
    assert len(found["attention"]) == 1
    assert "illegal memory access; the device is unusable" in found["failures"][0]


def test_a_case_that_does_not_fit_is_a_row_for_each_contender(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = part_of("inputs")

    def too_large(*_: object) -> None:
        raise inputs.TooLargeError("its pages take 90.0 GB")

    monkeypatch.setattr(inputs.Inputs, "_check_room", too_large)
    done, found = script("--only", "mixed")
    assert {one["remark"] for one in found["attention"]} == {"TooLargeError: its pages take 90.0 GB"}
    assert done.exit_code == 0


def test_a_case_whose_check_fails_is_measured_without(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("attention"), "dense", raises)
    done, found = script("--only", "prefill", "--contenders", "paged_attention", "--check")
    assert done.exit_code == 1
    assert found["failures"] == ["prefill by hand is not checked: RuntimeError: no kernel"]
    assert [one["figures"]["us"] > 0 for one in found["attention"]] == [True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "70B"], "--size 70B: there are 0.6B, 8B, tiny"),
        (["--only", "decode,speed"], "--only: no speed; there are decode, prefill, mixed, shared"),
        (["--only", ","], "--only: no kind is named; there are"),
        (["--contenders", "nosuch"], "--contenders: no nosuch; there are decode_attention, "),
        (
            ["--only", "prefill", "--contenders", "decode_attention"],
            "computes cases of prefill",
        ),
    ],
)
def test_wrong_arguments_are_refused(script: Any, arguments: list[str], message: str) -> None:
    done, found = script(*arguments)
    assert done.exit_code != 0
    assert message in done.output + str(done.exception)
    assert found == {}


def test_a_published_run_has_a_table(script: Any) -> None:
    _, found = script("--only", "decode", "--check")
    figures = module_at(CHECKOUT / "docs" / "figures.py")
    shown = "\n".join(figures._tables(found["attention"], *figures.TABLES["attention"]))
    assert "**Decode, 4 query heads, 2 kv heads of size 16**" in shown
    assert "| decode by hand | decode_attention |" in shown
    assert "FlashInfer needs CUDA" in shown
