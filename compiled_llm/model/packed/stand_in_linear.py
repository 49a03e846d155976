"""The module that stands in programs for a linear layer of another library."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from compiled_llm.model.packed.reading import ReadWeight
from compiled_llm_ops import packed_linear
from compiled_llm_ops.packed.formats import PackedFormat, PackedWeight

_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)
_TENSORS = ("codes", "scales", "zeros", "nested", "bias")


class StandInLinear(nn.Module):
    """A linear layer that multiplies by our op; its parameters are over the library's memory."""

    # What the op takes besides is one tuple of plain values, by which layers are compared.

    codes: Tensor
    scales: Tensor
    nested: Tensor | None
    bias: Tensor | None

    def __init__(self, module: nn.Module, read: ReadWeight) -> None:
        """Stand for a module, whose hooks it has."""
        super().__init__()
        vars(self).update({name: vars(module)[name] for name in _HOOKS})
        self.training = module.training
        self.out_features, self.in_features = read.weight.shape
        self._how, self._kinds = _how(read), _kinds(read)
        for name in _TENSORS:
            self.register_parameter(name, None)
        self.take(read)

    @property
    def format(self) -> PackedFormat:
        """The way its weight is packed."""
        return PackedFormat(*self._how[1:])

    @property
    def weight(self) -> PackedWeight:
        """Its weight."""
        own, shape = self._parameters, (self.out_features, self.in_features)
        return PackedWeight(self.format, self.codes, self.scales, own["zeros"], shape, self.nested)

    def fits(self, read: ReadWeight) -> bool:
        """Whether programs that have it may go on with another reading of its module."""
        return (_how(read), _kinds(read)) == (self._how, self._kinds)

    def take(self, read: ReadWeight) -> None:
        """Multiply by what was read from now on."""
        vars(self)["_parameters"].update(zip(_TENSORS, _tensors(read), strict=True))

    def addresses(self) -> list[int]:
        """Return where its tensors are."""
        return [0 if tensor is None else tensor.data_ptr() for tensor in self._parameters.values()]

    def drop(self) -> None:
        """Drop its tensors until it takes others."""
        self._parameters.update(dict.fromkeys(_TENSORS))

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``, ``[..., N]``, of the input's dtype."""
        own: Any = self
        bias = None if own.bias is None else own.bias.to(input.dtype)
        # The kernel may begin while the previous one ends, which writes no weight: see the ops' ``kernels.pdl``.
        return packed_linear(input, own.codes, own.scales, own.zeros, own.nested, bias, *self._how, overlap=True)


class Member(NamedTuple):
    """A layer that is one product with others: its library's, and what stands for it."""

    module: nn.Module
    stand_in: StandInLinear


def _tensors(read: ReadWeight) -> list[Tensor | None]:
    weight = read.weight
    return [weight.codes, weight.scales, weight.zeros, weight.nested, read.bias]


def _kinds(read: ReadWeight) -> tuple[Any, ...]:
    """Return the types of what was read; None for what there is not."""
    return tuple(None if tensor is None else tensor.dtype for tensor in _tensors(read))


def _how(read: ReadWeight) -> tuple[int, str, str, int, int, bool]:
    """Return what the op takes besides tensors, in its order: outputs and the format."""
    code, layout, outputs, inputs, may_round = read.weight.format
    return read.weight.shape[0], code, layout, outputs, inputs, may_round
