"""Every op under FlashInfer's API has what ops of ``compiled_llm_ops`` have; that package does not know them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import compiled_llm_flashinfer.ops
import compiled_llm_ops
from support.flashinfer_api.op_cases import CASES
from support.imports import CHECKOUT
from support.ops.compiling import compiled_in, launched_by
from support.ops.namespace import check_definition, check_gradients_are_refused, opcheck, ops_of

pytestmark = pytest.mark.core

NAMESPACE = "compiled_llm_flashinfer"
OPS = ops_of(NAMESPACE)


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
