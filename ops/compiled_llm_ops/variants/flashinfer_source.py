"""A variant for FlashInfer: its functor in C++, and the ``jit_args`` that FlashInfer's wrappers of prefill take."""

# The functor is for the kernels of ``backend="fa2"``, over pages. They ask for masks at the borders of a causal mask
# and of a window alone, so that a key that is not visible is hidden by its logit.
# FlashInfer 0.6.13 sums the parts of a row that several programs share into registers that nobody has cleared, where
# there is no softmax (``PersistentVariableLengthAttentionSumKernel``): plan these with ``disable_split_kv=True``.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm_ops.variants.expressions import READ_AS, Expression, Type, VariantTensor, literal
from compiled_llm_ops.variants.registry import variant_named

_TYPES: dict[Type, str] = {"float": "float", "int": "int", "bool": "bool"}
_STORED = {
    torch.float32: "float",
    torch.float16: "half",
    torch.bfloat16: "nv_bfloat16",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.bool: "bool",
}
_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&&", "or": "||", "xor": "!=",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip
_SPELLED = {
    **{name: f"{name}f({{0}})" for name in ("exp", "exp2", "log", "log2", "sqrt", "tanh")},
    "sigmoid": "1.0f / (1.0f + expf(-({0})))",
    "where": "({0}) ? ({1}) : ({2})",
    "minimum": "({0}) < ({1}) ? ({0}) : ({1})",
    "maximum": "({0}) > ({1}) ? ({0}) : ({1})",
    "abs": "({0}) < 0 ? -({0}) : ({0})",
    "neg": "-({0})",
    "not": "!({0})",
    "float": "float({0})",
    "int": "int({0})",
    "floordiv": "floor_div({0}, {1})",
    "mod": "({0}) - floor_div({0}, {1}) * ({1})",
}
_INPUTS = {
    "logit": "float(logits) * float(params.sm_scale)",
    "row": "int(batch_idx)",
    "head": "int(qo_head_idx)",
    "query_position": "int(kv_len) - int(qo_len) + int(qo_idx)",
    "key_position": "int(kv_idx)",
}
_QUERY = "(int64_t(params.q_indptr[batch_idx]) + (qo_idx < qo_len ? qo_idx : qo_len - (qo_len > 0)))"
"""A query of the row, as tiles are filled up with queries that it does not have."""
# In a captured launch programs may be left over, which compute nothing that is kept, for rows that have no queries at
# all, behind all others.


_SUMMED = """
  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, { return output; })
"""


