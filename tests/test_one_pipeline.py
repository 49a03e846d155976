"""One class holds the steps that are launched and not read: who else kept some would have rules of its own for them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import compiled_llm
from compiled_llm.execution.batch import Batch, StepOutput
from compiled_llm.execution.decode.deferred_sampling import _Unsampled
from compiled_llm.execution.pipeline import Pipeline
from compiled_llm.kvcache.row import Row
from support.engine.tiny_engines import tiny, wrapped

TOKENS = 400
PACKAGE = Path(compiled_llm.__file__).parent
PART_OF_A_STEP = {"Ticket", "StepOutput"}
"""What one step is made of, in turn: it holds what the device has accepted, and is held by the pipeline."""


def names_in(node: ast.AST) -> set[str]:
    """Return the names in an annotation or a value, those of quoted annotations included."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    quoted = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    for text in quoted:
        try:
            found |= {each.id for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Name)}
        except SyntaxError:  # a sentence
            continue
    return found


def attributes_of(source: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each class with the names in one of its attributes: in its annotation, or in what is assigned to it."""
    for owner in ast.walk(ast.parse(source)):
        if not isinstance(owner, ast.ClassDef):
            continue
        fields = {id(each) for each in owner.body if isinstance(each, ast.AnnAssign)}
        for node in ast.walk(owner):
            match node:
                case ast.AnnAssign(target=ast.Attribute()) | ast.AnnAssign() if (
                    isinstance(node.target, ast.Attribute) or id(node) in fields
                ):
                    yield owner.name, names_in(node.annotation)
                case ast.Assign(targets=[ast.Attribute()], value=value):
                    yield owner.name, names_in(value)


def holders(kind: str, sources: Iterator[str]) -> set[str]:
    """Return the classes with an attribute that holds objects of a class."""
    return {owner for source in sources for owner, names in attributes_of(source) if kind in names}


def package() -> Iterator[str]:
    return (path.read_text() for path in sorted(PACKAGE.rglob("*.py")))


def test_one_class_holds_steps_that_are_not_read() -> None:
    assert holders("Ticket", package()) == {"Pipeline"}


def test_what_the_device_has_accepted_is_held_by_its_step_alone() -> None:
    assert holders("AcceptedTokens", package()) <= PART_OF_A_STEP


@pytest.mark.parametrize(
    "source",
    [
        "class Loop:\n    def __init__(self):\n        self._launched: deque[Ticket[int]] = deque()",
        "class Loop:\n    last: Ticket[None] | None = None",
        "class Loop:\n    last: 'Ticket[None] | None'",
        "class Loop:\n    def step(self, rows):\n        self._last = Ticket(rows)",
    ],
    ids=["deque", "field", "quoted", "made"],
)
def test_another_that_holds_some_is_found(source: str) -> None:
    assert holders("Ticket", iter([source])) == {"Loop"}


def test_tokens_of_a_launch_are_read_before_the_next_one_of_its_step_overwrites_them() -> None:
    """CUDA graphs share memory for what they compute."""
    model = wrapped(TOKENS, tiny(), mode="eager")
    runner = model.compiled.model_runner()
    pipeline = Pipeline[None](runner)
    rows = [Row(runner.pool, 0) for _ in range(3)]
    tokens = torch.tensor([1, 2])

    def launches() -> Iterator[StepOutput]:
        yield StepOutput(rows[:2], None, tokens)
        tokens.fill_(9)
        yield StepOutput(rows[2:], None, torch.tensor([3]))

    runner.thread.call(pipeline.launch, Batch(), None, launches())
    assert pipeline.read(lambda _, found: (found.rows, found.tokens)) == (rows, [1, 2, 3])


@pytest.mark.parametrize("late", [[0], [0, 1], [0, 1, 2], [1], [2]], ids=str)
def test_late_tokens_take_the_places_of_their_rows(late: list[int]) -> None:
    """A launch before whose end all rows are late is not read: nothing of it counts."""
    model = wrapped(TOKENS, tiny(), mode="eager")
    runner = model.compiled.model_runner()
    pipeline = Pipeline[None](runner)
    rows = [Row(runner.pool, 0) for _ in range(3)]
    waiting = [rows[at] for at in late]

    def launches() -> Iterator[StepOutput]:
        for own, tokens in ((rows[:2], [1, 2]), (rows[2:], [3])):
            if found := [row for row in own if row in waiting]:
                pipeline.persistent.deferred.unsampled.append(_Unsampled(found, torch.zeros(len(found), 1), ()))
            yield StepOutput(own, None, torch.tensor(tokens))

    ticket = runner.thread.call(pipeline.launch, Batch(), None, launches())
    assert list(ticket.late) == waiting
    assert len(ticket.readbacks) == {(0, 1): 1, (0, 1, 2): 0}.get(tuple(late), 2)
    ticket.late_readback = runner.readbacks.start(torch.tensor([10 * (at + 1) for at in late]))
    expected = [10 * (at + 1) if at in late else at + 1 for at in range(3)]
    assert pipeline.read(lambda _, found: found.tokens) == expected
