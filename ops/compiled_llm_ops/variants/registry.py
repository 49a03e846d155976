"""Variants by their names, each with one meaning in a process."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from compiled_llm_ops.variants.expressions import INPUTS, READ_AS, Expression, Index, VariantTensor
from compiled_llm_ops.variants.trace import traced

_INDICES = ("row", "query", "head", "position")

TensorSpecs = Mapping[str, tuple[str | Sequence[str], torch.dtype]]  # index and dtype of each tensor


class Variant:
    """Attention with logits and visibility of its user's own.

    Attributes:
        name: given by its user.
        logits: what becomes of a logit; None if nothing does.
        visible: whether a query sees a key that is not after it; None if it sees all of them.
        tensors: in the order that ops take them in.
        softmax: whether weights are the softmax of the logits; if not, they are the logits themselves.
    """

    def __init__(
        self,
        name: str,
        logits: Expression | None,
        visible: Expression | None,
        tensors: tuple[VariantTensor, ...],
        softmax: bool,
    ) -> None:
        self.name = name
        self.logits = logits
        self.visible = visible
        self.tensors = tensors
        self.softmax = softmax

    def __repr__(self) -> str:
        return f"<Variant {self.key}>"

    @cached_property
    def hash(self) -> str:
        """Of its meaning: of both functions as they were traced, of the tensors, and of ``softmax``."""
        text = f"{self.softmax}\n{self.tensors}\n{self.logits}\n{self.visible}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def key(self) -> str:
        """Name and hash, which ops take as a name, too: caches of compiled code then tell meanings apart."""
        return f"{self.name}@{self.hash}"

    def checked(self, op: str, tensors: Sequence[Tensor], query: Tensor, rows: int, wants_lse: bool) -> Variant:
        """Return it; ValueError if tensors do not fit queries ``[T, H, D]`` of so many rows, or it has no lse."""
        if wants_lse and not self.softmax:
            raise ValueError(f"{op}_lse: variant {self.name!r} has no softmax, and no log-sum-exp; call {op}")
        names = [tensor.name for tensor in self.tensors]
        if len(tensors) != len(names):
            raise ValueError(
                f"{op}: variant {self.name!r} takes {len(names)} tensors ({', '.join(names) or 'none'}); got "
                f"{len(tensors)}"
            )
        sizes = {"row": rows, "query": query.shape[0], "head": query.shape[1]}
        for own, given in zip(self.tensors, tensors, strict=True):
            shape = [sizes.get(index) for index in own.axes]
            fits = given.dim() == len(shape) and all(
                size is None or size == found for size, found in zip(shape, given.shape, strict=True)
            )
            if not fits or given.dtype != own.dtype:
                wanted = ", ".join("any" if size is None else str(size) for size in shape)
                raise ValueError(
                    f"{op}: {own.name} of variant {self.name!r} must be [{wanted}] {own.dtype}, by "
                    f"{' and '.join(own.axes)}; got {tuple(given.shape)} {given.dtype}"
                )
        return self


_variants: dict[str, Variant] = {}
_lock = threading.Lock()


def register_variant(
    name: str,
    logits: Callable[..., Any] | None = None,
    visible: Callable[..., Any] | None = None,
    tensors: TensorSpecs | None = None,
    softmax: bool = True,
) -> Variant:
    """Register attention of your own, for ``paged_attention_variant``, ``decode_attention_variant`` and ``wrap``.

    Both functions are traced once, here, by ``torch.fx``: they are called with stand-ins for numbers, and compute by
    arithmetic, comparisons, ``torch.where``, ``exp``, ``log``, ``tanh``, ``sigmoid``, ``abs``, ``minimum``, ``maximum``
    and entries of tensors. The same trace is the kernel on a CPU, part of Triton's kernels and FlashInfer's functor.
    Logits are float32, all indices int32 from 0 on: ``row`` in the batch, ``head`` of the query, and the positions of
    query and key in their row. A key after the query is never seen, so ``query_position >= key_position`` where it
    counts.

    Args:
        name: an identifier.
        logits: ``f(logit, row, head, query_position, key_position, **tensors)``, returns a number; ``logit`` is
            ``query @ key * scale``. None to leave logits as they are.
        visible: ``g(row, head, query_position, key_position, **tensors)``, returns a truth value. None if queries see
            all keys up to their own token.
        tensors: for each tensor that the functions read, its index and its dtype: ``{"slopes": ("head",
            torch.float32)}``. An index is ``"row"``, ``"head"``, ``"position"`` (any number, of an axis of any size),
            ``"query"`` (the query's own entry, which is not written: ``gate`` in place of ``gate[query]``), or a tuple
            of these, rows or queries first: ``{"bias": (("head", "position"), torch.float32)}`` is read by
            ``bias[head, query_position - key_position]``. An entry outside of the tensor is 0. Float32, float16 and
            bfloat16 are read as float32, int32 and int64 as int32, bool as it is.
        softmax: if False, a key's weight is its logit, and nothing is normalised: keys that are not visible have 0.

    Returns:
        The variant. Of the same meaning as one that is registered under the name, that one.

    Raises:
        ValueError: an operation has no kernel (its line is named), a name or a tensor is impossible, or another variant
            has the name. Nothing is registered then.

    Source:
        FlexAttention's functions of scores and masks (https://arxiv.org/abs/2412.05496), FlashInfer's variants
        (https://arxiv.org/abs/2501.01005).

    Examples:
        >>> register_variant("cap", logits=lambda logit, row, head, query, key: 30 * torch.tanh(logit / 30))
        <Variant cap@...>
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"register_variant: name={name!r}: must be an identifier")
    if not isinstance(softmax, bool):
        raise ValueError(f"register_variant: softmax={softmax!r} of {name!r}: must be True or False")
    specs = tuple(_spec(name, tensor, *_pair(name, tensor, spec)) for tensor, spec in (tensors or {}).items())
    of_logits = None if logits is None else traced(name, "logits", logits, specs, "float")
    of_visible = None if visible is None else traced(name, "visible", visible, specs, "bool")
    made = Variant(name, of_logits, of_visible, specs, softmax)
    with _lock:
        known = _variants.setdefault(name, made)
    if known.hash != made.hash:
        raise ValueError(
            f"register_variant: {name!r} is registered with another meaning ({known.hash}, and now {made.hash}); give "
            "this one another name"
        )
    return known


def _pair(name: str, tensor: str, spec: Any) -> tuple[Any, Any]:
    if not isinstance(spec, tuple) or len(spec) != 2:
        raise ValueError(
            f"register_variant: tensors[{tensor!r}]={spec!r} of {name!r}: must be its index and its dtype, as in "
            '("head", torch.float32)'
        )
    return spec


def _spec(name: str, tensor: str, index: Any, dtype: Any) -> VariantTensor:
    said = f"register_variant: tensors[{tensor!r}] of {name!r}"
    if not isinstance(tensor, str) or not tensor.isidentifier() or tensor in INPUTS:
        raise ValueError(f"{said}: its name must be an identifier other than {', '.join(INPUTS)}")
    kinds = (index,) if isinstance(index, str) else tuple(index) if isinstance(index, Sequence) else ()
    if not kinds or any(kind not in _INDICES for kind in kinds):
        raise ValueError(f"{said}: index={index!r}: must be one of {', '.join(map(repr, _INDICES))} or more")
    if any(kind in ("row", "query") for kind in kinds[1:]):
        raise ValueError(f"{said}: index={index!r}: rows or queries must be the first axis, and no other")
    if dtype not in READ_AS:
        raise ValueError(f"{said}: dtype={dtype!r}: must be one of {', '.join(map(str, READ_AS))}")
    return VariantTensor(tensor, cast("tuple[Index, ...]", kinds), dtype)


def variant_named(op: str, name: str) -> Variant:
    """Return a variant by its name or key; ValueError, begun by ``op``, if there is none or it means something else."""
    wanted, _, meaning = name.partition("@")
    variant = _variants.get(wanted)
    if variant is None:
        known = ", ".join(map(repr, sorted(_variants))) or "none"
        raise ValueError(f"{op}: variant {wanted!r} is not registered (registered: {known}); call register_variant")
    if meaning and meaning != variant.hash:
        raise ValueError(
            f"{op}: variant {wanted!r} means something else ({variant.hash}) than when this code was compiled "
            f"({meaning}); compile it again, or register what it was"
        )
    return variant
