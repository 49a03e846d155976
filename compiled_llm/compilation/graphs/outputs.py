"""One buffer for the outputs of all CUDA graphs: it is read before the next one runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Emitted: TypeAlias = Mapping[int | str, Tensor]
"""Outputs of a step besides logits, ``[T, ...]``: hidden states by layer number, and what hooks emit, by name."""


class StepOutputs(NamedTuple):
    """The results of a step."""

    logits: Tensor  # ``[L, V]`` in the model's dtype
    tokens: Tensor  # int64, sampled from them
    emitted: Emitted  # empty if no call asked for hidden states, and no hook emits anything


class SharedOutputs:
    """Logits and tokens of as many rows as a step may have, or of more once there is one."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._buffers: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def writing(self, launch: Callable[[], StepOutputs], like: StepOutputs) -> Callable[[], StepOutputs]:
        """Return the same launch, which leaves its outputs here; ``like`` are earlier ones."""
        logits, tokens = self._views(like)

        def launch_and_copy() -> StepOutputs:
            outputs = launch()
            logits.copy_(outputs.logits)
            tokens.copy_(outputs.tokens)
            return outputs._replace(logits=logits, tokens=tokens)  # few steps emit anything, and each its own

        return launch_and_copy

    def _views(self, like: StepOutputs) -> tuple[Tensor, Tensor]:
        logits, tokens, _ = like
        if not all(map(self._fits, self._buffers, (logits, tokens))) or not self._buffers:
            with torch.inference_mode(False):  # what was captured before goes on with its own
                self._buffers = [
                    torch.zeros(
                        max(self._rows, len(output)), *output.shape[1:], dtype=output.dtype, device=output.device
                    )
                    for output in (logits, tokens)
                ]
        return self._first(len(logits), len(tokens))

    def _first(self, logits: int, tokens: int) -> tuple[Tensor, Tensor]:
        first, second = self._buffers
        return first[:logits], second[:tokens]

    @staticmethod
    def _fits(buffer: Tensor, output: Tensor) -> bool:
        same = (buffer.dtype, buffer.shape[1:]) == (output.dtype, output.shape[1:])
        return same and len(output) <= len(buffer)

    def release(self) -> None:
        self._buffers = []
