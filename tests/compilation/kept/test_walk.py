"""What a walk looks into, and what it refuses."""

from __future__ import annotations

import enum
import functools
import re
import threading
from collections import OrderedDict, defaultdict, deque
from types import FunctionType
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from compiled_llm.compilation.kept.fingerprint.code import code_digest, words_in
from compiled_llm.compilation.kept.fingerprint.visit import UnhashableError
from compiled_llm.compilation.kept.fingerprint.walk import Walk
from compiled_llm.model.version.code import Code

FACTOR = 2


class Thing:
    """Of no library."""

    value = 1


class Layer(nn.Module):
    def __init__(self, **attributes: object) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        vars(self).update(attributes)

    def forward(self, x: torch.Tensor, *, by: int = 3) -> torch.Tensor:
        return x * self.scale * FACTOR * by


def read_thing(layer: Any) -> Any:
    return layer.thing.value


def entries(model: nn.Module, *traced: FunctionType, **roots: object) -> dict[str, str]:
    words = {word for function in traced for word in words_in(function.__code__)}
    walk = Walk(model, {code_digest(function.__code__) for function in traced}, words)
    walk.over({"model": model, **roots})
    return walk.entries


def test_functions_that_were_traced_are_looked_into_others_are_not(monkeypatch):
    traced, untraced = entries(Layer(), Layer.forward), entries(Layer())
    assert f"{__name__}.FACTOR" in traced
    assert f"{__name__}.FACTOR" not in untraced
    monkeypatch.setitem(globals(), "FACTOR", 3)
    assert entries(Layer()) == untraced
    assert entries(Layer(), Layer.forward) != traced


def test_keyword_defaults_count(monkeypatch):
    before = entries(Layer(), Layer.forward)
    monkeypatch.setitem(Layer.forward.__kwdefaults__, "by", 4)
    assert entries(Layer(), Layer.forward) != before


def test_equal_numbers_of_other_types_are_others():
    assert len({tuple(entries(Layer(n=n)).items()) for n in (1, 1.0, True, 0.0, -0.0, "1")}) == 6


def test_sets_have_no_order_and_dictionaries_do():
    sets = [{"a", "b", "c"}, {"c", "b", "a"}]
    assert entries(Layer(), letters=sets[0]) == entries(Layer(), letters=sets[1])
    assert entries(Layer(), letters={"a": 1, "b": 2}) != entries(Layer(), letters={"b": 2, "a": 1})


def test_containers_of_other_classes_are_others():
    assert (
        len({tuple(entries(Layer(), held=held).items()) for held in ([1], (1,), {1}, frozenset({1}), deque([1]))}) == 5
    )
    made = [defaultdict(int), defaultdict(float), {}, OrderedDict()]
    assert len({tuple(entries(Layer(), held=held).items()) for held in made}) == 4


def test_attributes_of_a_container_count():
    class Table(dict[str, int]):
        factor = 1

    one, other = Table(a=1), Table(a=1)
    other.factor = 2
    assert entries(Layer(), table=one) != entries(Layer(), table=other)


def test_an_entry_of_an_enumeration_counts_by_its_value(monkeypatch):
    class Level(enum.Enum):
        ONE = 1

    before = entries(Layer(level=Level.ONE))
    monkeypatch.setattr(Level.ONE, "_value_", 2)
    assert entries(Layer(level=Level.ONE)) != before


def test_a_method_of_an_object_counts_with_the_object():
    one, other = {"a": 1}, {"a": 2}
    assert entries(Layer(), look_up=one.get) != entries(Layer(), look_up=other.get)
    assert entries(Layer(), look_up=one.get) == entries(Layer(), look_up={"a": 1}.get)


def test_a_pattern_counts_by_what_it_matches():
    assert len({tuple(entries(Layer(), find=re.compile(*each)).items()) for each in (("a",), ("b",), ("a", re.I))}) == 3


def test_functions_of_one_decorator_are_told_apart_although_nobody_looks_into_them():
    def around(function: Any) -> Any:
        return lambda x: function(x)

    one, other = around(lambda x: x), around(lambda x: -x)
    assert one.__code__ is other.__code__
    assert entries(Layer(), function=one) != entries(Layer(), function=other)
    assert entries(Layer(), function=around(2)) != entries(Layer(), function=around(3))


def test_an_object_that_wraps_a_function_is_more_than_that():
    class Scaled:
        def __init__(self, by: int) -> None:
            functools.update_wrapper(self, read_thing)
            self.by = by

    with pytest.raises(UnhashableError, match="Scaled"):
        entries(Layer(), function=Scaled(2))
    cached = functools.lru_cache(read_thing)
    assert entries(Layer(), read_thing, function=cached)


def test_attributes_of_a_parameter_count():
    one, other = Layer(), Layer()
    other.scale.group_size = 4  # type: ignore[attr-defined]
    assert entries(one) != entries(other)


