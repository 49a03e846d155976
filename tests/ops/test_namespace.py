"""Every op has a schema, which is its tuple, a fake, kernels, a docstring and a case that opcheck passes."""

from __future__ import annotations

import inspect
import itertools
import typing
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.library import Library

import compiled_llm_ops
from compiled_llm_ops import (
    append_paged_kv,
    decode_attention,
    decode_attention_lse,
    paged_attention,
    paged_attention_lse,
)
from compiled_llm_ops.library import define_op
from support.ops.fp8_pages import Fp8Batch, Fp8Scales, scales_of
from support.ops.namespace import check_definition, check_gradients_are_refused, opcheck, ops_of
from support.ops.op_cases import CASES, UNREAD, Batch

pytestmark = pytest.mark.core

MARKS = {"layer_begins", "layer_ends"}
"""Not to be called: they stand in graphs until ``compiled_llm.compilation.tracing.outline`` takes them out."""


OPS = ops_of("compiled_llm", left_out=MARKS)


def test_the_namespace_is_what_is_walked():
    assert set(OPS) >= {"append_paged_kv", "decode_attention", "paged_attention_lse"}


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_a_fake_kernels_a_docstring_and_an_opcheck_case(name):
    check_definition(compiled_llm_ops, "compiled_llm", name, CASES[name]())


@pytest.mark.parametrize("name", OPS)
def test_an_input_that_asks_for_gradients_is_refused_unless_gradients_are_off(name):
    check_gradients_are_refused(getattr(torch.ops.compiled_llm, name).default, CASES[name]()[0])


@pytest.mark.parametrize("name", ["merge_state", "append_paged_kv"])
def test_an_input_that_asks_for_gradients_is_refused_as_an_op_is_traced(name):
    op = getattr(torch.ops.compiled_llm, name).default
    first, *others = CASES[name]()[0]
    traced = torch.compile(lambda first: op(first, *others), backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=rf"{name}: {op._schema.arguments[0].name}\.requires_grad"):
        traced(first.detach().clone().requires_grad_())


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name, seed, whole, monkeypatch):
    opcheck(getattr(torch.ops.compiled_llm, name).default, CASES[name](), seed, whole, monkeypatch)


@pytest.mark.parametrize("name", ["cascade_attention", "decode_attention_variant", "rope_append_paged_kv"])
def test_arguments_that_ops_have_in_common_are_alike_and_in_one_order(name):
    decode, own = (
        {argument.name: argument for argument in getattr(torch.ops.compiled_llm, op).default._schema.arguments}
        for op in ("decode_attention", name)
    )
    shared = [argument for argument in decode if argument in own]
    assert len(shared) > 10
    assert [argument for argument in own if argument in decode] == shared
    for argument in shared:
        assert str(own[argument].type) == str(decode[argument].type)
        assert own[argument].default_value == decode[argument].default_value


