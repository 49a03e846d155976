"""FlashInfer's plans, as far as they go without kernels."""

from __future__ import annotations

import operator
from contextlib import nullcontext
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from compiled_llm.compilation.graphs.captured_shapes import CapturedShapes
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.config import WrapConfig
from compiled_llm.execution.plans import Planner
from compiled_llm.execution.state.prefill_room import PrefillRoom
from compiled_llm_ops import Geometry, PageTable
from compiled_llm_ops.attention import plan as plan_op
from compiled_llm_ops.contracts import PagedAttention, PlanPagedAttention
from compiled_llm_ops.flashinfer import backend, splitting, versions, workspace
from compiled_llm_ops.flashinfer.append import readable
from compiled_llm_ops.flashinfer.splitting import SPLIT, WHOLE
from compiled_llm_ops.protocol import CapturedLaunch, owner_of
from support.ops.mocked_flashinfer import DATA, GEOMETRY, HOST, NUMBERS, make_plan, mocked, tensors

__all__ = ["mocked"]


def test_a_plan_waits_for_kernels_that_are_being_built_until_its_first_launch(mocked, monkeypatch):
    built, make = Event(), workspace.make_wrapper

    def slow(*args: Any) -> Any:
        built.wait()
        return make(*args)

    monkeypatch.setattr(workspace, "make_wrapper", slow)
    monkeypatch.setattr(workspace, "append_one_token", mock.Mock())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    mocked.workspace.load(GEOMETRY)
    plan = make_plan(mocked)
    columns = PageTable(*(column.clone() for column in HOST))
    plan.plan(columns)
    for column in columns:
        column.zero_()  # they are free to be rewritten
    mocked.planner.assert_not_called()
    built.set()
    query, pages, out, lse = tensors()
    plan.run(query, pages, out, lse, 0.1)
    assert mocked.planner.call_args.args[5].tolist() == [41, 2]
    plan.plan(HOST)
    assert mocked.planner.call_count == 2
    plan.run(query, pages, out, lse, 0.1)
    assert mocked.planner.call_count == 2, "what was planned last"
    mocked.prefill.assert_called_once()


@pytest.mark.parametrize(
    ("query_heads", "max_batch_size", "given", "everything_fits"),
    [(16, 64, None, True), (32, 64, None, True), (32, 64, 2**30, True),
     (16, 64, 2**20, False), (16, 4096, None, True), (16, 1, None, True)],
)  # fmt: skip
def test_workspace_holds_all_prefills_and_within_bounds_those_to_record(
    mocked, monkeypatch, query_heads, max_batch_size, given, everything_fits
):
    def unallocated(device: torch.device, nbytes: int) -> SimpleNamespace:
        return SimpleNamespace(buffer=torch.empty(nbytes, dtype=torch.uint8, device="meta"))

    monkeypatch.setattr(backend, "FlashInferWorkspace", unallocated)
    group = Geometry(query_heads, 8, 128, 16, -1, 0.0, torch.bfloat16, torch.bfloat16)
    config = WrapConfig(max_batch_size=max_batch_size, workspace_bytes=given)
    shapes = CapturedShapes(max_batch_size, weights=1, max_row_tokens=40_960, max_tokens=8192).all()
    planner = Planner(
        [group],
        config,
        torch.device("cuda"),
        max_row_tokens=40_960,
        room=PrefillRoom(8193, max_batch_size + 1, 0),
        shapes=shapes,
    )
    assert all(map(planner.fits, shapes))
    long_rows = [
        shape._replace(schedule=backend.BACKEND.best_schedule([group], [shape.tokens], [40_960], torch.device("cuda")))
        for shape in shapes
    ]
    pays = [shape for shape in long_rows if shape.schedule == SPLIT]
    assert max(shape.tokens for shape in pays) == {16: 1536, 32: 768}[query_heads]
    assert all(map(planner.fits, pays)) is everything_fits
    assert not any(planner.fits(shape._replace(schedule=SPLIT)) for shape in shapes if shape.tokens > pays[-1].tokens)
    if given is None:
        assert splitting.split_bytes(group, 132) <= planner.workspace_bytes <= 256 * 2**20
    else:
        assert planner.workspace_bytes == given


