"""What the op and its kernels take."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from compiled_llm_ops.packed.formats import PackedFormat, PackedWeight


class PackedLinear(NamedTuple):
    rows: Tensor
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    nested: Tensor | None
    bias: Tensor | None
    outputs: int
    code: str
    layout: str = "rows"
    group_outputs: int = 1
    group_inputs: int = 0
    may_round: bool = False
    overlap: bool = False

    @property
    def weight(self) -> PackedWeight:
        format = PackedFormat(self.code, self.layout, self.group_outputs, self.group_inputs, self.may_round)
        shape = self.outputs, self.rows.shape[-1]
        return PackedWeight(format, self.codes, self.scales, self.zeros, shape, self.nested)
