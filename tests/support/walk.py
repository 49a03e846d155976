"""The calls of our own functions that a block makes, without those of programs, which a CUDA graph makes none of."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType

import compiled_llm
from compiled_llm.compilation import steps
from support.execution.stand_in_cuda_graphs import StandIn

PACKAGE = Path(compiled_llm.__file__).parent
LEFT_OUT = ("model", "compat")
PROGRAM = steps.__file__
ROOMS_OF_STEPS = {"execution", "execution/decode", "execution/steps"}


@cache
def _noted(filename: str) -> str:
    """Return a file's path below the package; nothing if its calls are not noted."""
    path = Path(filename)
    file = path.relative_to(PACKAGE) if PACKAGE in path.parents else None
    return "" if file is None or file.parts[0] in LEFT_OUT else str(file)


class Walk:
    """The calls of our own functions, from one mark to the next."""

    def __init__(self) -> None:
        self.legs: list[list[str]] = [[]]
        self.objects: list[set[str]] = [set()]  # classes whose methods were called
        self._inside = 0

    def mark(self) -> None:
        self.legs.append([])
        self.objects.append(set())

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        program = code.co_name == "decode_step" and code.co_filename == PROGRAM
        if program or code is StandIn.launch.__code__:
            self._inside += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not self._inside and (file := _noted(code.co_filename)):
            self.legs[-1].append(file)
            if file.rpartition("/")[0] in ROOMS_OF_STEPS and "self" in frame.f_locals:
                self.objects[-1].add(type(frame.f_locals["self"]).__name__)

    def of(self, function: Callable[[], object]) -> list[list[str]]:
        """Return the files of the calls between two marks, in order."""
        before = sys.getprofile()
        sys.setprofile(self.note)
        try:
            function()
        finally:
            sys.setprofile(before)
        return self.legs