def test_run_reads_the_table_it_is_given(mocked):
    plan = make_plan(mocked)
    with pytest.raises(RuntimeError, match="nothing was planned"):
        plan.run(*tensors(), 0.1)
    plan.plan(HOST)
    wrapper = mocked.wrapper
    read = []
    wrapper.run.side_effect = lambda *_, **__: read.append(wrapper._paged_kv_last_page_len_buf)
    advanced = HOST._replace(last_page_len=HOST.last_page_len + 1)
    plan.run(*tensors(), 0.1)
    plan.run(*tensors(), 0.1, table=advanced)
    assert [id(column) for column in read] == [id(HOST.last_page_len), id(advanced.last_page_len)]
    assert wrapper._paged_kv_last_page_len_buf is None, "what a graph made is let go"


def test_plans_of_one_geometry_share_the_wrapper_and_nothing_else(mocked):
    first, second = (make_plan(mocked) for _ in range(2))
    planner = mocked.planner
    first.plan(HOST)
    second.plan(HOST)
    mocked.prefill.assert_called_once()
    workspaces = [call.args[1].data_ptr() for call in planner.call_args_list]
    pinned = [call.args[2].data_ptr() for call in planner.call_args_list]
    assert len(set(workspaces)) == len(set(pinned)) == 2
    read = []
    for plan in (first, second, first):
        plan.run(*tensors(), 0.1)
        read.append(mocked.wrapper._int_workspace_buffer.data_ptr())
    assert read == [workspaces[0], workspaces[1], workspaces[0]]


def test_staging_buffers_take_turns(mocked):
    plan = make_plan(mocked)
    planner = mocked.planner
    for _ in range(workspace.STAGING_BUFFERS + 1):
        plan.plan(HOST)
    addresses = [call.args[2].data_ptr() for call in planner.call_args_list]
    assert len(set(addresses)) == workspace.STAGING_BUFFERS >= 3
    assert addresses[0] == addresses[-1]


