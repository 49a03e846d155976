"""The names under which models of transformers take a cache and hand it back: the only place that knows them."""

# Up to 5.23 it is ``past_key_values``, or ``cache_params`` in Mamba's models. From 5.24 it is ``cache`` in all models,
# in ``generate`` and in outputs; a decorator, ``deprecate_kwarg``, takes the names of old with a notice. A model that
# was written before keeps its own name, and ``generate`` hands it the new one.
# Nothing here asks for a version: signatures and fields tell the name, and the decorators of a function the names of
# old that it takes. ``taking_old_names`` puts these decorators, HuggingFace's own, around our functions, so that a user
# gets HuggingFace's notices; without it, a name of old takes HuggingFace's own forward. It ends when 5.24 is the oldest
# version that is supported and 6 the newest, which takes no names of old. Tested in
# ``tests/compat/test_cache_names.py``.

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CellType, FunctionType
from typing import Any, TypeVar, cast

from transformers import Cache, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import deprecation
from transformers.utils.generic import ModelOutput

NAMES = ("cache", "past_key_values", "cache_params")  # all that it has had, the newest one first

STATE_CACHE_NAMES = ("cache", "cache_params")  # those that models without attention have had

Function = TypeVar("Function", bound=Callable[..., Any])


def _named_in(names: Collection[str], otherwise: str) -> str:
    return next((name for name in NAMES if name in names), otherwise)


_OF_GENERATE = _named_in(inspect.signature(vars(GenerationMixin)["prepare_inputs_for_generation"]).parameters, NAMES[0])
"""The name that ``generate`` of this version uses, for all models but Mamba's before 5.24."""
_OF_OUTPUTS = _named_in([field.name for field in dataclasses.fields(CausalLMOutputWithPast)], _OF_GENERATE)


def cache_argument(forward: Callable[..., Any]) -> str:
    """Return the name under which a model's ``forward`` takes a cache."""
    return _named_in(inspect.signature(forward).parameters, _OF_GENERATE)


def generate_argument(forward: Callable[..., Any]) -> str:
    """Return the name under which ``generate`` keeps the cache of a model with such a ``forward`` among its inputs."""
    return _OF_GENERATE if NAMES[0] == _OF_GENERATE else cache_argument(forward)


def output_field(output: type[ModelOutput]) -> str:
    """Return the name under which outputs of a class have the cache."""
    return _named_in(getattr(output, "__dataclass_fields__", ()), _OF_OUTPUTS)


def cache_in(output: ModelOutput) -> Cache | None:
    """Return the cache that an output has; None if it has none."""
    return cast("Cache | None", output.get(output_field(type(output))))


def gives_cache(arguments: Mapping[str, Any]) -> bool:
    """Return whether a cache is among the arguments of a call, under any of its names."""
    return any(arguments.get(name) is not None for name in NAMES)


def taking_old_names(function: Function, original: Callable[..., Any]) -> Function:
    """Return ``function`` taking the names of old that ``original`` takes, with HuggingFace's notices."""
    taking: Callable[..., object] = function
    for decorator in reversed([*_decorators(original)]):
        taking = _around(taking, decorator)
    return cast(Function, taking)


def _decorators(function: Any) -> Iterator[FunctionType]:
    """Yield those around a function that take a name of old, the outermost one first."""
    while function is not None:
        if getattr(function, "__globals__", None) is vars(deprecation) and "func" in function.__code__.co_freevars:
            yield function
        function = getattr(function, "__wrapped__", None)


def _around(function: Callable[..., object], decorator: FunctionType) -> Callable[..., object]:
    """Return ``function`` with a decorator that stands around another one."""
    cells: list[CellType] = [*(decorator.__closure__ or ())]
    cells[decorator.__code__.co_freevars.index("func")] = CellType(function)
    made = FunctionType(decorator.__code__, decorator.__globals__, closure=tuple(cells))
    return functools.wraps(function)(made)