class FlashInferVariant(NamedTuple):
    """A variant in FlashInfer's words.

    Attributes:
        name: of the functor.
        declaration: its source.
        tensor_names: additional tensors.
        tensor_dtypes: theirs, in C++.
        scalar_names: additional numbers: the scale, and sizes of tensors by query, by head and by position.
        scalar_dtypes: theirs, in C++.
        key: of the variant.
    """

    name: str
    declaration: str
    tensor_names: tuple[str, ...]
    tensor_dtypes: tuple[str, ...]
    scalar_names: tuple[str, ...]
    scalar_dtypes: tuple[str, ...]
    key: str

    def jit_args(self, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> list[Any]:
        """Return ``jit_args`` of ``BatchPrefillWithPagedKVCacheWrapper(..., backend="fa2")``; heads are D as stored."""
        types = "_".join(str(own).removeprefix("torch.") for own in (dtype, kv_dtype))
        uri = f"variant_{self.key.replace('@', '_')}_{types}_{head_dim}"
        additional = (self.tensor_names, self.tensor_dtypes, self.scalar_names, self.scalar_dtypes)
        sizes = (dtype, kv_dtype, dtype, torch.int32, head_dim, head_dim)
        return [uri, *sizes, *map(list, additional), self.name, self.declaration]


def flashinfer_variant(name: str) -> FlashInferVariant:
    """Return a variant that is registered as FlashInfer takes it; ValueError if there is none."""
    variant = variant_named("flashinfer_variant", name)
    sizes = [f"variant_{own.name}_size_{axis}" for own in variant.tensors for axis in _checked_axes(own)]
    functor = f"Variant_{variant.name}_{variant.hash}"
    return FlashInferVariant(
        functor,
        _declaration(functor, variant.logits, variant.visible, variant.tensors, variant.softmax),
        tuple(f"variant_{own.name}" for own in variant.tensors),
        tuple(_STORED[own.dtype] for own in variant.tensors),
        ("sm_scale", *sizes),
        ("double", *["int64_t"] * len(sizes)),
        variant.key,
    )


def flashinfer_arguments(name: str, tensors: Sequence[Tensor], scale: float) -> list[Any]:
    """Return what ``run`` of such a wrapper takes after queries and pages.

    Args:
        name: of the variant.
        tensors: those of the variant, in its order, contiguous.
        scale: factor on the logits, before the variant has them.
    """
    variant = variant_named("flashinfer_arguments", name)
    pairs = zip(variant.tensors, tensors, strict=True)
    return [*tensors, scale, *(tensor.shape[axis] for own, tensor in pairs for axis in _checked_axes(own))]


def _checked_axes(tensor: VariantTensor) -> tuple[int, ...]:
    """The axes whose sizes the functor looks at before it reads an entry."""
    return (0, *tensor.sized) if tensor.axes[0] == "query" else tensor.sized


def _declaration(
    functor: str,
    logits: Expression | None,
    visible: Expression | None,
    tensors: Sequence[VariantTensor],
    softmax: bool,
) -> str:
    transform = ["return float(logits) * float(params.sm_scale);"] if logits is None else _body(logits, tensors)
    if visible is not None:
        hidden = "-math::inf" if softmax else "0.0f"
        transform.insert(0, f"if (!Visible(params, batch_idx, qo_idx, kv_idx, qo_head_idx)) return {hidden};")
    shown = ["return true;"] if visible is None else _body(visible, tensors)
    transformed, seen = ("\n".join(f"    {line}" for line in lines) for lines in (transform, shown))
    summed = "" if softmax else _SUMMED
    return f"""
struct {functor} : AttentionVariantBase {{
  static constexpr bool use_softmax = {str(softmax).lower()};

  uint32_t qo_len, kv_len, window_left;
  float sm_scale_log2;

  template <typename Params>
  __device__ __host__ {functor}(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {{
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = params.window_left >= 0 ? params.window_left : kv_len;
    sm_scale_log2 = math::log2e;  // the scale is part of the logits
  }}

  __device__ __forceinline__ static int floor_div(int number, int divisor) {{
    const int quotient = number / divisor;
    return quotient * divisor != number && (number < 0) != (divisor < 0) ? quotient - 1 : quotient;
  }}

  template <typename Params>
  __device__ __forceinline__ bool Visible(const Params& params, uint32_t batch_idx, uint32_t qo_idx, uint32_t kv_idx,
                                          uint32_t qo_head_idx) const {{
{seen}
  }}

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {{
{transformed}
  }})

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {{
    return kv_idx + qo_len + window_left >= kv_len + qo_idx;
  }})
{summed}}};
"""


def _body(expression: Expression, tensors: Sequence[VariantTensor]) -> list[str]:
    """Return the statements that return what an expression computes."""
    lines: list[str] = []

    def assigned(type: str, text: str) -> str:
        lines.append(f"const {type} x{len(lines)} = {text};")
        return f"x{len(lines) - 1}"

    def read(name: str, indices: Sequence[str]) -> str:
        own = next(tensor for tensor in tensors if tensor.name == name)
        place, inside = _place(own, indices)
        type = _TYPES[READ_AS[own.dtype]]
        entry = f"{type}(params.variant_{name}[{place}])"
        return assigned(type, f"({' && '.join(inside)}) ? {entry} : {type}(0)" if inside else entry)

    def constant(value: Any, type: Type) -> str:
        text = literal(value, type, "INFINITY", "NAN")
        return {"True": "true", "False": "false"}.get(text, f"({text}f)" if "." in text or "e" in text else f"({text})")

    def compute(name: str, operands: Sequence[str], type: Type) -> str:
        if name in _OPERATORS:
            return assigned(_TYPES[type], f"{operands[0]} {_OPERATORS[name]} {operands[1]}")
        return assigned(_TYPES[type], _SPELLED[name].format(*operands))

    result = expression.evaluate({name: f"({text})" for name, text in _INPUTS.items()}, read, constant, compute)
    return [*lines, f"return {result};"]


def _place(tensor: VariantTensor, indices: Sequence[str]) -> tuple[str, list[str]]:
    """Return where an entry lies in a contiguous tensor, and what tells that it is inside."""
    place, given, inside = "", list(indices), []
    if tensor.axes[0] == "query":
        place, inside = _QUERY, [f"{_QUERY} < params.variant_{tensor.name}_size_0"]
    elif tensor.axes[0] == "row":
        place = f"int64_t({given.pop(0)})"
    for index, axis in zip(given, tensor.sized, strict=True):
        size = f"params.variant_{tensor.name}_size_{axis}"
        place = f"({place} * {size} + {index})" if place else f"int64_t({index})"
        inside += [f"{index} >= 0", f"{index} < {size}"]
    return place, inside
