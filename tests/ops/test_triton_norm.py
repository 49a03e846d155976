"""The kernel of `add_rms_norm` on CUDA: here under Triton's interpreter on the CPU; on a GPU see `test_linear_gpu.py`.

Triton decides at import whether it interprets, so the test runs in a process of its own.

Shapes: M rows, I inputs.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import compiled_llm_ops
from support.ops.interpreting import check_interpreted, interpreted, needs_triton, not_interpreted

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]


@pytest.mark.slow
@not_interpreted
def test_kernel_under_the_interpreter(request: pytest.FixtureRequest) -> None:
    check_interpreted(__file__, request.config)


@interpreted
@pytest.mark.parametrize("shape", [(1, 64), (3, 1, 96), (5, 1024), (2, 5000)], ids=str)
def test_sums_are_normed(shape: tuple[int, ...], seed: int) -> None:
    from compiled_llm_ops.kernels.norm import add_rms_norm

    states, update = torch.randn(2, *shape).half()
    weight = torch.randn(shape[-1]).half()
    total, normed = add_rms_norm(states, update, weight, 0.01, pdl=False)
    expected_total, expected = compiled_llm_ops.add_rms_norm(states, update, weight, 0.01)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(normed, expected, rtol=2e-3, atol=1e-3)


@pytest.mark.slow
@not_interpreted
def test_nothing_but_the_weight_is_touched_before_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from compiled_llm_ops.kernels.norm import _add_rms_norm as kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"INPUTS": 1000, "BLOCK": 1024, "PDL": True}
    types = {**dict.fromkeys(("states", "update", "weight", "total", "normed"), "*bf16"), "epsilon": "fp32"}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    code = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True}).asm["ptx"]
    found = re.findall(r"griddepcontrol\.\w+|(?:ld|st)\.global", code)
    before = found.index("griddepcontrol.wait")
    assert found[:before] == ["ld.global"] * 8, "a thread's numbers of the weight, one by one"
    assert found[before + 1] == "griddepcontrol.launch_dependents"