def test_what_dynamo_was_told_of_a_function_counts(monkeypatch):
    before = entries(Layer(), Layer.forward)
    allowed = torch._dynamo.trace_rules._allowed_callable_ids
    monkeypatch.setattr(allowed, "function_ids", {id(Layer.forward)})
    assert entries(Layer(), Layer.forward) != before


class Helper:
    """Stands for one of transformers."""

    table: ClassVar[dict[str, int]] = {"a": 1}

    def __init__(self) -> None:
        self.value = 1

    def read(self) -> int:
        return self.value + self.table["a"]


Helper.__module__ = "transformers.helper"
HELPER = Helper()


def read_helper() -> int:
    return HELPER.read()


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(HELPER, "value", 2),
        lambda patch: patch.setattr(HELPER, "read", lambda: 2, raising=False),
        lambda patch: patch.setattr(Helper, "read", lambda self: 2),
        lambda patch: patch.setattr(Helper, "__getattribute__", lambda self, name: 2, raising=False),
        lambda patch: patch.setitem(Helper.table, "a", 2),
        lambda patch: patch.setattr(HELPER, "__class__", type("Other", (Helper,), {})),
        lambda patch: patch.setattr(torch.Tensor, "__add__", lambda x, y: x),
        lambda patch: patch.setitem(globals(), "sum", max),
        lambda patch: patch.setattr(read_helper, "__code__", (lambda: 3).__code__),
    ],
)
def test_what_traced_code_reads_is_watched(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    def another() -> int:
        return sum([read_helper()])

    codes = {code_digest(function.__code__) for function in (another, read_helper, Helper.read)}
    walk, code = Walk(Layer(), codes, {"HELPER", "table", "read"}), Code()
    walk.over({"program": another})
    code.watch(walk.places)
    assert code.valid()
    change(monkeypatch)
    assert not code.valid()
    monkeypatch.undo()
    assert code.valid()


def test_what_holds_itself_ends():
    layer = Layer()
    holding: list[object] = [layer]
    holding.append(holding)
    assert entries(layer, holding=holding)


def test_one_object_in_two_places_is_not_two_equal_ones():
    one, other = [1], [1]
    assert entries(Layer(), pair=(one, one)) != entries(Layer(), pair=(one, other))


def test_an_object_of_another_kind_is_refused_by_name_if_traced_code_names_it():
    layer = Layer(thing=Thing())
    assert entries(layer, Layer.forward)
    with pytest.raises(UnhashableError, match=r"model\.thing is an object of .*Thing"):
        entries(layer, Layer.forward, read_thing, read=read_thing)


def test_a_function_whose_result_is_taken_as_constant_is_refused_by_name():
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def chosen() -> int:
        return FACTOR

    with pytest.raises(UnhashableError, match=r"the result of .*chosen was taken as it was"):
        entries(Layer(), function=chosen)


def test_the_way_to_a_module_that_traced_code_imports_counts(monkeypatch):
    """Dynamo reads it from its package, attribute by attribute, and guards each."""

    def importing(x: torch.Tensor) -> bool:
        import torch.fx

        return isinstance(x, (torch.fx.Proxy, getattr(torch, "_subclasses").FakeTensor))  # noqa: B009

    before = entries(Layer(), importing, function=importing)
    assert {"torch.fx", "torch.fx.Proxy", "torch._subclasses"} <= before.keys()
    monkeypatch.setattr(torch, "fx", torch.nn)
    assert entries(Layer(), importing, function=importing) != before


def test_what_a_metaclass_does_counts(monkeypatch):
    class Meta(type):
        def __call__(cls, *args: Any) -> Any:
            return super().__call__(*args)

    class Made(metaclass=Meta):
        pass

    before = entries(Layer(), kind=Made)
    monkeypatch.setattr(Meta, "__call__", lambda cls: None)
    assert entries(Layer(), kind=Made) != before


def test_a_long_container_is_refused_by_name():
    with pytest.raises(UnhashableError, match=r"words has 10001 entries"):
        entries(Layer(), words=list(range(10_001)))


def test_an_attribute_that_nobody_reads_counts_by_its_name_alone():
    with_lock = entries(Layer(lock=threading.Lock(), tokenizer=Thing()))
    assert entries(Layer(lock=threading.Lock(), tokenizer=Thing())) == with_lock
    assert entries(Layer(lock=threading.Lock())) != with_lock


def test_generated_code_has_globals_of_its_own():
    def generated(value: int) -> FunctionType:
        scope: dict[str, Any] = {"value": value}
        exec("def function(x):\n    return x * value", scope)
        function: FunctionType = scope["function"]
        return function

    two, three = generated(2), generated(3)
    assert entries(Layer(), two, function=two) != entries(Layer(), three, function=three)
    assert entries(Layer(), two, function=two) == entries(Layer(), two, function=generated(2))
