"""What ops of experts check before they compute."""

# Shapes: T rows, k experts of each, E experts, I inputs, O outputs.

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_choices(op: str, rows: Tensor, topk_ids: Tensor) -> None:
    """Raise ValueError if rows ``[T, I]`` or ``[T * k, I]`` and experts ``[T, k]`` that they chose misfit."""
    if rows.dim() != 2 or topk_ids.dim() != 2 or topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{op}: rows must be two-dimensional and topk_ids [T, k] int32 or int64; got {tuple(rows.shape)} and "
            f"{tuple(topk_ids.shape)} {topk_ids.dtype}"
        )
    if rows.dtype not in DTYPES:
        raise ValueError(f"{op}: no kernel for {rows.dtype}; use torch.bfloat16, torch.float16 or torch.float32")


def check_weight(
    op: str, name: str, weight: Tensor, bias: Tensor | None, rows: Tensor, sizes: tuple[int | None, int]
) -> None:
    """Raise ValueError if a weight ``[E, O, I]`` and a bias ``[E, O]`` do not fit; ``sizes`` are O, None for any, I."""
    outputs, inputs = sizes
    if weight.dim() != 3 or weight.shape[2] != inputs or outputs not in (None, weight.shape[1]):
        wanted = f"[E, {'O' if outputs is None else outputs}, {inputs}]"
        raise ValueError(f"{op}: {name} must be {wanted}, apart from being transposed; got {tuple(weight.shape)}")
    if weight.dtype != rows.dtype or (bias is not None and bias.dtype != rows.dtype):
        found = weight.dtype if bias is None or weight.dtype != rows.dtype else bias.dtype
        raise ValueError(f"{op}: {name} and its bias must be {rows.dtype}, as rows; got {found}")
    if bias is not None and bias.shape != weight.shape[:2]:
        raise ValueError(f"{op}: the bias of {name} must be {list(weight.shape[:2])}; got {tuple(bias.shape)}")


def as_outputs_by_inputs(weight: Tensor, transposed: bool) -> Tensor:
    """Return a view ``[E, O, I]``."""
    return weight.transpose(1, 2) if transposed and weight.dim() == 3 else weight
