"""Graphs of a function: counted, explained, forgotten, and what is seen while they are made."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm.compat.torch import dynamo
from support.compile_once import compile_once, double

pytestmark = pytest.mark.core


def breaks(x: Tensor) -> Tensor:
    print("a graph break")
    return x * 2


@pytest.fixture
def function() -> Iterator[Callable[[Tensor], Tensor]]:
    copy = dynamo.own_copy(double)
    yield copy
    dynamo.forget([copy])


def test_graphs_and_why_there_is_more_than_one_are_told(function):
    assert dynamo.graph_count(function) == 0
    program = torch.compile(function, backend="eager", dynamic=False)
    program(torch.zeros(3))
    program(torch.zeros(3))
    assert dynamo.graph_count(function) == 1
    assert dynamo.recompile_reasons(function) == {}
    program(torch.zeros(4))
    first, second = dynamo.compiled_graphs(function)
    assert "size=[3]" in first.guards
    assert "size=[4]" in second.guards
    assert any(name.startswith("__compiled_fn") for name in second.code.co_names)
    (reason,) = dynamo.recompile_reasons(function).items()
    assert reason[0] == second.number
    assert "size mismatch" in reason[1]


def test_compiled_code_runs_without_a_look_at_its_guards(function):
    """It is what Dynamo runs in the function's place; the arguments are those whose guards were checked."""
    assert dynamo.compiled_code(function, {"x": torch.zeros(3)}) is None
    torch.compile(function, backend="eager", dynamic=False)(torch.zeros(3))
    code = dynamo.compiled_code(function, {"x": torch.ones(3)})
    assert code is not None
    assert code(torch.ones(3)).tolist() == [2, 2, 2]
    assert dynamo.compiled_code(function, {"x": torch.ones(4)}) is None
    assert dynamo.graph_count(function) == 1


def test_copies_share_no_graphs(function):
    other = dynamo.own_copy(double)
    torch.compile(function, backend="eager")(torch.zeros(3))
    assert (dynamo.graph_count(function), dynamo.graph_count(other), dynamo.graph_count(double)) == (1, 0, 0)


def test_graphs_go_with_their_owner(function):
    owner = torch.nn.Module()
    dynamo.forget_when_gone(owner, [function])
    torch.compile(function, backend="eager")(torch.zeros(3))
    assert dynamo.graph_count(function) == 1
    del owner
    gc.collect()
    assert dynamo.graph_count(function) == 0


def test_nothing_that_a_backend_refers_to_outlives_its_owner(function):
    """Today Dynamo alone would keep it; once a plain ``torch.compile`` lets go, too, ``compile_whole`` can go."""

    class Backend:
        def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
            return module

    kept = [Backend(), Backend()]
    assert torch.equal(dynamo.compile_whole(function, kept[0])(torch.ones(3)), torch.full((3,), 2.0))
    torch.compile(double, backend=kept[1])(torch.ones(3))
    gone = [weakref.ref(backend) for backend in kept]
    kept.clear()
    dynamo.forget([function, double])
    gc.collect()
    assert [reference() is None for reference in gone] == [True, False]


@pytest.mark.parametrize("attribute", ["training", "scale", "nothing"])
def test_attributes_that_a_backend_leaves_unguarded_may_change_and_begin_to_exist(attribute):
    class Scaled(torch.nn.Module):
        scale = 2

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale if self.training and not hasattr(self, "nothing") else x

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        dynamo.leave_unguarded({attribute})
        return graph

    compiled: list[torch.fx.GraphModule] = []
    module = Scaled()
    program = dynamo.compile_whole(dynamo.own_copy(lambda x: module(x)), backend)
    for changed, compiles in ((attribute, 1), ("scale" if attribute == "training" else "training", 2)):
        program(torch.ones(3))
        setattr(module, changed, 0)
        program(torch.ones(3))
        assert len(compiled) == compiles


def test_a_module_that_gets_its_first_hook_is_not_compiled_again():
    class Calling(torch.nn.Module):
        def __call__(self, x: Tensor) -> Tensor:
            result: Tensor = super().__call__(x)
            return result

        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        dynamo.leave_unguarded(())
        return graph

    module = Calling()
    function = dynamo.own_copy(lambda x: module(x))
    for _ in range(2):
        assert torch.equal(dynamo.compile_whole(function, backend)(torch.ones(3)), torch.full((3,), 2.0))
        module.register_forward_hook(lambda *_: None)
    assert dynamo.graph_count(function) == 1


