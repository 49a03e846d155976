"""Latent attention by plan: on the CPU, and all of FlashInfer's that it relies on, without a GPU."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any
from unittest import mock

import pytest
import torch

from compiled_llm_ops import planned_latent_attention, planned_latent_attention_lse
from support.ops.latent_rows import MIXES, LatentRows

PLANNED = [name for name in MIXES if name != "rows without tokens"]


@pytest.mark.parametrize("mix", PLANNED)
def test_it_equals_dense_attention(mix: str, seed: int) -> None:
    rows = LatentRows(*MIXES[mix], seed=seed)
    out, lse = planned_latent_attention_lse(*rows.planned_arguments())
    expected, expected_lse = rows.expected()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)
    assert torch.equal(out, planned_latent_attention(*rows.planned_arguments()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qo_indptr": torch.zeros(2, dtype=torch.int32)}, r"must be \[3\] for 2 rows"),
        ({"indptr": torch.zeros(3)}, "indptr must be int32"),
        ({"query_rope": torch.zeros(2, 4, 15)}, r"must be \[P, S, 32 \+ 15\]"),
    ],
)
def test_wrong_arguments_raise(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned_latent_attention(*LatentRows([3, 5]).planned_arguments()._replace(**change))


# ---- FlashInfer, mocked; skipped where it does not import


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A workspace on the CPU, and FlashInfer's wrapper for latents as a mock with the real signatures."""
    support = pytest.importorskip("support.ops.mocked_flashinfer", exc_type=ImportError)
    from compiled_llm_ops.flashinfer import mla, workspace

    support.mocked.__wrapped__(monkeypatch)
    real = support.flashinfer.BatchMLAPagedAttentionWrapper
    wrapper = mock.create_autospec(real)
    wrapper.return_value._cached_module = mock.Mock()
    wrapper.return_value._cached_module.plan.return_value = list(range(1, 1 + len(mla.FIELDS)))
    monkeypatch.setattr(support.flashinfer, real.__name__, wrapper)
    monkeypatch.setattr(mla, "has_kernels", lambda device: False)
    return real, wrapper.return_value, workspace.FlashInferWorkspace("cpu", 1024)


def rows_of_16_bits(lengths: list[int], queries: list[int] | None = None) -> LatentRows:
    return LatentRows(lengths, queries, heads=16, rank=512, size=64, page_size=16, dtype=torch.bfloat16)


def planned(theirs: Any, rows: LatentRows, captured_tokens: int = -1) -> Any:
    from compiled_llm_ops.contracts import PlannedBatch
    from compiled_llm_ops.flashinfer.plan import FlashInferPlan

    _, _, workspace = theirs
    plan = FlashInferPlan(workspace, 2**20)
    columns = (column.numpy() for column in rows.host_columns)
    geometry = rows.planned_arguments().geometry
    plan.decide(PlannedBatch(*columns, geometry, workspace.buffer, captured_tokens, 0))
    return plan


def test_wrapper_planner_and_launch_take_what_is_passed(theirs: Any) -> None:
    real, wrapper, workspace = theirs
    rows = rows_of_16_bits([20, 5, 700], [1, 3, 2])
    plan = planned(theirs, rows)
    assert set(wrapper.plan.call_args.kwargs) <= set(inspect.signature(real.plan).parameters)
    *memory, starts, pages, lengths, heads, rank, causal = wrapper._cached_module.plan.call_args.args
    assert len(memory) == 3
    assert starts.tolist() == [0, 1, 4, 6]
    assert pages.tolist() == rows.indptr.tolist()
    assert (lengths.tolist(), heads, rank, causal) == ([20, 5, 700], 16, 512, True)
    args = rows.planned_arguments(plan.tensor, workspace.buffer)
    seen: dict[str, Any] = {}

    def note(**kwargs: Any) -> None:
        seen.update(kwargs, numbers=wrapper._plan_info, scale=wrapper._sm_scale, indices=wrapper._kv_indices_buf)

    wrapper.run.side_effect = note
    out = torch.empty_like(args.query_latent)
    plan.kernels["latents"](plan, args, out, None)
    assert set(wrapper.run.call_args.kwargs) <= set(inspect.signature(real.run).parameters)
    assert seen["scale"] == args.scale
    assert seen["indices"] is args.indices
    assert seen["numbers"] == plan.numbers.tolist()
    assert seen["ckv_cache"].data_ptr() == args.pages.data_ptr(), "views of the pages, not copies"
    assert seen["kpe_cache"].data_ptr() == args.pages[..., 512:].data_ptr()
    assert wrapper._kv_indices_buf is wrapper._float_workspace_buffer is wrapper._int_workspace_buffer is None


