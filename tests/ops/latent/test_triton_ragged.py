"""Attention to own tokens: its kernel under Triton's interpreter on the CPU, and compiled for Hopper without a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from support.ops.compiling import compiled, resources_of
from support.ops.interpreting import interpreted, needs_triton, not_interpreted
from support.ops.latent_rows import RAGGED, RaggedRows

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]

SIZES = pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (96, 64), (256, 256), (48, 20)])
LARGE = 2.5e-3
"""How far float16 is off for values of about 1."""


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("mix", RAGGED)
@pytest.mark.parametrize("key_heads", [2, 1])
@SIZES
def test_kernel(mix: str, key_heads: int, head_dim: int, value_dim: int, seed: int) -> None:
    from compiled_llm_ops.kernels.latent.ragged import attend

    sizes: dict[str, Any] = {"head_dim": head_dim, "value_dim": value_dim, "dtype": torch.float16}
    rows = RaggedRows(RAGGED[mix], heads=2, key_heads=key_heads, seed=seed, **sizes)
    out, lse = (
        torch.full((sum(rows.counts), 2, value_dim), torch.nan).half(),
        torch.full((sum(rows.counts), 2), torch.nan),
    )
    attend(*rows.arguments(), out, lse)
    expected, expected_lse = rows.expected()
    torch.testing.assert_close(out.float(), expected, rtol=LARGE, atol=LARGE)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=2e-3)


def test_sizes_without_a_kernel_are_named() -> None:
    from compiled_llm_ops.kernels.latent.ragged import attend

    for sizes, message in (
        ({"head_dim": 8}, "no kernel for heads of sizes 8 and 32; there are some from 16 to 256"),
        ({"value_dim": 300}, "sizes 48 and 300"),
        ({"dtype": torch.float32}, r"no kernel for torch\.float32"),
    ):
        rows = RaggedRows([3], **{"dtype": torch.float16, **sizes})
        with pytest.raises(ValueError, match=message):
            attend(*rows.arguments(), torch.zeros(0), None)


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@SIZES
def test_kernel_fits_registers_and_shared_memory(head_dim: int, value_dim: int, tmp_path: Any) -> None:
    from compiled_llm_ops.kernels.latent import ragged
    from compiled_llm_ops.kernels.latent.latent_tiling import head_parts, ragged_tiling

    kernel, tiling, (main, rest) = ragged._ragged_attention, ragged_tiling(head_dim, value_dim), head_parts(head_dim)
    constants = {
        "GROUP": 1, "HEAD": head_dim, "VALUE": value_dim, "MAIN": main, "REST": rest,
        "PADDED": 1 << (value_dim - 1).bit_length(), "QUERIES": tiling.queries, "KEYS": tiling.keys,
        "STAGES": tiling.stages,
    }  # fmt: skip
    strides = {name: "i32" for name in kernel.arg_names if name.endswith("_stride")}
    tensors = dict.fromkeys(("query", "key", "value", "out"), "*bf16") | {"qo_indptr": "*i32", "lse": "*fp32"}
    aligned = [*strides, *tensors]
    types = {**tensors, **strides, "rows": "i32", "scale": "fp32"}
    made = compiled(kernel, constants, types, tiling.warps, aligned)
    (stack,) = re.findall(r"STACK:(\d+)", resources_of(made.asm["cubin"], tmp_path / "cubin"))
    assert int(stack) == 0, "registers spill"
    assert made.metadata.shared <= 227 * 1024