def capture(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        plan.run(*tensors(), 0.1)


def test_what_a_captured_launch_has_read_must_not_change(mocked, monkeypatch):
    plan, other = [*NUMBERS[:3], 64, *NUMBERS[4:]], make_plan(mocked, captured_tokens=2)
    other.plan(HOST)
    other.run(*tensors(), 0.1)
    mocked.planner.return_value = plan
    other.plan(HOST)  # nothing has captured it
    capture(other, monkeypatch)
    other.plan(HOST)
    mocked.planner.return_value = NUMBERS
    with pytest.raises(RuntimeError, match=r"a captured graph of 2 rows.*cta_tile_q was 64 and is now 3"):
        other.plan(HOST)


def test_nothing_is_planned_during_a_capture(mocked, monkeypatch):
    plan = make_plan(mocked, captured_tokens=2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="plan before the capture"):
        plan.plan(HOST)


def test_launches_read_what_the_op_wrote_to_numbers(mocked):
    plan = make_plan(mocked)
    plan.plan(HOST)
    assert plan.owner.numbers.tolist()[: len(NUMBERS)] == NUMBERS
    plan.run(*tensors(), 0.1)
    assert mocked.wrapper._plan_info == NUMBERS


def test_two_threads_may_launch_at_once(mocked):
    """One captures a graph while the other runs a step."""
    mine, other = make_plan(mocked), make_plan(mocked, captured_tokens=2)
    thread, launched = Thread(target=lambda: other.run(*tensors(), 0.1)), []

    def run(*_: Any, **__: Any) -> None:
        if not launched:
            thread.start()
            thread.join(0.5)  # the other one gets as far as it can meanwhile
        wrapper = mocked.wrapper
        launched.append((wrapper._int_workspace_buffer, wrapper._paged_kv_indices_buf, wrapper._float_workspace_buffer))

    mocked.wrapper.run.side_effect = run
    mine.plan(HOST)
    other.plan(HOST)
    mine.run(*tensors(), 0.1)
    thread.join()
    for plan, found in zip((mine, other), launched, strict=True):
        assert all(map(operator.is_, found, (plan.owner.tensor, HOST.indices, mocked.workspace.buffer)))


def test_numbers_of_another_plan_are_refused(mocked):
    plan, other = make_plan(mocked).owner, make_plan(mocked).owner
    table = (HOST.qo_indptr, HOST.indptr, HOST.last_page_len)
    for numbers, refused in ((plan.numbers, False), (other.numbers, True)):
        args = PlanPagedAttention(plan.tensor, numbers, *table, mocked.workspace.buffer, *GEOMETRY)
        with pytest.raises(ValueError, match="numbers belong to another plan") if refused else nullcontext():
            plan_op._cuda(args)
    mocked.planner.assert_called_once()


def test_a_launch_of_another_batch_is_refused(mocked):
    plan = make_plan(mocked)
    plan.plan(HOST)
    query, pages, out, lse = tensors()
    with pytest.raises(ValueError, match=r"plan is of another batch: tokens 1 \(planned: 2\)"):
        plan.run(query[:1], pages, out[:1], lse[:1], 0.1)
    with pytest.raises(ValueError, match=r"plan is of another batch: geometry .*head_dim=64"):
        plan.run(query, pages[..., :64], out, lse, 0.1)


def test_scales_by_head_go_into_queries_and_results(mocked):
    """FlashInfer has one number for all heads."""
    plan = make_plan(mocked, GEOMETRY._replace(kv_dtype=torch.float8_e4m3fn))
    plan.plan(HOST)
    _, pages, out, lse = tensors()
    query = torch.randn(2, 4, 128).bfloat16()
    before, results = query.clone(), torch.randn(2, 4, 128).bfloat16()
    mocked.wrapper.run.side_effect = lambda *_, out, **given: out.copy_(results)
    table = (HOST.qo_indptr, HOST.indptr, HOST.indices, HOST.last_page_len)
    args = PagedAttention(query, pages.to(torch.float8_e4m3fn), *table, plan.owner.tensor, mocked.workspace.buffer, 0.1)
    keys, values = torch.tensor([0.3, 2.0]), torch.tensor([0.5, 7.0])
    for key_scale, value_scale in ((keys, values), (keys, None), (None, values), (None, None)):
        plan.owner.launch(args._replace(key_scale=key_scale, value_scale=value_scale), out, lse)
        found = mocked.wrapper.run.call_args.args[0], out
        for states, scale, unscaled in zip(found, (key_scale, value_scale), (before, results), strict=True):
            of_heads = torch.ones(4) if scale is None else scale.repeat_interleave(2)
            assert torch.equal(states, (unscaled.float() * of_heads[:, None]).bfloat16())
    assert torch.equal(query, before)


def test_captured_launches_keep_their_number_of_tokens(mocked):
    plan = make_plan(mocked, captured_tokens=5)
    plan.plan(HOST)
    assert mocked.planner.call_args.args[6] == 5
    with pytest.raises(ValueError, match="6 tokens are more than captured_tokens=5"):
        plan.plan(HOST._replace(qo_indptr=torch.tensor([0, 3, 6], dtype=torch.int32)))


def test_a_plan_that_is_too_small_is_named(mocked):
    plan = make_plan(mocked)
    with pytest.raises(ValueError, match=r"200000 tokens of 2 rows need a plan of \d+ bytes; got 1048576"):
        plan.plan(HOST._replace(qo_indptr=torch.tensor([0, 1, 200_000], dtype=torch.int32)))
    mocked.planner.assert_not_called()


def test_plans_are_as_large_as_the_backend_says_and_pinned_memory_holds_them(mocked):
    for tokens in (2, 30_000):
        nbytes = backend.BACKEND.plan_bytes([GEOMETRY], torch.device("cpu"), tokens, 2)
        assert 4 * tokens <= nbytes <= 2**20
    make_plan(mocked).plan(HOST)
    _, tensor, pinned = mocked.planner.call_args.args[:3]
    assert pinned.numel() >= tensor.numel()


def test_a_plan_is_found_by_its_tensor_for_as_long_as_it_lives(mocked):
    plan = make_plan(mocked)
    tensor = plan.owner.tensor
    assert owner_of(tensor) is plan.owner
    assert owner_of(tensor[:3]) is plan.owner, "the address counts, not the view"
    for other in (tensor.clone(), tensor[1:]):
        with pytest.raises(RuntimeError, match=r"no plan lies at 0x[0-9a-f]+.*new_plan\(\)"):
            owner_of(other)
    del plan
    with pytest.raises(RuntimeError, match="no plan lies"):
        owner_of(tensor)


def test_decode_steps_take_little_workspace():
    """One query a row: their tiles are of 16 pairs, where prefill's are of 128."""
    decode, prefill = CapturedLaunch(64, 64, SPLIT), CapturedLaunch(1024, 65, SPLIT)
    sizes = [splitting.captured_split_bytes(GEOMETRY, own.tokens, own.rows, 132) for own in (decode, prefill)]
    assert sizes[0] < sizes[1] / 4


@pytest.mark.usefixtures("mocked")
def test_without_shared_keys_no_workspace_is_needed():
    whole = CapturedLaunch(64, 64, WHOLE)
    assert backend.BACKEND.workspace_bytes([GEOMETRY], torch.device("cpu"), whole) == 0


def test_strides_that_kernels_cannot_read_are_copied():
    fused = torch.arange(3 * 4 * 64, dtype=torch.float32).view(3, 4, 64).to(torch.bfloat16)
    assert readable(fused[:, 1:3]) is not fused
    assert readable(fused[:, 1:3]).data_ptr() == fused[:, 1:3].data_ptr()
    for unreadable in (fused.transpose(1, 2)[..., :3], fused[..., 1:9], fused[..., :63].contiguous()[..., :56]):
        copied = readable(unreadable)
        assert copied.is_contiguous()
        assert copied.data_ptr() != unreadable.data_ptr()
        torch.testing.assert_close(copied, unreadable, rtol=0, atol=0)


@pytest.mark.parametrize(("d", "padded"), [(1, 64), (64, 64), (71, 128), (96, 128), (129, 256), (512, 512)])
def test_head_size_is_padded_to_the_next_with_kernels(d, padded):
    assert versions.padded_head_dim(d) == padded


def test_head_size_beyond_all_kernels_raises():
    with pytest.raises(ValueError, match="head size 513 is larger than 512"):
        versions.padded_head_dim(513)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 96}, "pad it"),
        ({"query_heads": 5}, "no multiple"),
        ({"dtype": torch.float32}, "use torch.bfloat16"),
    ],
)
def test_geometry_without_kernels_raises(mocked, change, message):
    with pytest.raises(ValueError, match=message):
        make_plan(mocked, GEOMETRY._replace(**change)).plan(HOST)


