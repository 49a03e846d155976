"""Calls of one module are noted, by the place where ``module.compile()`` puts its function."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn

from compiled_llm.compat.torch.module_calls import note_calls, stop_noting

pytestmark = pytest.mark.core


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = self.inner(x)
        return doubled

    def note(self) -> None:
        self.calls += 1


def noted() -> Outer:
    made = Outer()
    note_calls(made.inner, made.note)
    return made


@pytest.fixture
def outer() -> Outer:
    torch._dynamo.reset()
    return noted()


X = torch.ones(1, 2)


def test_each_call_is_noted_and_is_the_modules(outer):
    torch.testing.assert_close(outer.inner(X), X * 2)
    outer(X)
    seen: list[Tensor] = []
    outer.inner.register_forward_hook(lambda *_: seen.append(X))
    outer.inner(X)
    assert (outer.calls, len(seen)) == (3, 1)
    stop_noting(outer.inner)
    outer.inner(X)
    assert outer.calls == 3
    assert vars(outer.inner).keys() == vars(Inner()).keys()


def test_programs_that_dynamo_traces_do_not_note_and_are_whole(outer):
    torch.compile(outer, backend="eager", fullgraph=True)(X)
    assert outer.calls == 0
    torch.compile(outer.inner, backend="eager", fullgraph=True)(X)
    assert outer.calls == 1


def test_copies_and_pickles_do_not_have_it(outer):
    for made in (copy.copy(outer.inner), copy.deepcopy(outer).inner, pickle.loads(pickle.dumps(outer)).inner):
        made(X)
    assert outer.calls == 0


def test_a_module_that_is_compiled_in_place_stays_so(outer):
    outer.inner.compile(backend="eager")
    compiled = vars(outer.inner)["_compiled_call_impl"]
    note_calls(outer.inner, outer.note)
    stop_noting(outer.inner)
    assert vars(outer.inner)["_compiled_call_impl"] is compiled


def test_it_keeps_nothing_alive():
    outer = noted()
    inner, owner = outer.inner, weakref.ref(outer)
    del outer
    assert owner() is None
    inner(X)
    module = weakref.ref(inner)
    del inner
    assert module() is None
