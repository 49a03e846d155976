"""Variants by the plans of a backend: the reference's, which attends on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compiled_llm_ops import (
    paged_attention_variant,
    paged_attention_variant_lse,
    planned_attention_variant,
    planned_attention_variant_lse,
)
from compiled_llm_ops.backends import BACKENDS, backend_named
from compiled_llm_ops.protocol import Plan
from support.ops.op_cases import MIXES, SCALES, Batch
from support.ops.variants import EXAMPLES, registered


def planned_by_reference() -> tuple[Plan, Tensor]:
    reference, cpu = backend_named("reference"), torch.device("cpu")
    workspace = reference.workspace(cpu, 0)
    return reference.new_plan(workspace, 16), workspace.buffer


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", ["alibi", "inkling", "blind", "sigmoid"])
def test_a_plan_of_the_reference_attends_as_the_op_without_one(name: str, mix: str, seed: int) -> None:
    batch, variant = Batch(*MIXES[mix], seed=seed).filled(), registered(name)
    query, pages, qo_indptr, *table, _, _, scale = batch.arguments()
    given = EXAMPLES[name].tensors(table[-1].shape[0], *query.shape[:2])
    plan, workspace = planned_by_reference()
    states, how = (query, pages, qo_indptr, *table), (variant.key, given, scale, 5)
    out = planned_attention_variant(*states, plan.tensor, workspace, *how)
    assert torch.equal(out, paged_attention_variant(*states, *how))
    if variant.softmax:
        found = planned_attention_variant_lse(*states, plan.tensor, workspace, *how)
        assert all(map(torch.equal, found, paged_attention_variant_lse(*states, *how)))


def test_pages_of_fp8_and_the_name_alone(seed: int) -> None:
    query, pages, qo_indptr, *table, _, _, scale = Batch(*MIXES["mixed"], seed=seed).in_fp8().filled().arguments()
    plan, workspace = planned_by_reference()
    states, how = (query, pages, qo_indptr, *table), (registered("window").name, [], scale, -1, *SCALES)
    out = planned_attention_variant(*states, plan.tensor, workspace, *how)
    assert torch.equal(out, paged_attention_variant(*states, *how))


def test_without_a_plan_nothing_is_written() -> None:
    """Inductor of torch 2.11 cannot compile an op that may write an argument where that argument is None."""
    for name in ("paged_attention_variant", "paged_attention_variant_lse"):
        assert not getattr(torch.ops.compiled_llm, name).default._schema.is_mutable


def test_a_cpu_needs_no_plan_and_a_backend_without_functions_is_refused() -> None:
    query, pages, qo_indptr, *table, _, _, scale = Batch(*MIXES["mixed"]).filled().arguments()
    states, how = (query, pages, qo_indptr, *table), (registered("window").key, [], scale)
    nobodys = torch.zeros(16, dtype=torch.uint8)
    out = planned_attention_variant(*states, nobodys, nobodys, *how)
    assert torch.equal(out, paged_attention_variant(*states, *how))
    triton, cpu = backend_named("triton"), torch.device("cpu")
    plan = triton.new_plan(triton.workspace(cpu, 0), 16)
    with pytest.raises(NotImplementedError, match="no kernels for functions; call another op"):
        planned_attention_variant(*states, plan.tensor, nobodys, *how)
    able = [name for name in BACKENDS if "functions" in backend_named(name).kernels]
    assert able == ["flashinfer", "reference"]
