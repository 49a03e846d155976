"""The calls of compiled functions that make a kept program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path as File
from typing import Any, NamedTuple

from compiled_llm.compat.torch.kept.region_code import Function, load_code
from compiled_llm.compilation.kept.kept_program import KeptProgram
from compiled_llm.compilation.kept.packing import packing, read_by


class _Step(NamedTuple):
    function: Function
    values: Sequence[int]
    results: slice
    last_read: Sequence[int]  # the values that nobody reads afterwards


class RegionCalls:
    """The calls of one program; functions are loaded once, when it is made."""

    def __init__(self, kept: KeptProgram, folder: File) -> None:
        """``folder`` has the caches of Inductor and Triton; errors of any type if code cannot be loaded."""
        functions = [load_code(folder, code) for code in kept.codes]
        self._pack = packing(kept.result)
        self._steps: list[_Step] = []
        self._inputs = at = len(kept.inputs)
        for call in kept.calls:
            self._steps.append(_Step(functions[call.code], call.values, slice(at, at + call.results), ()))
            at += call.results
        self._results = at - self._inputs
        read = read_by(kept.result)
        for number in reversed(range(len(self._steps))):
            step = self._steps[number]
            self._steps[number] = step._replace(last_read=sorted({*step.values} - read))
            read |= {*step.values}

    def bind(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return a call with these inputs, each of which may be made many times; it takes any arguments."""
        steps, pack, given = self._steps, self._pack, (*inputs, *[None] * self._results)

        def run(*_: object) -> object:
            values: list[Any] = [*given]
            for function, read, results, last_read in steps:
                values[results] = function([values[number] for number in read])
                for number in last_read:
                    values[number] = None
            return pack(values)

        return run