def test_large_heads_need_a_version_with_their_kernels(mocked):
    """Ends with 0.6, whose tensor-core kernels reject 512 at their launch."""
    has_kernels = "USE_VO_SPLIT" in (DATA / "include/flashinfer/attention/prefill.cuh").read_text()
    expectation = nullcontext() if has_kernels else pytest.raises(ValueError, match=r"flashinfer-python>=0\.7")
    with expectation:
        make_plan(mocked, GEOMETRY._replace(head_dim=512)).plan(HOST)


def test_plans_of_a_model_have_one_size(mocked, monkeypatch):
    """Programs take it as a constant: another one would compile them again."""
    monkeypatch.setattr(backend, "FlashInferWorkspace", lambda device, nbytes: mocked.workspace)
    shapes = CapturedShapes(8, weights=1, max_row_tokens=40_960, max_tokens=8192).all()
    config = WrapConfig(max_batch_size=8, backend="flashinfer")
    groups = [GEOMETRY, GEOMETRY._replace(query_heads=16)]
    planner = Planner(
        groups, config, torch.device("cuda"), max_row_tokens=400, room=PrefillRoom(4096, 9, 0), shapes=shapes
    )
    keys = [
        planner.for_prefill(),
        planner.for_prefill(shapes[-1]),
        *(planner.for_decode(StepKey.decode(rows)) for rows in (1, 8)),
    ]
    sizes = {tensor.shape for plans in keys if plans is not None for tensor in plans.tensors}
    assert len(sizes) == 1
    assert len({tensor.data_ptr() for plans in keys if plans is not None for tensor in plans.tensors}) == 8