def test_a_plan_of_other_rows_is_refused(theirs: Any) -> None:
    plan = planned(theirs, rows_of_16_bits([20, 5]))
    args = rows_of_16_bits([20, 5, 1]).planned_arguments(plan.tensor, theirs[2].buffer)
    with pytest.raises(ValueError, match=r"the plan is of another batch: rows 3 \(planned: 2\)"):
        plan.kernels["latents"](plan, args, torch.empty_like(args.query_latent), None)


def test_more_tiles_than_a_plan_has_room_for_are_refused() -> None:
    pytest.importorskip("flashinfer", exc_type=ImportError)
    from compiled_llm_ops.flashinfer.mla import check_works

    geometry = rows_of_16_bits([3]).planned_arguments().geometry._replace(query_heads=128)
    check_works(geometry, 8192 - 132 - 64 - 1, 64, 132)
    with pytest.raises(
        ValueError, match=r"8192 tokens of 64 rows with 128 heads are up to 16580 tiles.* room for 16384"
    ):
        check_works(geometry, 8192, 64, 132)


def test_what_is_private_to_flashinfer_is_as_it_is_known() -> None:
    support = pytest.importorskip("support.ops.mocked_flashinfer", exc_type=ImportError)
    from compiled_llm_ops.flashinfer import mla

    real = support.flashinfer.BatchMLAPagedAttentionWrapper
    scheduler = (support.DATA / "include/flashinfer/attention/scheduler.cuh").read_text()
    struct = scheduler[scheduler.index("struct MLAPlanInfo {") :]
    vector = struct[struct.index("return {") + 8 : struct.index("};")]
    assert tuple(name.strip() for name in vector.split(",")) == mla.FIELDS
    body = scheduler[scheduler.index("inline cudaError_t MLAPlan(") :]
    assert f"max_total_num_works = {mla.MOST_WORKS};" in body
    assert body.count("sizeof(IdType) * max_total_num_works") == 9
    assert body.count("sizeof(IdType) * num_sm") == 5
    assert "cta_tile_q = 64;" in body
    assert body.count("2 * num_clusters * cluster_tile_q *") == 2
    for run in ("batch_mla_run.cu", "batch_mla_sm90_run.cu"):
        source = (support.DATA / "csrc" / run).read_text()
        for stride in ("ckv_stride_page", "ckv_stride_n", "kpe_stride_page", "kpe_stride_n", "q_nope_stride_h"):
            assert f"params.{stride} = {stride};" in source, "pages and queries may be views"

    def used(function: Any) -> set[str]:
        source = inspect.getsource(inspect.unwrap(function))
        nodes = ast.walk(ast.parse(textwrap.dedent(source)))
        return {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"}

    assert {"_cached_module", "_plan_info", "_sm_scale"} <= used(real.plan)
    private = {"_plan_info", "_sm_scale", "_int_workspace_buffer", "_float_workspace_buffer", "_kv_indices_buf"}
    assert private <= used(real.run)
    assert "_use_cuda_graph" not in used(real.run), "one wrapper serves captured and eager launches"
    assert inspect.signature(real.run).parameters["return_lse_base_on_e"].default is False
