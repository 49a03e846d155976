"""Where CUDA graphs of prefills read extra inputs: memory of the largest shape, whose beginning the others have."""

# Graphs run one after the other, each once it was filled, so that one memory serves all.

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm.compilation.inputs import ExtraTensors


class ExtraMemory:
    """The memory of each program, allocated with its first graph."""

    def __init__(self) -> None:
        self._memory: dict[str, list[Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return sum(tensor.nbytes for tensors in self._memory.values() for tensor in tensors)

    def filled(self, extra: ExtraTensors, tokens: int, most: int) -> ExtraTensors:
        """Return extra inputs of a shape of so many tokens, copied to where graphs of up to ``most`` read them."""
        name, given = extra.program.name, [tensor for tensor, _ in extra.sizes]
        if name not in self._memory:
            with torch.inference_mode(False):
                self._memory[name] = [own.new_empty(own.numel() // tokens * most) for own in given]
        views = [memory[: own.numel()].view(own.shape) for memory, own in zip(self._memory[name], given, strict=True)]
        for view, own in zip(views, given, strict=True):
            view.copy_(own)
        return extra.over(views)

    def release(self) -> None:
        """Give the memory back: nothing runs any more."""
        self._memory.clear()
