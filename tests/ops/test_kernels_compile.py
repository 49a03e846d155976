"""Kernels are compiled for Hopper: Triton's interpreter lets pass what its compiler refuses, as a loop that changes a
variable's type.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from support.imports import CHECKOUT
from support.ops.compiling import compiled, compiled_in, launched_by
from support.ops.interpreting import needs_triton, not_interpreted

CHECKED = dict.fromkeys(("starts", "lengths", "indices", "row_numbers", "qo_indptr", "tags"), "*i32")
CHECKED |= dict.fromkeys(("chains", "faults", "tokens", "slots"), "*i64")
CHECKED |= dict.fromkeys(("each", "entries", "pages"), "i32")
MERGED = dict.fromkeys(("s_a", "s_b", "s", "merged_s"), "*fp32") | dict.fromkeys(("heads", "states"), "i32")
MERGED |= dict.fromkeys(("v_a", "v_b", "v", "merged_v"), "*bf16") | {"mask": "*i1"}
LATENT = dict.fromkeys(("latent", "rope", "pages"), "*bf16")
LATENT |= dict.fromkeys(("token_rows", "token_positions", "indptr", "indices"), "*i32")
LATENT |= {f"{name}_{of}": "i32" for name in ("latent", "rope") for of in ("stride", "step")}
LATENT |= dict.fromkeys(("page_stride", "slot_stride", "before"), "i32")
BLOCK_TABLES = dict.fromkeys(("indptr", "indices", "last_page_len", "lengths", "starts", "table"), "*i32")
BLOCK_TABLES |= dict.fromkeys(("rows", "width"), "i32")

CASES: dict[str, tuple[str, str, dict[str, str], dict[str, Any]]] = {
    "check in decode": (
        "support.ops.check_pages_kernel", "_check_pages",
        {name: type for name, type in CHECKED.items() if name != "qo_indptr"},
        {"SIZE": 16, "WRITE": True, "CHECK": True, "BLOCK": 256, "NEW": 1},
    ),
    "tags of a prefill": (
        "support.ops.check_pages_kernel", "_check_pages", CHECKED,
        {"SIZE": 16, "WRITE": True, "CHECK": False, "BLOCK": 256, "NEW": 256},
    ),
    "check of a prefill": (
        "support.ops.check_pages_kernel", "_check_pages", CHECKED,
        {"SIZE": 16, "WRITE": False, "CHECK": True, "BLOCK": 256, "NEW": 256},
    ),
    "a table of lines": ("attention.block_tables", "_block_tables", BLOCK_TABLES, {"PAGE": 256, "BLOCK": 128}),
    "two states": ("attention.merge", "_merge_two", MERGED, {"DIM": 96, "BLOCK": 128}),
    "many states": ("attention.merge", "_merge_many", MERGED, {"DIM": 96, "BLOCK": 128}),
    "latents": (
        "latent.append", "_append_latent", LATENT, {"RANK": 512, "ROPE": 64, "PAGE": 16, "BLOCK": 512, "ROPE_BLOCK": 64}
    ),
    "SwiGLU": (
        "linear.norm", "_silu_and_mul", {"product": "*bf16", "gated": "*bf16", "N": "i32"}, {"BLOCK": 1024, "PDL": True}
    ),
    "heads": (
        "linear.invariant", "_invariant_bmm",
        dict.fromkeys(("x", "w", "y"), "*bf16") | dict.fromkeys(
            ("M", "row_stride", "head_stride", "input_stride", "weight_head_stride", "weight_input_stride",
             "weight_output_stride"), "i32"
        ),
        {"N": 128, "K": 512, "ROWS": 64, "OUTPUTS": 64, "INPUTS": 64},
    ),
    "sums": (
        "linear.invariant", "_invariant_sum", {"values": "*bf16", "sums": "*bf16"}, {"INPUTS": 3000, "BLOCK": 1024}
    ),
}  # fmt: skip


@needs_triton
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("case", CASES)
def test_kernels_without_tests_of_their_code_compile(case: str) -> None:
    module, name, types, constants = CASES[case]
    ours = module if module.startswith("support.") else f"compiled_llm_ops.kernels.{module}"
    kernel = getattr(importlib.import_module(ours), name)
    types = {argument: type for argument, type in types.items() if argument in kernel.arg_names}
    assert "ptx" in compiled(kernel, constants, types).asm


def test_every_kernel_that_is_launched_is_compiled_by_a_test() -> None:
    launched = launched_by(CHECKOUT / "ops" / "compiled_llm_ops" / "kernels")
    assert len(launched) > 15, "the pattern of launches finds them"
    assert compiled_in("ops", launched) == launched
