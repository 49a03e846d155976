"""Every op under FlashInfer's API has what ops of ``compiled_llm_ops`` have; that package does not know them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import compiled_llm_flashinfer.ops
import compiled_llm_ops
from support.flashinfer_api.latent_pools import LatentPools
from support.flashinfer_api.sparse_blocks import Sizes, SparseBlocks, VariableBlocks
from support.flashinfer_api.strided_rows import StridedRows, packed, starts_of
from support.imports import CHECKOUT
from support.ops.compiling import compiled_in, launched_by
from support.ops.namespace import check_definition, check_gradients_are_refused, opcheck, ops_of

pytestmark = pytest.mark.core

NAMESPACE = "compiled_llm_flashinfer"
OPS = ops_of(NAMESPACE)


# ---- cases for opcheck


def strided_attention_cases() -> list[tuple[Any, ...]]:
    rows = StridedRows([1, 5, 0, 9], [1, 2, 1, 3], seed=1)
    mask = packed(rows.masks())
    out, lse, factors = torch.zeros(7, 4, 16), torch.zeros(7, 4), torch.rand(3, 4)
    paged = (rows.query, *rows.pools, out, lse, *rows.table, 0.3)
    states = [states.unsqueeze(2) for states in rows.ragged]
    table = (rows.qo_indptr, starts_of(rows.lengths), None, None)
    one = (rows.query[:4], *states, out[:4], None, None, None, None, None, 0.3, True)
    return [
        (*paged, True, 3, 1.5),
        (*paged, False, -1, 0.0, 0.5, factors[0], factors[1], *mask, factors[2]),
        (rows.query, *states, out, None, *table, 0.3),
        (*one, 2, 0.0, 1.0, None, None, None, None, None, 1.0, 1e4),
    ]


def strided_latent_cases() -> list[tuple[Any, ...]]:
    rows = LatentPools([1, 5, 0, 9], [1, 2, 1, 3], seed=1)
    rows.pool = rows.pool.nan_to_num()
    out, lse = torch.zeros(7, 4, 16), torch.zeros(7, 4)
    return [(*rows.parts, out, lse, *rows.table, 0.3, True), (*rows.apart, out, None, *rows.table, 0.3)]


def strided_append_cases() -> list[tuple[Any, ...]]:
    rows = StridedRows([5, 3], [1, 1], seed=1)
    places = torch.tensor([0, 0, -1, 1]), torch.tensor([4, 2, 0, 0])
    table = (*places, rows.indptr, rows.indices)
    states = [states[:4] for states in rows.ragged]
    return [
        (*states, *rows.pools, *table),
        (*states, *(pool.transpose(1, 2).contiguous().transpose(1, 2) for pool in rows.pools), *table),
    ]


def block_sparse_cases() -> list[tuple[Any, ...]]:
    sizes = Sizes(12, 40)
    cases: list[tuple[Any, ...]] = [
        tuple(SparseBlocks((4, 8), sizes, masked=masked).arguments(2.0 * masked)) for masked in (False, True)
    ]
    return [*cases, tuple(SparseBlocks((1, 1), sizes._replace(dtype=torch.bfloat16), spare=3).arguments())]


def variable_block_sparse_cases() -> list[tuple[Any, ...]]:
    return [tuple(VariableBlocks((3, 5), Sizes(12, 40), seed=number).arguments(1.5 * number)) for number in range(2)]


CASES: dict[str, Callable[[], Sequence[tuple[Any, ...]]]] = {
    "block_sparse_attention": block_sparse_cases,
    "block_sparse_attention_lse": block_sparse_cases,
    "strided_append": strided_append_cases,
    "strided_attention": strided_attention_cases,
    "strided_latent_attention": strided_latent_cases,
    "variable_block_sparse_attention": variable_block_sparse_cases,
    "variable_block_sparse_attention_lse": variable_block_sparse_cases,
}


# ---- each op


def test_the_namespace_is_what_is_walked() -> None:
    assert set(OPS) == CASES.keys()


@pytest.mark.parametrize("name", OPS)
def test_each_has_a_fake_kernels_a_docstring_and_an_opcheck_case(name: str) -> None:
    check_definition(compiled_llm_flashinfer.ops, NAMESPACE, name, CASES[name]())


@pytest.mark.parametrize("name", OPS)
def test_an_input_of_each_that_asks_for_gradients_is_refused(name: str) -> None:
    check_gradients_are_refused(getattr(torch.ops.compiled_llm_flashinfer, name).default, CASES[name]()[0])


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name: str, seed: int, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    opcheck(getattr(torch.ops.compiled_llm_flashinfer, name).default, CASES[name](), seed, whole, monkeypatch)


def test_every_kernel_that_is_launched_is_compiled_by_a_test() -> None:
    launched = launched_by(CHECKOUT / "ops" / "compiled_llm_flashinfer")
    assert len(launched) > 2, "the pattern of launches finds them"
    assert compiled_in("flashinfer_api", launched) == launched


@pytest.mark.whole
def test_the_ops_and_the_package_import_none_of_them() -> None:
    """With every public name, and all modules of ours that are imported for one."""
    code = """
import sys, compiled_llm_ops, compiled_llm
names = [getattr(package, name) for package in (compiled_llm_ops, compiled_llm) for name in package.__all__]
assert not [name for name in sys.modules if name.startswith("compiled_llm_flashinfer")]
import torch
assert not hasattr(torch.ops.compiled_llm, "strided_attention")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not set(compiled_llm_flashinfer.ops.__all__) & set(compiled_llm_ops.__all__)
