"""The ``compiled_llm`` namespace: where ops are defined, and the object that keeps them alive."""

# An op is a function whose body says what its results look like. Its arguments are written once, as the fields of a
# NamedTuple, which its kernels take whole.

from __future__ import annotations

import functools
import inspect
import re
import string
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = TypeVar("Arguments", bound=tuple[Any, ...])
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

# Ops vanish with their Library object, so it lives as long as the module.
LIBRARY = torch.library.Library("compiled_llm", "DEF")


class Definition(NamedTuple):
    """What an op was defined with; ``fake`` is the function as it was written."""

    arguments: type[Any]
    writes: Sequence[str]
    fake: Callable[[Any], Any]
    library: torch.library.Library


definitions: dict[Callable[..., Any], Definition] = {}


def define_op(
    arguments: Callable[_Parameters, Arguments],
    *,
    writes: Sequence[str] = (),
    library: torch.library.Library = LIBRARY,
) -> Callable[[Callable[[Arguments], _Result]], Callable[_Parameters, _Result]]:
    """Make a function an op of its name, to be called with the fields of ``arguments``, a NamedTuple, one by one.

    Its body runs while the op is traced: it returns tensors of the results' shapes, dtypes and strides, for the
    ``arguments`` that it is given. ``kernel_of`` adds what computes them.

    No op has gradients: a call raises where they are recorded and an input requires them.

    ``Library.define`` rather than ``torch.library.custom_op``: a call costs 2 to 3 µs instead of 9 to 33, and a file
    imported under two names fails here instead of registering twice. The ``opcheck`` tests cover what that skips (alias
    checks on each call).

    Args:
        arguments: its fields, their order, types and defaults are those of the op.
        writes: the fields that the op writes to, in their order.
        library: of the namespace.

    Raises:
        ValueError: a name in ``writes`` is no field or no tensor, or an op has no arguments of a field's type.
    """

    def define(fake: Callable[[Arguments], _Result]) -> Callable[_Parameters, _Result]:
        name = fake.__name__

        @functools.wraps(fake)
        def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            result: _Result = overload(*args, **kwargs)
            return result

        signed: Any = call
        signed.__signature__ = _signature(arguments, inspect.signature(fake, eval_str=True).return_annotation)
        library.define(_schema(signed, writes), tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"{library.ns}::{name}", _taking(name, arguments, fake), lib=library)
        overload = getattr(getattr(torch.ops, library.ns), name).default
        definitions[call] = Definition(typing.cast("type[Arguments]", arguments), writes, fake, library)
        return call

    return define


def kernel_of(
    op: Callable[..., _Result], device: str
) -> Callable[[Callable[[Arguments], _Result]], Callable[[Arguments], _Result]]:
    """Make a function, which takes the op's arguments as their NamedTuple, the kernel for ``"CPU"`` or ``"CUDA"``.

    That for CUDA imports the modules of Triton's kernels inside.
    """

    def register(function: Callable[[Arguments], _Result]) -> Callable[[Arguments], _Result]:
        arguments, _, fake, library = definitions[op]
        library.impl(fake.__name__, _taking(fake.__name__, arguments, function), device)
        return function

    return register


def _signature(arguments: Callable[..., Any], result: Any) -> inspect.Signature:
    types = typing.get_type_hints(arguments)
    fields = inspect.signature(arguments).parameters.values()
    return inspect.Signature(
        [field.replace(annotation=types[field.name]) for field in fields], return_annotation=result
    )


def _schema(function: Callable[..., Any], writes: Sequence[str]) -> str:
    """Return an op's schema, as in ``scale(Tensor(a!) states, float factor=1.0) -> ()``."""
    text = torch.library.infer_schema(function, mutates_args=writes, op_name=function.__name__)
    letters = iter(string.ascii_lowercase)
    text = re.sub(r"\(a\d+!\)", lambda _: f"({next(letters)}!)", text)
    return text.replace("SymInt ", "int ")  # sizes and windows are a model's, and not to become symbols in its graphs


def _taking(
    name: str, arguments: Callable[..., Arguments], function: Callable[[Arguments], _Result]
) -> Callable[..., _Result]:
    """Return a function for the dispatcher, which passes values one by one, and leaves out those at their defaults."""
    recorded = torch.is_grad_enabled

    def call(*args: Any) -> _Result:
        given = arguments(*args)
        # A kernel for Autograd, which is the place for this, costs as much again, with and without gradients.
        if recorded():
            _check_without_gradients(name, given)
        return function(given)

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