def test_a_function_of_the_ops_compiles_whole_and_once_for_all_shapes(seed):
    def layer(batch: tuple[Tensor, ...], pages: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        query, key, value, rows, positions, qo_indptr, indptr, indices, last = batch
        append_paged_kv(key * 2, value, pages, rows, positions, indptr, indices, last)
        out = paged_attention(query + 1, pages, qo_indptr, indptr, indices, last, *UNREAD, scale)
        other, lse = paged_attention_lse(query + 1, pages, qo_indptr, indptr, indices, last, *UNREAD, scale, 3)
        return out + other, lse * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for number, (lengths, queries) in enumerate(
        [
            ([9, 6, 4, 3, 2], [3, 6, 2, 2, 1]),  # no two sizes are equal by chance: Dynamo would guard on it
            ([5, 11], [2, 4]),
            ([30, 2, 2, 7], [1, 2, 1, 5]),
        ]
    ):
        batches = [Batch(lengths, queries, head_dim=16, seed=seed + number) for _ in range(2)]
        results = []
        for function, batch in zip((compiled, layer), batches, strict=True):
            arguments = (
                batch.query, torch.cat(batch.keys), torch.cat(batch.values),
                *batch.slots([0] * len(lengths), lengths), batch.qo_indptr, *batch.table,
            )  # fmt: skip
            stance = "fail_on_recompile" if number and function is compiled else "default"
            with torch.compiler.set_stance(stance):
                results.append(function(arguments, batch.pages, batch.scale))
        torch.testing.assert_close(results[0], results[1])
        torch.testing.assert_close(batches[0].pages, batches[1].pages)


@pytest.mark.whole
def test_a_function_with_pages_of_fp8_compiles_whole_and_once_for_all_shapes(seed):
    """With and without a count of clamped numbers, which is optional and written; on Inductor's kernels, too."""

    def layer(batch: tuple[Tensor, ...], pages: Tensor, fp8: Fp8Scales, count: Tensor | None) -> tuple[Tensor, ...]:
        (query, key, value, rows, positions, qo_indptr, indptr, indices, last, lengths), own = batch, fp8._asdict()
        scales = {"key_scale": own["key"], "value_scale": own["value"]}
        append_paged_kv(key * 2, value, pages, rows, positions, indptr, indices, last, **scales, saturated=count)
        out = paged_attention(query + 1, pages, qo_indptr, indptr, indices, last, *UNREAD, 0.3, **scales)
        newest = qo_indptr[1:] - 1
        states, table = (query[newest], key[newest], value[newest]), (indptr[:-1], lengths, indices)
        other, lse = decode_attention_lse(*states, pages, *table, 0.3, **scales, saturated=count)
        return out * 2, other, lse

    for backend, sizes in (("aot_eager", [[9, 6, 4, 3, 2], [5, 11], [30, 2, 2, 7]]), ("inductor", [[9, 6, 4]])):
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
        for (number, lengths), counts in itertools.product(enumerate(sizes), (True, False)):
            batches = [Fp8Batch(lengths, lengths, head_dim=16, seed=seed + number) for _ in range(2)]
            scales, results = scales_of("small", 2), []
            for function, batch in zip((compiled, layer), batches, strict=True):
                count = torch.zeros(1, dtype=torch.int64) if counts else None
                columns = (
                    batch.query, torch.cat(batch.keys), torch.cat(batch.values),
                    *batch.slots([0] * len(lengths), lengths), batch.qo_indptr, *batch.table,
                    torch.tensor(lengths).int(),
                )  # fmt: skip
                stance = "fail_on_recompile" if number and function is compiled else "default"
                with torch.compiler.set_stance(stance):
                    results.append(
                        (*function(columns, batch.pages, scales, count), batch.pages.view(torch.uint8), count)
                    )
            torch.testing.assert_close(results[0][:-1], results[1][:-1])
            assert results[0][-1] == results[1][-1]
            assert not counts or int(results[0][-1]) > 0


# ---- an op's tuple is its schema, and its kernels are given it whole


class Everything(NamedTuple):
    states: Tensor
    parts: list[Tensor]
    count: int
    weight: Tensor | None = None
    shift: int = -1
    factor: float = 0.5
    gated: bool = False


class Unknown(NamedTuple):
    name: complex


@pytest.fixture
def library() -> Library:
    return Library("mixed", "FRAGMENT")


def test_fields_order_types_and_defaults_are_the_schema(library: Library) -> None:
    @define_op(Everything, writes=("states", "weight"), library=library)
    def mix(args: Everything) -> tuple[Tensor, Tensor]:
        return args.states, args.states

    assert str(torch.ops.mixed.mix.default._schema) == (
        "mixed::mix(Tensor(a!) states, Tensor[] parts, int count, Tensor(b!)? weight=None, int shift=-1, "
        "float factor=0.5, bool gated=False) -> (Tensor, Tensor)"
    )
    assert inspect.signature(mix).replace(return_annotation=inspect.Signature.empty) == inspect.Signature(
        [
            field.replace(annotation=typing.get_type_hints(Everything)[field.name])
            for field in inspect.signature(Everything).parameters.values()
        ]
    )


@pytest.mark.parametrize("name", ["count", "missing"])
def test_only_tensors_can_be_written(name: str, library: Library) -> None:
    with pytest.raises(ValueError, match=name):

        @define_op(Everything, writes=(name,), library=library)
        def mix(args: Everything) -> None: ...


def test_a_type_without_a_schema_is_refused(library: Library) -> None:
    with pytest.raises(ValueError, match="complex"):

        @define_op(Unknown, library=library)
        def mix(args: Unknown) -> None: ...


def test_the_op_with_lse_has_the_signature_of_the_other_and_its_own_result() -> None:
    first, second = (inspect.signature(function) for function in (decode_attention, decode_attention_lse))
    assert list(first.parameters.values()) == list(second.parameters.values())
    assert (first.return_annotation, second.return_annotation) == (Tensor, tuple[Tensor, Tensor])
