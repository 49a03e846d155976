"""The passes for each program's graph, and Inductor's options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from compiled_llm.compilation.backend import Pass
from compiled_llm.compilation.passes.append import PreparedInAppend
from compiled_llm.compilation.passes.attention import PreparedInAttention
from compiled_llm.compilation.passes.invariant import InvariantProducts, InvariantSums
from compiled_llm.compilation.passes.normed_products import NormedProducts
from compiled_llm.compilation.passes.norms import NormedSums
from compiled_llm.compilation.passes.patches import multiply_patches
from compiled_llm.compilation.passes.products import OuterProducts, SkinnyProducts
from compiled_llm.config import WrapConfig


def passes_for(config: WrapConfig, device: torch.device, fused: Sequence[Pass], decodes: bool) -> list[Pass]:
    """Return the passes over a program's graph, before Inductor; ``fused`` make one matmul of several."""
    if config.batch_invariant:
        return [OuterProducts(), *_invariant_passes(config, device, decodes), *fused, InvariantProducts()]
    if device.type == "cpu":  # what Inductor makes of a norm is faster than the op
        return list(fused) if decodes else [multiply_patches, *fused]
    _, backend, ops = config.backend_on(device.type)
    if not decodes:
        appended: list[Pass] = [PreparedInAppend()] if backend.rope_append else []
        return [OuterProducts(), multiply_patches, *appended, *fused]
    prepared: list[Pass] = [PreparedInAttention(ops)] if ops is not None and ops.prepare else []
    if config.mode == "compile":  # launching an op's kernel costs the host more than launching one of Inductor's
        return [OuterProducts(), *prepared, *fused]
    return [OuterProducts(), *prepared, NormedSums(), *fused, NormedProducts()]


def _invariant_passes(config: WrapConfig, device: torch.device, decodes: bool) -> list[Pass]:
    """Return the passes for a GPU: those of decode and prefill find the same, and make kernels of it that add alike."""
    if device.type == "cpu":
        return []
    _, _, ops = config.backend_on(device.type)
    assert ops is not None, "its decode steps are not planned"
    return [PreparedInAttention(ops) if decodes else PreparedInAppend(), NormedSums()]


def prefill_options(config: WrapConfig, device: torch.device) -> dict[str, Any]:
    """Return Inductor's options for prefill; cudagraph trees do not capture it."""
    # Whether to pad a product, Inductor would decide by the number of tokens that is traced, and keep a guard on it: a
    # captured prefill of more tokens would be compiled again.
    return {**_shared(device), **_products(config, device), "triton.cudagraphs": False, "shape_padding": False}


def decode_options(config: WrapConfig, device: torch.device, *, one_row: bool) -> dict[str, Any]:
    """Return Inductor's options for decode, of one row or of more."""
    options = {**_shared(device), **_products(config, device)}
    options["triton.cudagraphs"] = config.uses_trees_on(device.type)
    if device.type != "cuda" or config.batch_invariant:
        return options
    # Kernels take as long to start as to run: fewer of them, such as one for queries and keys where norm and rotary
    # embedding are not left to attention.
    options["combo_kernels"] = True
    if one_row and config.mode == "compile":
        # Triton's reduction is near the memory bandwidth for a matrix-vector product if this search tunes it.
        options["coordinate_descent_tuning"] = True
    return options


def _products(config: WrapConfig, device: torch.device) -> dict[str, Any]:
    if config.batch_invariant:
        # Numbers are rounded as PyTorch does it, and none is multiplied and added at once, however graphs are fused.
        options = {"post_grad_custom_pre_pass": InvariantSums(), "emulate_precision_casts": True}
        # A CPU's vectors have exponentials of their own, and which loops become vectors follows from what is fused.
        return {**options, "cpp.simdlen": 1} if device.type == "cpu" else options
    if device.type == "cuda" and config.mode == "compile":
        return {}  # launching the op's kernels costs the host more than launching cuBLAS's
    return {"post_grad_custom_pre_pass": SkinnyProducts()}


def _shared(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {}
    # A kernel begins while the previous one ends (programmatic dependent launch), from Hopper on.
    return {"triton.enable_pdl": torch.cuda.get_device_capability(device) >= (9, 0)}
