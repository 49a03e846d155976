"""What FlashInfer, for which a mock stands, is given where layers attend by a variant as it has planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm_ops import flashinfer_arguments, flashinfer_variant
from compiled_llm_ops.contracts import FP8, Geometry
from compiled_llm_ops.flashinfer import hopper
from compiled_llm_ops.flashinfer.plan import FlashInferPlan
from compiled_llm_ops.flashinfer.splitting import SPLIT
from compiled_llm_ops.flashinfer.versions import sums_parts_wrongly
from compiled_llm_ops.variants.contracts import PlannedAttentionVariant
from support.ops.mocked_flashinfer import GEOMETRY, HOST, Mocked, make_plan, mocked as mocked, tensors
from support.ops.variants import registered


def of(name: str) -> Geometry:
    return GEOMETRY._replace(function=registered(name).key)


def launched(mocked: Mocked, owner: FlashInferPlan, name: str, given: list[Tensor]) -> Any:
    query, pages, out, lse = tensors()
    key, wants_lse = registered(name).key, registered(name).softmax
    arguments = (query, pages, *HOST, owner.tensor, mocked.workspace.buffer, key, given, 0.25)
    launch = owner.kernels["functions"]
    launch(owner, PlannedAttentionVariant(*arguments), out, lse if wants_lse else None)
    return mocked.wrapper.run.call_args


def test_flashinfer_builds_the_functor_and_is_given_tensors_and_sizes(mocked: Mocked) -> None:
    plan = make_plan(mocked, of("inkling"))
    plan.plan(HOST)
    functor = flashinfer_variant(registered("inkling").key)
    assert mocked.prefill.call_args.kwargs["jit_args"] == functor.jit_args(torch.bfloat16, torch.bfloat16, 128)
    bias = torch.randn(2, 4, 12)
    call = launched(mocked, plan.owner, "inkling", [bias])
    assert [own.shape for own in call.args[:2]] == [(2, 4, 128), (3, 2, 2, 16, 128)]
    assert call.args[2] is bias
    assert call.args[2:] == tuple(flashinfer_arguments(registered("inkling").key, [bias], 0.25))
    assert set(call.kwargs) == {"out", "lse", "return_lse"}, "the functor has the scale"


def test_other_layers_are_launched_as_ever_and_have_wrappers_of_their_own(mocked: Mocked) -> None:
    for geometry in (GEOMETRY, of("alibi"), of("window")):
        make_plan(mocked, geometry).plan(HOST)
    kinds = [call.kwargs.get("jit_args") for call in mocked.prefill.call_args_list]
    assert kinds[0] is None
    assert kinds[1][0] != kinds[2][0], "FlashInfer caches kernels by this name"


@pytest.mark.parametrize(("name", "splits"), [("alibi", True), ("sigmoid", False)])
def test_rows_are_split_only_where_parts_are_merged_rightly(mocked: Mocked, name: str, splits: bool) -> None:
    make_plan(mocked, of(name), variant=SPLIT).plan(HOST)
    disable_split_kv = mocked.planner.call_args.args[17]
    assert disable_split_kv == (not splits)
    assert sums_parts_wrongly(of(name)) == (not splits)


def test_functors_are_for_fa2(mocked: Mocked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "has_kernels", lambda device: True)
    monkeypatch.setattr(hopper, "_was_built", lambda geometry: True)
    large, cpu = ([1000], [1000], torch.device("cpu"), 132), torch.device("cpu")
    assert hopper.is_there(GEOMETRY, cpu)
    assert not hopper.is_there(of("alibi"), cpu)
    assert hopper.takes_fa3([GEOMETRY], *large)
    assert not hopper.takes_fa3([GEOMETRY, of("alibi")], *large)


def test_pages_of_another_type_are_part_of_the_kernels_name(mocked: Mocked) -> None:
    make_plan(mocked, of("alibi")._replace(kv_dtype=FP8)).plan(HOST)
    assert "float8_e4m3fn" in mocked.prefill.call_args.kwargs["jit_args"][0]


def test_a_plan_of_another_variant_is_refused(mocked: Mocked) -> None:
    plan = make_plan(mocked, of("alibi"))
    plan.plan(HOST)
    with pytest.raises(ValueError, match="the plan is of another batch: geometry"):
        launched(mocked, plan.owner, "inkling", [torch.randn(2, 4, 12)])
