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


class PackedLinears(NamedTuple):
    rows: Tensor
    codes: list[Tensor]
    scales: list[Tensor]
    zeros: list[Tensor]
    nested: list[Tensor]
    bias: Tensor | None
    code: str
    layout: str
    group_inputs: int = 0
    overlap: bool = False

    @property
    def outputs(self) -> list[int]:
        """Those of each weight."""
        if self.layout in ("rows", "high_first"):
            return [codes.shape[0] for codes in self.codes]
        each = 8 if self.layout == "words_by_output" else 1
        return [codes.shape[-1] * each for codes in self.codes]

    @property
    def weights(self) -> list[PackedWeight]:
        """The weights, one after the other."""
        format, inputs = PackedFormat(self.code, self.layout, 1, self.group_inputs), self.rows.shape[-1]
        optional: list[list[Tensor | None]] = [[*own] or [None] * len(self.codes) for own in (self.zeros, self.nested)]
        each = zip(self.codes, self.scales, *optional, self.outputs, strict=True)
        return [
            PackedWeight(format, codes, scales, zeros, (outputs, inputs), nested)
            for codes, scales, zeros, nested, outputs in each
        ]
