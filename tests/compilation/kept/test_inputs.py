"""Whatever differs in a call from what a program was kept for, it does not fit; calls alike are compared whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from compiled_llm.compilation.kept import inputs
from compiled_llm.compilation.kept.alike import Alike, equal_ones
from compiled_llm.compilation.kept.inputs import Inputs, MisfitError, ModelTensors
from compiled_llm.compilation.kept.kept_program import KeptProgram
from compiled_llm.compilation.kept.layout import Shapes, Sizes, form_of_model
from compiled_llm.model.version.model_version import ModelVersion

Arguments = dict[str, Any]


class Asked(NamedTuple):
    ids: Tensor
    beside: tuple[Any, ...]
    flag: bool = False


class OtherAsked(NamedTuple):
    ids: Tensor
    beside: tuple[Any, ...]
    flag: bool = False


def arguments() -> Arguments:
    """Of a call with pages of two layers, whose values are of no meaning."""
    ids = torch.zeros(3, dtype=torch.int64)
    asked = Asked(ids, (torch.zeros(2, 4), ids, (0, 1), "reference", None, torch.float32))
    return {"inputs": asked, "tables": (torch.zeros(5),), "pages": [torch.zeros(8, 2), torch.zeros(8, 2)], "specs": ()}


def with_inputs(name: str, value: object) -> Callable[[Arguments], None]:
    def change(given: Arguments) -> None:
        given["inputs"] = given["inputs"]._replace(**{name: value})

    return change


def with_beside(place: int, value: object) -> Callable[[Arguments], None]:
    def change(given: Arguments) -> None:
        beside = [*given["inputs"].beside]
        beside[place] = value
        given["inputs"] = given["inputs"]._replace(beside=tuple(beside))

    return change


def with_page(value: Any) -> Callable[[Arguments], None]:
    return lambda given: given["pages"].__setitem__(1, value)


OTHERS: dict[str, Callable[[Arguments], object]] = {
    "another type": with_inputs("ids", torch.zeros(3, dtype=torch.int32)),
    "another type of one tensor": lambda given: given.update(tables=(torch.zeros(5, dtype=torch.float64),)),
    "another device": lambda given: given.update(tables=(torch.zeros(5, device="meta"),)),
    "a page among the tables": lambda given: given.update(tables=(*given["tables"], given["pages"].pop(0))),
    "another class of tensors": with_page(nn.Parameter(torch.zeros(8, 2), requires_grad=False)),
    "one that needs gradients": with_page(torch.zeros(8, 2, requires_grad=True)),
    "more dimensions": with_page(torch.zeros(8, 2, 1)),
    "a tensor twice": lambda given: with_page(given["pages"][0])(given),
    "a tensor no longer twice": with_beside(1, torch.zeros(3, dtype=torch.int64)),
    "no tensor": with_page(None),
    "another number": with_beside(2, (0, 2)),
    "a truth that equals a number": with_beside(2, (0, True)),
    "more numbers": with_beside(2, (0, 1, 1)),
    "numbers in a list": with_beside(2, [0, 1]),
    "another word": with_beside(3, "triton"),
    "something for nothing": with_beside(4, 0),
    "another type's name": with_beside(5, torch.float16),
    "another flag": with_inputs("flag", True),
    "another class of inputs": lambda given: given.update(inputs=OtherAsked(*given["inputs"])),
    "more pages": lambda given: given["pages"].append(torch.zeros(8, 2)),
    "pages in a tuple": lambda given: given.update(pages=(*given["pages"],)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_arguments_that_differ_in_more_than_sizes_are_not_alike(name: str) -> None:
    given, other = arguments(), arguments()
    alike = Alike(given)
    assert alike.tensors(other) is not None
    OTHERS[name](other)
    assert Alike(other).form != Alike(given).form
    assert alike.tensors(other) is None


def test_a_tensor_in_two_arguments_is_told_from_two_tensors() -> None:
    """A graph has it as one input."""
    one, two = arguments(), arguments()
    one["tables"], two["tables"] = (one["pages"][0],), (torch.zeros(8, 2),)
    assert Alike(one).form != Alike(two).form
    assert Alike(one).tensors(two) is None


def test_tensors_are_found_in_the_order_of_their_paths() -> None:
    alike, given = Alike(arguments()), arguments()
    given["pages"][1] = torch.ones(80, 3)
    found = alike.tensors(given)
    assert found is not None
    by_path = dict(zip(alike.paths, found, strict=True))
    assert by_path["pages", 1] is given["pages"][1]
    assert by_path["inputs", "ids"] is by_path["inputs", "beside", 1] is given["inputs"].ids
    assert len(by_path) == 6


def test_equal_numbers_are_told_apart_by_their_places() -> None:
    assert equal_ones([7, 8, 7]) == equal_ones([3, 1, 3]) != equal_ones([3, 3, 1])


SHAPES = Shapes(
    [
        Sizes(("pages", 0), ["s0", 2, "s1"], ["2*s1", "s1", 1]),
        Sizes(("pages", 1), ["s0", 1], [1, "s0"]),
        Sizes(("pages", 2), [4], [1]),
    ],
    guards=["s0 > s1"],
    ranges={"s0": (2, 100), "s1": (2, None)},
)


def fitting(first: tuple[int, ...] = (6, 2, 3), second: tuple[int, ...] = (6, 1), third: tuple[int, ...] = (4,)) -> Any:
    return SHAPES.fitting([torch.zeros(first), torch.zeros(second), torch.zeros(third)])


def test_sizes_fit_by_symbols_and_numbers() -> None:
    numbers = fitting()
    assert (numbers["s0"], numbers["s1"], numbers["2*s1"], numbers[4]) == (6, 3, 6, 4)
    assert fitting((9, 2, 4), (9, 1))["2*s1"] == 8


@pytest.mark.parametrize(
    "sizes",
    [
        {"first": (6, 3, 3)},  # a number
        {"second": (5, 1)},  # the same symbol
        {"first": (6, 2, 3, 1)},  # dimensions
        {"first": (3, 2, 3), "second": (3, 1)},  # a guard
        {"first": (101, 2, 3), "second": (101, 1)},  # a range
        {"first": (6, 2, 1)},
        {"third": (5,)},
    ],
)
def test_other_sizes_do_not_fit(sizes: dict[str, tuple[int, ...]]) -> None:
    assert fitting(**sizes) is None


def test_other_strides_do_not_fit_unless_the_size_is_one() -> None:
    first, third = torch.zeros(6, 2, 3), torch.zeros(4)
    assert SHAPES.fitting([first, torch.zeros(6, 1).as_strided((6, 1), (1, 9)), third]) is not None
    assert SHAPES.fitting([first, torch.zeros(12, 1).as_strided((6, 1), (2, 6)), third]) is None
    assert SHAPES.fitting([torch.zeros(6, 3, 2).mT, torch.zeros(6, 1), third]) is None


def test_the_same_numbers_do_not_fit_in_other_tensors() -> None:
    memory = torch.zeros(40)
    first, second = memory.as_strided((6, 2), (6, 3)), memory.as_strided((3, 6, 1), (1, 1, 6))
    assert SHAPES.fitting([first, second, torch.zeros(4)]) is None


# ---- inputs, with those of a model


def layer() -> nn.Module:
    layer = nn.Linear(4, 4, bias=False)
    layer.register_buffer("state", torch.zeros(4))
    return layer


def kept(**changes: Any) -> KeptProgram:
    """A program that reads a weight, a size, inputs and a page that it writes to."""
    places: list[Any] = [("model", "weight"), "s0", ("inputs", "ids"), ("pages", 0), ("pages", 1)]
    sizes = [Sizes(("inputs", "ids"), ["s0"], [1]), Sizes(("pages", 0), [8, 2], [2, 1])]
    said = {"inputs": places, "tensors": sizes, "form": Alike(arguments()).form, "model": form_of_model(layer())}
    return KeptProgram("prefill", **{**said, "written": [3], "shared": [], **changes})


class Call:
    """Calls of one program with one model."""

    def __init__(self, **changes: Any) -> None:
        program, self.model = kept(**changes), layer()
        self.inputs, self.tensors = Inputs(program), ModelTensors(program)
        self.version = ModelVersion(self.model, 0)  # type: ignore[arg-type]

    def take(self) -> bool:
        self.version.begin_check()
        return self.tensors.take(self.model, self.version)

    def of(self, given: Arguments) -> list[Any]:
        assert self.take()
        return self.inputs.find(given, self.tensors)


def test_inputs_are_those_of_each_call() -> None:
    call = Call()
    for length in (3, 5):
        given = arguments()
        given["inputs"] = given["inputs"]._replace(ids=(ids := torch.zeros(length, dtype=torch.int64)))
        given["inputs"] = given["inputs"]._replace(beside=(given["inputs"].beside[0], ids, *given["inputs"].beside[2:]))
        found = call.of(given)
        assert [found[0], *found[2:]] == [call.model.weight, ids, *given["pages"]]
        assert found[1] == length


def test_calls_alike_are_compared_value_by_value_once() -> None:
    call = Call()
    with mock.patch.object(inputs, "Alike", side_effect=Alike) as compared:
        for _ in range(3):
            call.of(arguments())
    assert compared.call_count == 1


def sharing(given: Arguments) -> None:
    given["pages"][1] = given["pages"][0].view(8, 2)


def test_pages_that_share_memory_do_not_fit_whenever_they_begin_to() -> None:
    call = Call()
    for _ in range(2):
        call.of(arguments())
        given = arguments()
        sharing(given)
        with pytest.raises(MisfitError, match="share memory"):
            call.of(given)


def test_a_program_for_pages_that_share_memory_takes_no_others() -> None:
    call, given = Call(shared=[[3, 4]]), arguments()
    sharing(given)
    for _ in range(2):
        call.of(given)
        with pytest.raises(MisfitError, match="share memory"):
            call.of(arguments())


def test_a_page_in_a_weights_memory_does_not_fit() -> None:
    call, given = Call(), arguments()
    call.of(given)
    given["pages"][0] = call.model.weight.data.view(8, 2)  # type: ignore[operator, union-attr]
    with pytest.raises(MisfitError, match="share memory"):
        call.of(given)


def test_what_shared_memory_is_forgotten_with_the_weights() -> None:
    """A weight may be put into a page's memory."""
    call, given = Call(), arguments()
    call.of(given)
    call.model.weight.data = given["pages"][0].view(4, 4)
    with pytest.raises(MisfitError, match="share memory"):
        call.of(given)


@pytest.mark.parametrize(
    "exchange",
    [
        lambda data: data.t(),
        lambda data: data.view(torch.int32),
        lambda data: data[:2],
        lambda data: data.clone().t(),
    ],
    ids=["strides", "type", "sizes", "strides elsewhere"],
)
def test_weights_of_another_layout_do_not_fit_at_the_same_address_either(exchange: Callable[[Tensor], Tensor]) -> None:
    call = Call()
    assert call.take()
    assert call.take()
    call.model.weight.requires_grad_(False).data = exchange(call.model.weight.data)  # type: ignore[operator, union-attr, arg-type]
    assert not call.take()


def test_layouts_are_compared_once_a_check() -> None:
    call = Call()
    assert call.take()
    with mock.patch.object(inputs, "layouts_of", side_effect=inputs.layouts_of) as compared:
        assert call.take()
        assert call.tensors.take(call.model, call.version)
    assert compared.call_count == 1