def test_what_cannot_be_traced_and_what_cannot_be_compiled_raise_errors_of_their_own():
    def branch(x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    def fail(graph: Any, inputs: Any) -> Any:
        raise OSError("no space left")

    with pytest.raises(dynamo.DynamoError, match="from user code:") as caught:
        torch.compile(branch, fullgraph=True, backend="eager")(torch.ones(2))
    assert not isinstance(caught.value, dynamo.BackendError)
    with pytest.raises(dynamo.BackendError, match="no space left") as caught:
        torch.compile(lambda x: x + 1, fullgraph=True, backend=fail)(torch.ones(2))
    assert isinstance(caught.value, dynamo.DynamoError)


def test_what_one_backend_compiled_is_forgotten_and_no_more(function):
    def ours(module: torch.fx.GraphModule, _: Any) -> Any:
        return module

    other = dynamo.own_copy(double)
    torch.compile(function, backend=ours)(torch.zeros(3))
    torch.compile(other, backend="eager")(torch.zeros(3))
    assert [found.__code__ for found in dynamo.compiled_with(ours)] == [function.__code__]
    dynamo.forget_entries_of(ours)
    assert dynamo.compiled_with(ours) == []
    assert (dynamo.graph_count(function), dynamo.graph_count(other)) == (0, 1)
    dynamo.forget([other])


def test_graph_breaks_are_collected_each_time_and_only_inside():
    for _ in range(2):
        with dynamo.graph_breaks_logged() as messages:
            compile_once(dynamo.own_copy(breaks), "eager")
        (message,) = messages
        assert "print" in message
        assert "test_dynamo.py" in message
    compile_once(dynamo.own_copy(breaks), "eager")
    assert len(messages) == 1


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile", "eager_then_compile"])
def test_a_stance_that_runs_functions_uncompiled_is_told(stance, function):
    calls: list[Any] = []
    program = torch.compile(function, backend=lambda module, inputs: calls.append(module) or module.forward)
    assert dynamo.off_by_stance() is None
    with torch.compiler.set_stance(stance):
        program(torch.zeros(3))
        assert not calls
        assert dynamo.off_by_stance() == f"torch.compiler.set_stance({stance!r})"
    for same in ("default", "fail_on_recompile"):
        with torch.compiler.set_stance(same):
            assert dynamo.off_by_stance() is None
    with torch.compiler.set_stance("default", force_backend="eager"):
        assert dynamo.off_by_stance() == "torch.compiler.set_stance(force_backend='eager')"


def test_dynamo_watches_what_a_frame_calls_that_it_has_given_up_on():
    seen = []

    @torch.compile(backend="eager")
    def gives_up(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        seen.append(dynamo.dynamo_watches())
        return x

    assert not dynamo.dynamo_watches()
    gives_up(torch.zeros(3))
    assert seen == [True]
    assert not dynamo.dynamo_watches()


def test_a_module_says_whether_it_was_compiled_in_place():
    module = torch.nn.Linear(2, 2)
    assert not dynamo.is_compiled_in_place(module)
    module.compile(backend="eager")
    assert dynamo.is_compiled_in_place(module)


def test_hooks_that_rewrite_bytecode_see_nothing_of_the_block():
    seen = []
    handle = torch._dynamo.convert_frame.register_bytecode_hook(lambda old, new: seen.append(old.co_name))
    try:
        with dynamo.no_bytecode_hooks():
            compile_once(dynamo.own_copy(double), "eager")
        assert seen == []
        compile_once(dynamo.own_copy(double), "eager")
        assert seen == ["double"]
    finally:
        handle.remove()


def test_sizes_that_are_marked_dynamic_are_not_taken_for_one_another():
    """Equal ones at the first call, such as pages and rows, would be one symbol by the rule of duck shapes."""

    def sums(first: Tensor, second: Tensor, third: Tensor) -> list[Tensor]:
        return [double(tensor).sum() for tensor in (first, second, third)]

    copy = dynamo.own_copy(sums)
    program = torch.compile(copy, backend="eager", dynamic=False, fullgraph=True)
    for sizes in ((4, 4, 4), (4, 5, 4), (5, 4, 4), (7, 8, 9)):
        tensors = [torch.zeros(size) for size in sizes]
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, 0)
        program(*tensors)
    assert dynamo.graph_count(copy) == 1
    dynamo.forget([copy])


def test_a_backend_learns_what_was_inlined():
    seen: list[frozenset[CodeType]] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(dynamo.traced_code())
        return module.forward

    torch.compile(lambda x: double(x) + 1, backend=backend)(torch.zeros(3))
    assert double.__code__ in seen[0]
    assert breaks.__code__ not in seen[0]
    assert dynamo.traced_code() == frozenset()
