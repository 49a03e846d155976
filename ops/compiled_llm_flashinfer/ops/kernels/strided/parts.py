"""Results that several programs write for the same queries, each for a part of the keys, and how they are merged."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.kernels.attention.merge import merge_many


class PartResults:
    """Where programs write their results, ``[T, H, E]`` and ``[T, H]``; with several parts, what ``merge`` reads."""

    def __init__(self, out: Tensor, lse: Tensor | None, parts: int) -> None:
        self._result = out
        self._result_lse = lse
        # The last axis of what a program writes is contiguous.
        self._by_part = parts > 1 or out.stride(2) != 1
        if self._by_part:
            tokens, heads, size = out.shape
            out = torch.empty((tokens, parts, heads, size), dtype=torch.float32, device=out.device)
            lse = torch.empty((tokens, parts, heads), dtype=torch.float32, device=out.device)
        self.out = out
        self.lse = lse

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the results by token, by head and by part, then those of the log-sum-exps."""
        return (*self._strides_of(self.out), *self._strides_of(self.lse))

    def _strides_of(self, results: Tensor | None) -> tuple[int, int, int]:
        if results is None:
            return 0, 0, 0
        if self._by_part:
            return results.stride(0), results.stride(2), results.stride(1)
        return results.stride(0), results.stride(1), 0

    def merge(self) -> None:
        """Write the results of all parts, if programs wrote parts."""
        if not self._by_part:
            return
        assert self.lse is not None, "parts have one"
        out, lse = self._result, self._result_lse
        merged = out if out.is_contiguous() else out.new_empty(out.shape)
        merged_lse = lse if lse is not None and lse.is_contiguous() else self.lse.new_empty(out.shape[:2])
        merge_many(self.out, self.lse, merged, merged_lse)
        if merged is not out:
            out.copy_(merged)
        if lse is not None and merged_lse is not lse:
            lse.copy_(merged_lse)


def check_contiguous(op: str, of: str, **states: Tensor) -> None:
    """Raise ValueError unless the last axis of each tensor, which has the numbers ``of`` something, is contiguous."""
    for name, tensor in states.items():
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"{op}: the numbers of a {of} must lie next to each other; got {name} of strides {tensor.stride()}"
            )
