"""The tensors of modules as ``ModelVersion`` compares them: fast, and by what a slow comparison would find."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compiled_llm.model.version import tensors
from compiled_llm.model.version.tensors import Tensors, tensors_of
from support.packed_layers import PACK

CHANGES = 60


@dataclass
class State:
    scale: Tensor
    name: str = "scale"


def layers() -> list[Any]:
    """Layers of all libraries, and one with tensors in attributes of each kind."""
    torch.manual_seed(0)
    loose: Any = nn.Linear(4, 4)
    loose.own, loose.state, loose.several = torch.ones(2), State(torch.ones(2)), [torch.ones(2), "no tensor"]
    loose.named = {"first": torch.ones(2)}
    return [loose, *(pack(nn.Linear(64, 64)) for _, pack in PACK.values())]


def found_in(modules: list[Any]) -> list[Tensor]:
    """All tensors of modules, the slow way."""
    loose = modules[0]
    beside = [loose.own, loose.state.scale, *loose.several, *loose.named.values()]
    return [*(own for module in modules for own in tensors_of(module)), *filter(torch.is_tensor, beside)]


def holders(modules: list[Any]) -> list[dict[str, Any]]:
    """The attributes of weights, of what these have beside their numbers, and of a dataclass."""
    inside = [vars(weight) for module in modules for weight in module._parameters.values() if weight is not None]
    states = [vars(state) for held in inside if (state := held.get("quant_state")) is not None]
    nested = [vars(state) for held in states if (state := held.get("state2")) is not None]
    return [held for held in (*inside, *states, *nested, vars(modules[0].state)) if held]


def another_tensor(modules: list[Any], drawn: random.Random) -> None:
    held_anywhere = [*holders(modules), modules[0].named, vars(modules[0])]
    places = [(held, name) for held in held_anywhere for name, value in held.items() if type(value) is Tensor]
    held, name = drawn.choice(places)
    held[name] = held[name].clone()


def beside_tensors(modules: list[Any], drawn: random.Random) -> None:
    drawn.choice(holders(modules))["written_beside"] = object()


def exchanged(modules: list[Any], drawn: random.Random) -> None:
    """As modules of weights that wrap others do in ``to``."""
    weights = [own for module in modules for own in module.parameters() if tensors.wrapped_in(own) is not None]
    one = drawn.choice(weights)
    held = vars(one)
    other = type(one)(held["values"].clone(), **{name: value for name, value in held.items() if name != "values"})
    one.__dict__, other.__dict__ = other.__dict__, held


def nothing(modules: list[Any], drawn: random.Random) -> None:
    """Leave all as it is."""


Change = Callable[[list[Any], random.Random], None]

DRAWN: tuple[Change, ...] = (another_tensor, beside_tensors, exchanged, nothing)


def test_they_are_valid_as_long_as_a_slow_search_finds_the_same(seed: int) -> None:
    modules, drawn = layers(), random.Random(seed)
    known, before = Tensors(modules), found_in(modules)
    for change in drawn.choices(DRAWN, k=CHANGES):
        change(modules, drawn)
        now = found_in(modules)
        same = [*map(id, now)] == [*map(id, before)]
        assert known.valid() == same, change.__name__
        if not same:
            known, before = Tensors(modules), now


def test_weights_that_have_not_changed_are_not_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = layers()
    known, opened = Tensors(modules), list[object]()
    own = tensors.tensors_inside
    monkeypatch.setattr(tensors, "tensors_inside", lambda tensor: opened.append(tensor) or own(tensor))
    assert known.valid()
    assert not opened
    beside_tensors(modules, random.Random(0))
    assert known.valid()
    assert opened, "what is beside tensors may be new ones"
    opened.clear()
    assert known.valid()
    assert not opened
