"""A model of one layer whose activation reads factors from many places, all of them 1; and changes of each."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from contextlib import ExitStack
from types import CellType
from typing import Any, ClassVar
from unittest import mock

from torch import Tensor, nn

from support.tiny_models import ONE_LAYER, tiny_qwen3

IN_GLOBAL = 1.0
IN_TABLE = {"a factor": 1.0}
IN_LIST = [[1.0]]
OTHER = 3.0  # what a change makes of a factor


class InEnum(enum.Enum):
    ONE = 1.0


def by_default(x: Tensor, factors: list[float] = [1.0]) -> Tensor:  # noqa: B006 (changed in place)
    return x * factors[0]


def by_keyword(x: Tensor, *, by: float = 1.0) -> Tensor:
    return x * by


def closing(factor: float) -> Callable[[Tensor], Tensor]:
    def scaled(x: Tensor) -> Tensor:
        return x * factor

    return scaled


def counted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """All that it decorates has the same code."""

    @functools.wraps(function)
    def call(*args: Any) -> Tensor:
        return function(*args)

    return call


@counted
def decorated(x: Tensor) -> Tensor:
    return x


@counted
def decorated_otherwise(x: Tensor) -> Tensor:
    return x * OTHER


by_closure = closing(1.0)
by_partial = functools.partial(by_keyword, by=1.0)
FUNCTIONS = {"one": by_keyword}


class Reading(nn.Module):
    in_class = 1.0
    in_class_table: ClassVar[dict[str, Any]] = {"a factor": 1.0}

    def __init__(self) -> None:
        super().__init__()
        self.in_module = 1.0
        self.in_modules_list = [1.0]
        self.in_partial = functools.partial(by_keyword, by=1.0)

    @property
    def in_property(self) -> float:
        return 1.0

    @staticmethod
    def in_static(x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(x) * IN_GLOBAL * IN_TABLE["a factor"] * IN_LIST[0][0] * InEnum.ONE.value
        x = by_default(by_keyword(by_closure(by_partial(decorated(x)))))
        x = x * self.in_class * self.in_class_table["a factor"] * self.in_module * self.in_modules_list[0]
        return self.in_static(self.in_partial(FUNCTIONS["one"](x))) * self.in_property


def reading_model() -> Any:
    model = tiny_qwen3(**ONE_LAYER)
    model.model.layers[0].mlp.act_fn = Reading()
    return model.eval()


Make = Callable[..., object]
"""Makes a change after a stack, of what undoes it, in some models that are alike."""


def _set(owner: Any, name: str, value: object = OTHER) -> Make:
    return lambda stack, *models: stack.enter_context(mock.patch.object(owner, name, value))


def _entry(table: dict[str, Any], name: str, value: object = OTHER) -> Make:
    return lambda stack, *models: stack.enter_context(mock.patch.dict(table, {name: value}))


def _item(listed: Callable[[], list[Any]], value: object = OTHER) -> Make:
    def make(stack: ExitStack, *models: Any) -> None:
        stack.callback(listed().__setitem__, 0, listed()[0])
        listed()[0] = value

    return make


def _here(name: str, value: object = OTHER) -> Make:
    """Change a global of this file, of which its functions are traced."""
    return _entry(globals(), name, value)


def _each(change: Callable[[ExitStack, Any], object]) -> Make:
    return lambda stack, *models: [change(stack, model) for model in models]


def _reading(change: Callable[[ExitStack, Any], object]) -> Make:
    return _each(lambda stack, model: change(stack, model.model.layers[0].mlp.act_fn))


def _patched(name: str, value: object = OTHER) -> Make:
    return _reading(lambda stack, module: stack.enter_context(mock.patch.object(module, name, value, create=True)))


def _cell(stack: ExitStack, *models: Any) -> None:
    (cell,) = _cells(by_closure)
    stack.callback(setattr, cell, "cell_contents", cell.cell_contents)
    cell.cell_contents = OTHER


def _cells(function: Any) -> tuple[CellType, ...]:
    cells: tuple[CellType, ...] = function.__closure__
    return cells


def _tripled(self: object, x: Tensor) -> Tensor:
    return x * OTHER


READ: dict[str, Make] = {
    "a global": _here("IN_GLOBAL"),
    "a table": _entry(IN_TABLE, "a factor"),
    "a list in a list": _item(lambda: IN_LIST[0]),
    "an enumeration": _set(InEnum.ONE, "_value_"),
    "a default in place": _item(lambda: by_default.__defaults__[0]),  # type: ignore[index]
    "a keyword's default": lambda stack, *models: stack.enter_context(
        mock.patch.dict(by_keyword.__kwdefaults__, {"by": OTHER})  # type: ignore[attr-defined]
    ),
    "a closure": _cell,
    "a partial function": lambda stack, *models: stack.enter_context(
        mock.patch.dict(by_partial.keywords, {"by": OTHER})
    ),
    "a function with a decorator": _here("decorated", decorated_otherwise),
    "a function in a table": _entry(FUNCTIONS, "one", lambda x: x * OTHER),
    "a class": _set(Reading, "in_class"),
    "a class's table": _entry(Reading.in_class_table, "a factor"),
    "a property": _set(Reading, "in_property", property(lambda self: OTHER)),
    "a static method": _set(Reading, "in_static", staticmethod(lambda x: x * OTHER)),
    "a method of a class": _set(Reading, "forward", _tripled),
    "a module": _patched("in_module"),
    "a module's list": _reading(lambda stack, module: _item(lambda: module.in_modules_list)(stack)),
    "a module's partial function": _reading(
        lambda stack, module: stack.enter_context(mock.patch.dict(module.in_partial.keywords, {"by": OTHER}))
    ),
    "a module's attribute that hides its class's": _patched("in_class"),
    "forward of one object": _patched("forward", lambda x: x * OTHER),
    "a function of torch": _set(nn.functional, "silu", lambda x, inplace=False: -x),
    "a method of tensors": _set(Tensor, "pow", lambda x, exponent: x.abs() * OTHER),
}
"""Changes of what the activation reads; HuggingFace's tokens are others after each."""
