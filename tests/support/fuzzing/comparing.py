"""Where two results differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CLOSE = 1e-4


def difference(ours: Any, theirs: Any, where: str = "") -> str | None:
    """The first place where two results of ``side.plain`` differ, in words; None if they are equal."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return _of_tensors(ours, theirs, where)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if list(ours) != list(theirs):
            return f"{where}: {list(ours)}, HuggingFace's {list(theirs)}"
        return next(filter(None, (difference(ours[name], theirs[name], f"{where}.{name}") for name in ours)), None)
    if isinstance(ours, list) and isinstance(theirs, list):
        both = enumerate(zip(ours, theirs, strict=False))
        first = next(filter(None, (difference(*pair, f"{where}[{index}]") for index, pair in both)), None)
        lengths = f"{where}: {len(ours)} entries, HuggingFace's {len(theirs)}"
        return first or (lengths if len(ours) != len(theirs) else None)
    return None if type(ours) is type(theirs) and ours == theirs else f"{where}: {ours}, HuggingFace's {theirs}"


def _of_tensors(ours: Tensor, theirs: Tensor, where: str) -> str | None:
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        kinds = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (ours, theirs))
        return f"{where}: {next(kinds)}, HuggingFace's {next(kinds)}{_values(ours, theirs)}"
    if torch.equal(ours, theirs):
        return None
    if ours.is_floating_point():
        close = torch.isclose(ours, theirs, rtol=CLOSE, atol=CLOSE, equal_nan=True)
        if bool(close.all()):
            return None
        at = (~close).nonzero()[0].tolist()
        return f"{where}: {ours[tuple(at)].item()} at {at}, HuggingFace's {theirs[tuple(at)].item()}"
    return f"{where}{_values(ours, theirs)}"


def _values(ours: Tensor, theirs: Tensor) -> str:
    if max(ours.numel(), theirs.numel()) > 400 or ours.is_floating_point():
        return ""
    return f":\n    {ours.tolist()}\n  HuggingFace's\n    {theirs.tolist()}"
