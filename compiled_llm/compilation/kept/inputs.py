"""The inputs of a kept program: tensors of the model, which stay, and those that differ from call to call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from compiled_llm.compilation.kept.alike import Alike, equal_ones, form_differs
from compiled_llm.compilation.kept.kept_program import KeptProgram
from compiled_llm.compilation.kept.layout import (
    form_of_model,
    layouts_of,
    memories_of,
    memory_shared,
)
from compiled_llm.compilation.kept.paths import PER_CALL, Path, look_up
from compiled_llm.model.version.model_version import ModelVersion


class MisfitError(ValueError):
    """A call is none of those that a program was kept for; the message says what is different."""


class ModelTensors:
    """The inputs of one program that are the model's, looked up once as long as they are the same.

    Attributes:
        inputs: one for each input; None for those that are not the model's.
        memories: likewise, as ``memories_of`` says.
        sharing: which of the other inputs shared memory in a call that fitted, by ``equal_ones``; None before.
    """

    def __init__(self, program: KeptProgram) -> None:
        self._form = program.model
        self._number = -1
        self._check = -1
        self._places = _beginning(program, "model")
        self._count = len(program.inputs)
        self.drop()

    def drop(self) -> None:
        """Let go of them until they are needed."""
        self.inputs: list[Tensor | None] = []
        self.memories: list[int | None] = []
        self.sharing: list[int] | None = None
        self._held: list[Tensor] = []
        self._layouts: list[object] = []
        self._memories = frozenset[int]()

    def take(self, model: nn.Module, version: ModelVersion) -> bool:
        """Look them up, if they are others than at last; False if they do not fit."""
        if not (self.inputs and self._number == version.tensors and self._have_their_layouts(version)):
            if form_of_model(model) != self._form:
                return False
            self._look_up(model)
            self._number = version.tensors
            self._check = version.checks
        return True

    def share_with(self, memories: Sequence[int]) -> bool:
        """Whether one of them lies in one of these memories."""
        return not self._memories.isdisjoint(memories)

    def _have_their_layouts(self, version: ModelVersion) -> bool:
        """Compare sizes, strides and types once a check: other ``data`` may lie at the same address."""
        if self._check != version.checks and self._layouts == layouts_of(self._held):
            self._check = version.checks
        return self._check == version.checks

    def _look_up(self, model: nn.Module) -> None:
        self.drop()
        self._held = [look_up({"model": model}, place) for _, place in self._places]
        self._layouts = layouts_of(self._held)
        memories = memories_of(self._held)
        self._memories = frozenset(memories)
        self.inputs = [None] * self._count
        self.memories = [None] * self._count
        for (number, _), tensor, memory in zip(self._places, self._held, memories, strict=True):
            self.inputs[number], self.memories[number] = tensor, memory


class Inputs:
    """The inputs of one program, found in the arguments of each call."""

    def __init__(self, program: KeptProgram) -> None:
        self._program = program
        self._shapes = program.shapes
        self._sizes = [(n, each) for n, each in enumerate(program.inputs) if not isinstance(each, tuple)]
        self._beside = _beginning(program, "specs")
        self._per_call = _beginning(program, *PER_CALL)
        self._tensor_places = [place for place, _ in (*self._per_call, *self._beside)]
        self._alike: Alike | None = None  # as in the last call that was compared value by value
        self._measured: list[int] = []  # the numbers of its tensors whose sizes are compared
        self._read: list[int] = []  # those of inputs

    def find(self, arguments: Mapping[str, Any], of_model: ModelTensors) -> list[Any]:
        """Return them all; MisfitError if arguments do not fit."""
        tensors = self._tensors(arguments)
        if (sizes := self._shapes.fitting([tensors[number] for number in self._measured])) is None:
            raise MisfitError(self._shapes.misfit(arguments))
        inputs: list[Any] = [*of_model.inputs]
        for place, size in self._sizes:
            inputs[place] = sizes[size]
        for (place, _), number in zip(self._per_call, self._read, strict=True):
            inputs[place] = tensors[number]
        for place, path in self._beside:
            inputs[place] = look_up(arguments, path)
        self._check_memories(inputs, of_model)
        return inputs

    def _tensors(self, arguments: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors that differ from call to call."""
        if self._alike is not None and (tensors := self._alike.tensors(arguments)) is not None:
            return tensors
        alike = Alike(arguments)
        if alike.form != self._program.form:
            raise MisfitError(form_differs(alike.form, self._program.form))
        self._alike = alike
        numbers = {path: number for number, path in enumerate(alike.paths)}
        self._measured = [numbers[tensor.path] for tensor in self._shapes.tensors]
        self._read = [numbers[path] for _, path in self._per_call]
        tensors = alike.tensors(arguments)
        assert tensors is not None, "they are like themselves"
        return tensors

    def _check_memories(self, inputs: Sequence[Any], of_model: ModelTensors) -> None:
        """Compare which inputs share memory with one that is written to."""
        own = memories_of([inputs[place] for place in self._tensor_places])
        sharing = None if of_model.share_with(own) else equal_ones(own)
        if sharing is not None and sharing == of_model.sharing:
            return
        memories = [*of_model.memories]
        for place, memory in zip(self._tensor_places, own, strict=True):
            memories[place] = memory
        if memory_shared(memories, self._program.written) != self._program.shared:
            raise MisfitError("other tensors share memory with one that is written to")
        of_model.sharing = sharing


def _beginning(program: KeptProgram, *names: str) -> list[tuple[int, Path]]:
    """Return the inputs that lie in arguments of these names, by their numbers."""
    return [(n, place) for n, place in enumerate(program.inputs) if isinstance(place, tuple) and place[0] in names]
