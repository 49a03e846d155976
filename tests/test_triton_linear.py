"""The kernels of `skinny_linear` on CUDA: here under Triton's interpreter on the CPU; on a GPU see `test_ops_gpu.py`.

Triton decides at import whether it interprets, so the test runs in a process of its own.

Shapes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from compiled_llm_ops.tiling import Tiling
from interpreting import check_interpreted, interpreted, needs_triton, not_interpreted

pytestmark = [needs_triton, pytest.mark.usefixtures("scalars_are_numbers")]

TILINGS = [
    Tiling(rows=1, outputs=4, tiles=1, inputs=256, stages=1, early=3),
    Tiling(rows=1, outputs=2, tiles=1, inputs=512, stages=1, early=1),
    Tiling(rows=2, outputs=4, tiles=1, inputs=512, stages=1, early=2),
    Tiling(rows=2, outputs=16, tiles=1, inputs=256, stages=1, early=0),
    Tiling(rows=16, outputs=64, tiles=1, inputs=256, stages=5, early=0),
    Tiling(rows=16, outputs=64, tiles=3, inputs=128, stages=4, early=0),
    Tiling(rows=32, outputs=64, tiles=2, inputs=128, stages=5, early=0),
    Tiling(rows=64, outputs=16, tiles=1, inputs=256, stages=5, early=0),
    Tiling(rows=64, outputs=64, tiles=3, inputs=128, stages=3, early=0),
    Tiling(rows=64, outputs=64, tiles=1, inputs=512, stages=1, early=0),
]


@pytest.mark.slow
@not_interpreted
def test_kernels_under_the_interpreter(seed: int) -> None:
    check_interpreted(__file__, seed)


@interpreted
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("n", [48, 208], ids="N={}".format)
def test_every_tiling_multiplies(tiling: Tiling, n: int, seed: int) -> None:
    from compiled_llm_ops.triton_linear import multiply

    for m in {1, 2, 5, tiling.rows - 1, tiling.rows} & set(range(1, tiling.rows + 1)):
        rows, weight = torch.randn(m, 768).half(), torch.randn(n, 768).half()  # bfloat16 it multiplies as integers
        out = multiply(rows, weight, tiling, pdl=False)
        torch.testing.assert_close(out.double(), rows.double() @ weight.double().T, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@not_interpreted
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_nothing_but_weights_is_touched_before_waiting(
    tiling: Tiling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels in front may still write before `gdc_wait`; whoever is let go relies on that this one has waited."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from compiled_llm_ops import triton_linear as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {
        "ROWS": tiling.rows, "BN": tiling.outputs, "BK": tiling.inputs, "PDL": True
    }  # fmt: skip
    types = {**dict.fromkeys("xwy", "*bf16"), **dict.fromkeys("MNK", "i32")}
    if tiling.rows <= 2:
        kernel = kernels._skinny_linear_one_or_two_rows
        constants |= {"EARLY": tiling.early, "MASKED": tiling.inputs == 512}
    else:
        kernel = kernels._skinny_linear_tensor_cores
        constants |= {"TILES": tiling.tiles, "STAGES": tiling.stages}
        types |= {name: f"tensordesc<bf16[{n},{tiling.inputs}]>" for name, n in zip("xw", tiling[:2], strict=True)}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    code = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True}).asm["ptx"]
    found = re.findall(r"griddepcontrol\.\w+|cp\.async\.\w+|(?:ld|st|atom)\.global", code)
    before = found.index("griddepcontrol.wait")
    asked = {"cp.async.bulk"} if tiling.rows > 2 else {"ld.global"} if tiling.early else set()
    assert set(found[:before]) == asked
    assert found.index("griddepcontrol.launch_dependents") > before
    if tiling.rows <= 2:
        weights = tiling.early * tiling.outputs * tiling.inputs // 128  # a thread's, loaded one by one
        assert before == weights, "nothing else is read there"
        return
    assert "ld.global" not in found
    moved = re.search(r"mov\.b64\s+(%\w+), \w+_param_0;", code)  # where rows are described
    described = moved and re.search(rf"cvta\.param\.u64\s+(%\w+), {moved[1]};", code)
    assert described
    first_read = code.index(f", [{described[1]}, ")
    assert code.index("griddepcontrol.wait") < first_read
