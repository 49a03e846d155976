"""Layers whose attention is a variant of their user's: which they are, and where they find its tensors.

A tensor is what the layer's attention module has under its name, or what it calls attention with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from compiled_llm.model.refusals import UnsupportedModelError
from compiled_llm_ops import (
    PageTable,
    Variant,
    decode_attention_variant,
    decode_attention_variant_lse,
    paged_attention_variant,
    paged_attention_variant_lse,
    planned_attention_variant,
    planned_attention_variant_lse,
)
from compiled_llm_ops.contracts.variants import DecodeAttentionVariant, PagedAttentionVariant, PlannedAttentionVariant
from compiled_llm_ops.variants.expressions import VariantTensor
from compiled_llm_ops.variants.registry import variant_named

VariantLayers = Mapping[str, Sequence[int] | str]
"""The layers of each variant, by its name; ``"all"`` for all."""


class AppliedVariant(NamedTuple):
    """A variant in one layer's call: its key, and its tensors, those by query for packed ones.

    States are queries ``[T, H, D]``, keys and values; options are a scale, a window, and a cap, which layers with
    variants do not have; scales are those of pages of fp8.
    """

    key: str
    tensors: list[Tensor]

    def over_packed(
        self,
        query: Tensor,
        pages: Tensor,
        table: PageTable,
        options: tuple[float, int, float],
        scales: tuple[Tensor | None, ...],
        wants_lse: bool,
        planned: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend over pages that hold all keys and values, as ``AttentionSpec.attend``.

        ``planned``: the plan and its workspace; None for kernels that need none.
        """
        scale, window_left, _ = options
        how = (self.key, self.tensors, scale, window_left)
        if planned is None:
            unplanned = PagedAttentionVariant(query, pages, *table, *how, *scales)
            if wants_lse:
                return paged_attention_variant_lse(*unplanned)
            return paged_attention_variant(*unplanned), None
        plan, workspace = planned
        arguments = PlannedAttentionVariant(query, pages, *table, plan, workspace, *how, *scales)
        if wants_lse:
            return planned_attention_variant_lse(*arguments)
        return planned_attention_variant(*arguments), None

    def of_newest(
        self,
        states: tuple[Tensor, Tensor, Tensor],
        table: tuple[Tensor, Tensor, Tensor, Tensor],
        options: tuple[float, int, float],
        scales: tuple[Tensor | None, ...],
        wants_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Write the newest keys and values, and attend, as ``AttentionSpec.attend``; pages are first in ``table``."""
        scale, window_left, _ = options
        key_scale, value_scale, saturated = scales
        arguments = DecodeAttentionVariant(
            *states,
            *table,
            self.key,
            self.tensors,
            scale,
            window_left,
            key_scale=key_scale,
            value_scale=value_scale,
            saturated=saturated,
        )
        if wants_lse:
            return decode_attention_variant_lse(*arguments)
        return decode_attention_variant(*arguments), None


class LayerVariant(NamedTuple):
    """The variant of a layer.

    Attributes:
        key: of the variant.
        tensors: the name of each, and whether attention is called with it; else it is an attribute of the module.
        per_query: those that attention is called with for each query: ``[batch, tokens, ...]``, which are packed.
    """

    key: str
    tensors: tuple[tuple[str, bool], ...]
    per_query: frozenset[str]

    def applied(self, module: nn.Module, arguments: Mapping[str, Any]) -> AppliedVariant:
        """Return the variant in a call of a module's attention."""
        tensors = [arguments[name] if called_with else getattr(module, name) for name, called_with in self.tensors]
        packed = [
            tensor.flatten(0, 1) if name in self.per_query else tensor
            for (name, _), tensor in zip(self.tensors, tensors, strict=True)
        ]
        return AppliedVariant(self.key, packed)


def variant_of(variants: VariantLayers, layer: int) -> Variant | None:
    """Return the variant of a layer; ValueError if it is not registered."""
    own = (name for name, layers in variants.items() if isinstance(layers, str) or layer in layers)
    name = next(own, None)
    return None if name is None else variant_named("wrap", name)


def check_numbers(variants: VariantLayers, count: int) -> None:
    """Raise UnsupportedModelError if variants name layers that a model of so many does not have."""
    for name, layers in variants.items():
        missing = [number for number in layers if number not in range(count)] if layers != "all" else []
        if missing:
            raise UnsupportedModelError(
                f"wrap: variants: {name!r} is for layers {', '.join(map(str, missing))}, and the model has {count}, "
                "counted from 0"
            )


def layer_variant(
    variant: Variant, module: nn.Module, query: Tensor, arguments: Mapping[str, Any], sinks: bool
) -> LayerVariant:
    """Return the variant of a layer, by a trial call of its attention.

    Args:
        variant: of the layer.
        module: calls attention.
        query: ``[batch, H, tokens, D]``.
        arguments: by name.
        sinks: whether attention is called with sinks.

    Raises:
        UnsupportedModelError: a tensor is missing or does not fit, or the variant cannot have sinks.
    """
    if sinks and not variant.softmax:
        raise UnsupportedModelError(
            f"wrap: variants: {variant.name!r} has no softmax, in which sinks of {type(module).__name__} take part; "
            "use it on other layers"
        )
    for own in variant.tensors:
        _check_tensor(variant, own, module, query, arguments)
    found = tuple((own.name, isinstance(arguments.get(own.name), Tensor)) for own in variant.tensors)
    return LayerVariant(variant.key, found, frozenset(own.name for own in variant.tensors if own.axes[0] == "query"))


def _check_tensor(
    variant: Variant, own: VariantTensor, module: nn.Module, query: Tensor, arguments: Mapping[str, Any]
) -> None:
    said = f"wrap: variants: {own.name} of {variant.name!r}"
    name, (rows, heads, tokens, _) = type(module).__name__, query.shape
    if own.axes[0] == "row":
        raise UnsupportedModelError(
            f"{said} has an entry for each row, and rows come and go between the steps of a model; index it by query, "
            "and call attention with it"
        )
    called_with = arguments.get(own.name)
    given = getattr(module, own.name, None) if called_with is None else called_with
    if own.axes[0] == "query" and called_with is None:
        raise UnsupportedModelError(
            f"{said} has an entry for each query, and {name} does not call its attention with it; pass it to the "
            "attention function as a keyword argument, [batch, tokens, ...]"
        )
    if not isinstance(given, Tensor):
        raise UnsupportedModelError(
            f"{said}: {name} neither has a tensor of this name nor calls its attention with one; register a buffer or "
            "parameter of this name in it, or pass it to the attention function as a keyword argument"
        )
    leading = [rows, tokens] if own.axes[0] == "query" else []
    sizes = [*leading, *(heads if axis == "head" else None for axis in own.axes if axis != "query")]
    fits = given.dim() == len(sizes) and all(
        size is None or size == found for size, found in zip(sizes, given.shape, strict=True)
    )
    if not fits or given.dtype != own.dtype:
        wanted = ", ".join("any" if size is None else str(size) for size in sizes)
        raise UnsupportedModelError(
            f"{said}: that of {name} must be [{wanted}] {own.dtype} in a call with {tokens} tokens; got "
            f"{tuple(given.shape)} {given.dtype}"
        )
