"""The kernel of `add_rms_norm` on CUDA: here under Triton's interpreter on the CPU; on a GPU see `test_linear_gpu.py`.

Shapes: M rows, I inputs.
"""

from __future__ import annotations

import pytest
import torch

import compiled_llm_ops
from support.ops.compiling import compiled, in_order
from support.ops.interpreting import interpreted, needs_triton, not_interpreted

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]


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
@pytest.mark.usefixtures("own_cache")
def test_nothing_but_the_weight_is_touched_before_waiting() -> None:
    from compiled_llm_ops.kernels.norm import _add_rms_norm as kernel

    types = {**dict.fromkeys(("states", "update", "weight", "total", "normed"), "*bf16"), "epsilon": "fp32"}
    made = compiled(kernel, {"INPUTS": 1000, "BLOCK": 1024, "PDL": True}, types, launch_pdl=True)
    found = in_order(made.asm["ptx"])
    before = found.index("griddepcontrol.wait")
    assert found[:before] == ["ld.global"] * 8, "a thread's numbers of the weight, one by one"
    assert found[before + 1] == "griddepcontrol.launch_dependents"
