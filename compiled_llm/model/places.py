"""Finds, in a stack, the line that its reader can change."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
import transformers

import compiled_llm_ops
from compiled_llm.kinds.refusals import UnsupportedModelError


class Place(NamedTuple):
    """A line of source code; ``file`` is empty if unknown."""

    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        """The line itself; empty if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        """``file:line in function``, the file relative to the working directory if it lies in there."""
        if not self.file:
            return "no line of Python"
        try:
            file = str(Path(self.file).relative_to(Path.cwd()))
        except ValueError:
            file = self.file
        return f"{file}:{self.line} in {self.function}"


NOWHERE = Place("", 0, "")

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+?)\s*$', re.MULTILINE)
# Dynamo shortens file names by what they have in common with torch's folder, in its comments on guards.
_COMMENT = re.compile(r"#\s+(?P<file>\S+):(?P<line>\d+) in (?P<function>\S+)")


def _folder(module: object) -> str:
    return os.path.dirname(os.path.abspath(str(getattr(module, "__file__", "")))) + os.sep


_OURS = (str(Path(__file__).parents[1]) + os.sep, _folder(compiled_llm_ops))
_TRANSFORMERS = _folder(transformers)
_STANDARD = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib"))
_PACKAGES = tuple(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib"))


def stack_in(text: str) -> list[Place]:
    """Return the frames of a printed traceback, outermost first."""
    return [Place(m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(text)]


def stack_of(trace: TracebackType | None) -> list[Place]:
    """Return the frames of an exception's traceback, outermost first."""
    return [Place(frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(trace)]


def commented_place(text: str) -> Place | None:
    """Return the place that Dynamo's comment on a guard names."""
    match = _COMMENT.search(text)
    if match is None:
        return None
    return Place(_full_name(match["file"]), int(match["line"]), match["function"])


def _full_name(short: str) -> str:
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return next((file for file in files if file and file.endswith(short)), short)


def blame(stack: Sequence[Place]) -> Place:
    """Return the innermost line of the user's own code; of transformers', if there is none."""
    inner = _below_ours(stack)
    own = [place for place in inner if is_users(place)]
    models = [place for place in inner if place.file.startswith(_TRANSFORMERS)]
    return next(iter([*reversed(own), *reversed(models), *reversed(inner)]), NOWHERE)


def line_of_model(stack: Sequence[Place]) -> Place:
    """Return the innermost line of the user's own code or of transformers', whatever of torch and ours runs in it."""
    found = (place for place in reversed(stack) if is_users(place) or place.file.startswith(_TRANSFORMERS))
    return next(found, NOWHERE)


def at_users_line(stack: Sequence[Place]) -> str:
    """Return the innermost line of the user's own code as the end of a sentence; empty if there is none."""
    place = next(filter(is_users, reversed(stack)), None)
    return "" if place is None else f", at {place}: `{place.source}`"


def is_users(place: Place) -> bool:
    """Whether a line is the user's own: not Python's, torch's, transformers' nor ours."""
    file = place.file
    if not os.path.isabs(file) or file.startswith((*_OURS, _TRANSFORMERS, _folder(torch))):
        return False
    return file.startswith(_PACKAGES) or not file.startswith(_STANDARD)


def _below_ours(stack: Sequence[Place]) -> list[Place]:
    last = max((index for index, place in enumerate(stack) if place.file.startswith(_OURS)), default=-1)
    return list(stack[last + 1 :]) or list(stack)


@contextmanager
def leading_to_explain() -> Iterator[None]:
    """End refusals in the block with the line at fault, if it is the user's own, and a pointer to ``explain``."""
    # The error of the model's forward is the refusal's ``cause``, and is not printed with it: its traceback goes
    # through dozens of lines of torch's.
    try:
        yield
    except UnsupportedModelError as refusal:
        at = at_users_line(stack_of((refusal.cause or refusal).__traceback__))
        message = f"{refusal}{at}. compiled_llm.explain(model) says more, and what to do"
        raise UnsupportedModelError(message, refusal.cause) from None
