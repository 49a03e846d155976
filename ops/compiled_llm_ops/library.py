"""The ``compiled_llm`` namespace: where ops are defined, and the object that keeps them alive.

An op has its signature once, in a NamedTuple: its fields, their order and defaults are the schema, and its kernels take
it whole.
"""

from __future__ import annotations

import inspect
import json
import string
import typing
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = TypeVar("Arguments", bound=tuple[Any, ...])
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    bool: "bool",
    float: "float",
    int: "int",
    str: "str",
    torch.dtype: "ScalarType",
}

# Ops vanish with their Library object, so it lives as long as the module.
LIBRARY = torch.library.Library("compiled_llm", "DEF")


def define(
    name: str,
    arguments: type[Arguments],
    *,
    writes: Sequence[str] = (),
    returns: str = "Tensor",
    fake: Callable[[Arguments], Any],
    cpu: Callable[[Arguments], Any],
    cuda: Callable[[Arguments], Any],
    library: torch.library.Library = LIBRARY,
) -> torch._ops.OpOverload:
    """Define an op of a namespace with its fake, its CPU kernel and its CUDA launcher, which take ``arguments``.

    No op has gradients: a call raises where they are recorded and an input requires them.

    ``Library.define`` rather than ``torch.library.custom_op``: a call costs 2 to 3 µs instead of 9 to 33, and a file
    imported under two names fails here instead of registering twice. The ``opcheck`` tests cover what that skips (alias
    checks on each call).

    Args:
        name: of the op.
        arguments: a NamedTuple, the op's arguments.
        writes: the fields of ``arguments`` that the op writes to.
        returns: the results in a schema: ``Tensor``, ``(Tensor, Tensor)`` or ``()``.
        fake: computes only the results' shapes, dtypes and strides.
        cpu: the kernel in plain PyTorch.
        cuda: launches the CUDA kernels; imports their modules inside.
        library: of the namespace.

    Returns:
        The overload, to be bound once at module level.
    """
    library.define(schema(name, arguments, writes, returns), tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"{library.ns}::{name}", _taking(name, arguments, fake), lib=library)
    library.impl(name, _taking(name, arguments, cpu), "CPU")
    library.impl(name, _taking(name, arguments, cuda), "CUDA")
    overload: torch._ops.OpOverload = getattr(getattr(torch.ops, library.ns), name).default
    return overload


def schema(name: str, arguments: type[Arguments], writes: Sequence[str] = (), returns: str = "Tensor") -> str:
    """Return an op's schema, as in ``scale(Tensor(a!) states, float factor=1.0) -> ()``.

    Raises:
        ValueError: a name in ``writes`` is no field, or no tensor.
    """
    types = {field: _SCHEMA_TYPES[hint] for field, hint in typing.get_type_hints(arguments).items()}
    for alias, field in zip(string.ascii_lowercase, writes, strict=False):
        if not types.get(field, "").startswith("Tensor"):
            raise ValueError(f"{name}: {field} is not a tensor that the op takes")
        types[field] = types[field].replace("Tensor", f"Tensor({alias}!)")
    defaults = arguments._field_defaults  # type: ignore[attr-defined]
    texts = (
        f"{text} {field}" + (f"={_literal(defaults[field])}" if field in defaults else "")
        for field, text in types.items()
    )
    return f"{name}({', '.join(texts)}) -> {returns}"


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else str(value)


def _taking(name: str, arguments: type[Arguments], kernel: Callable[[Arguments], _Result]) -> Callable[..., _Result]:
    """Return a function for the dispatcher, which passes values one by one, and leaves out those at their defaults."""
    recorded = torch.is_grad_enabled

    def call(*args: Any) -> _Result:
        given = arguments(*args)
        # A kernel for Autograd, which is the place for this, costs as much again, with and without gradients.
        if recorded():
            _check_without_gradients(name, given)
        return kernel(given)

    return call


def _check_without_gradients(name: str, given: tuple[Any, ...]) -> None:
    for value in given:
        if isinstance(value, Tensor):
            requires = value.requires_grad
        else:
            requires = isinstance(value, list) and any(tensor.requires_grad for tensor in value)
        if requires:
            fields = given._fields  # type: ignore[attr-defined]
            field = next(field for field, own in zip(fields, given, strict=True) if own is value)
            raise RuntimeError(
                f"{name}: {field}.requires_grad is True, and the op has no gradients; call it under "
                "torch.no_grad() or torch.inference_mode(), or detach() the tensor"
            )


def same_arguments_as(
    other: Callable[_Parameters, Any],
) -> Callable[[Callable[..., _Result]], Callable[_Parameters, _Result]]:
    """Give a function that is written with ``*args, **kwargs`` the signature of ``other``, its own result apart."""

    def sign(function: Callable[..., _Result]) -> Callable[_Parameters, _Result]:
        result = inspect.signature(function).return_annotation
        signed: Any = function
        signed.__signature__ = inspect.signature(other).replace(return_annotation=result)
        return typing.cast("Callable[_Parameters, _Result]", function)

    return sign
