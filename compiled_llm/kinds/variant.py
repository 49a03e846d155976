"""Layers whose attention is a variant of their user's: which they are, and where they find its tensors."""

# A tensor is what the layer's attention module has under its name, or what it calls attention with.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

import compiled_llm_ops as ops
from compiled_llm.kinds.full import append
from compiled_llm.kinds.kind import Attended, AttentionCall, KindOver, Layer, LayerFunctions, LayerKind, SeenCall
from compiled_llm.kinds.refusals import UnsupportedModelError
from compiled_llm.kinds.rows import NewestTokens, PackedTokens, Rows
from compiled_llm.kinds.spec import PageScales
from compiled_llm_ops import Geometry, Variant
from compiled_llm_ops.backends import ChosenBackend
from compiled_llm_ops.variants.contracts import DecodeAttentionVariant
from compiled_llm_ops.variants.expressions import VariantTensor
from compiled_llm_ops.variants.packed import missing_kernel
from compiled_llm_ops.variants.registry import variant_named

if TYPE_CHECKING:
    from compiled_llm.kinds import variant as this
    from compiled_llm.kinds.registry import KindsPart

    checked: KindsPart = this


class LayerVariant(NamedTuple):
    """The variant of a layer."""

    key: str  # of the variant
    # the name of each, and whether attention is called with it; else it is an attribute of the module
    tensors: tuple[tuple[str, bool], ...]
    # those that attention is called with for each query: ``[batch, tokens, ...]``, which are packed
    per_query: frozenset[str]

    def applied(self, call: AttentionCall) -> list[Tensor]:
        """Return the variant's tensors in a layer's call, those by query for packed ones."""
        found = (
            (name, call.arguments[name] if called_with else getattr(call.module, name))
            for name, called_with in self.tensors
        )
        return [tensor.flatten(0, 1) if name in self.per_query else tensor for name, tensor in found]


@dataclass(frozen=True)
class VariantAttention(KindOver):
    """Attention by a variant; each row reads all of its own pages."""

    name = "variant"
    reads_shared_pages = False
    own: LayerVariant  # the variant

    @classmethod
    def of(cls, seen: SeenCall, kind: LayerKind) -> LayerKind:
        variant = _variant_of(seen.functions, seen.number)
        return kind if variant is None else cls(kind, _found(variant, seen))

    @classmethod
    def check(cls, model: PreTrainedModel, functions: LayerFunctions) -> None:
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        for name, layers in functions.items():
            variant_named("variants", name)
            missing = [number for number in layers if number not in range(count)] if layers != "all" else []
            if missing:
                raise UnsupportedModelError(
                    f"wrap: variants: {name!r} is for layers {', '.join(map(str, missing))}, and the model has "
                    f"{count}, counted from 0"
                )

    @classmethod
    def meanings(cls, functions: LayerFunctions) -> dict[str, Any]:
        return {f"variant {name}": [variant_named("artifacts", name).hash, own] for name, own in functions.items()}

    @property
    def arguments(self) -> frozenset[str]:
        return self.memory.arguments.union(name for name, _ in self.own.tensors)

    @property
    def function(self) -> str:
        return self.own.key

    def missing_kernel(self, chosen: ChosenBackend, layer: Layer, geometry: Geometry, device: str) -> str | None:
        if device == "cuda" and chosen.decodes_by_our_own and (own := missing_kernel(layer.head_dim)) is not None:
            return own
        if device == "cuda" and not (chosen.decodes_by_our_own or chosen.plans("functions")):
            return "it has no kernels for variants"
        return super().missing_kernel(chosen, layer, geometry, device)

    def has_plan(self, chosen: ChosenBackend) -> bool:
        return chosen.plans("functions")

    def attend(self, rows: Rows, call: AttentionCall, pages: Tensor, scales: PageScales) -> Attended:
        scale, window_left, _ = call.options  # the table of support refuses a cap
        key, tensors = self.own.key, self.own.applied(call)
        if isinstance(rows, NewestTokens):
            given = (*call.states, pages, rows.starts, rows.lengths, rows.indices, key, tensors, scale, window_left)
            newest = DecodeAttentionVariant(
                *given, key_scale=scales.key, value_scale=scales.value, saturated=scales.saturated
            )
            return call.by(ops.decode_attention_variant, ops.decode_attention_variant_lse, newest)
        assert isinstance(rows, PackedTokens)
        append(rows, call, pages, scales)
        how = (key, tensors, scale, window_left, scales.key, scales.value)
        tokens = (call.states[0], pages, rows.qo_indptr, *rows.table)
        if (plan := rows.plans.of(call.layer)) is not None:
            planned = (*tokens, *plan, *how)
            return call.by(ops.planned_attention_variant, ops.planned_attention_variant_lse, planned)
        return call.by(ops.paged_attention_variant, ops.paged_attention_variant_lse, (*tokens, *how))


def _variant_of(functions: LayerFunctions, layer: int) -> Variant | None:
    """Return the variant of a layer; ValueError if it is not registered."""
    own = (name for name, layers in functions.items() if isinstance(layers, str) or layer in layers)
    name = next(own, None)
    return None if name is None else variant_named("wrap", name)


def _found(variant: Variant, seen: SeenCall) -> LayerVariant:
    """Return the variant of a layer; UnsupportedModelError if a tensor does not fit, or it cannot have sinks."""
    if seen.sinks and not variant.softmax:
        raise UnsupportedModelError(
            f"wrap: variants: {variant.name!r} has no softmax, in which sinks of {type(seen.module).__name__} take "
            "part; use it on other layers"
        )
    for own in variant.tensors:
        _check_tensor(variant, own, seen.module, seen.query, seen.arguments)
    found = tuple((own.name, isinstance(seen.arguments.get(own.name), Tensor)) for own in variant.tensors)
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


KINDS: Sequence[type[LayerKind]] = (VariantAttention,)
