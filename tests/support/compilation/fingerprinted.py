"""Fingerprints of traced programs, and the calls that they are compared with, without Inductor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import fx

from compiled_llm.compilation import backend
from compiled_llm.compilation.kept.fingerprint.fingerprint import Fingerprint
from compiled_llm.compilation.program_list import program_for
from compiled_llm.compilation.programs import Arguments, Programs
from compiled_llm.compilation.tracing.layer_marks import fill
from support.parity import greedy, mixed_prompts


class Call(NamedTuple):
    """What a program is called with."""

    model: Any  # as wrapped, for where its calls run
    stand_in: Any  # what the program reads in its place
    function: Callable[..., Any]
    arguments: Mapping[str, Any]

    def compared_with(self, kept: Fingerprint) -> list[str]:
        """Return what differs, as where programs are called."""
        with self.model.compiled.facts.attention.paged(), torch.no_grad():
            return kept.compared(kept.now(self.stand_in, self.function, self.arguments))


class Traced(NamedTuple):
    """A program that was traced, and how it was called."""

    fingerprint: Fingerprint
    call: Call


class _StoppedError(BaseException):
    """Nothing is traced."""


def traced_programs(model: Any, tokens: int = 1) -> list[Traced]:
    """Trace the programs of a wrapped model that write so many tokens; each reads back what was written of it."""
    found: list[Traced] = []
    with _calls(model) as calls:

        def compile_nothing(self: object, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            call = calls[-1]
            made = Fingerprint.of_trace(call.stand_in, call.function, call.arguments, module.graph)
            found.append(Traced(made, call))
            fill(module.graph)
            module.recompile()
            return module.forward

        with mock.patch.object(backend.Inductor, "__call__", compile_nothing):
            greedy(model, mixed_prompts([7], 128, seed=0), tokens)
    return found


def first_call(model: Any) -> Call:
    """Return the first call of a program of a wrapped model, which is not traced."""
    with _calls(model, stop=True) as calls, suppress(_StoppedError):
        greedy(model, mixed_prompts([7], 128, seed=0), 1)
    return calls[0]


@contextmanager
def _calls(model: Any, stop: bool = False) -> Iterator[list[Call]]:
    calls: list[Call] = []
    prepared = Programs.prepared

    def noting(self: Programs, arguments: Arguments, compare: bool = True) -> Any:
        stand_in = self._adapted(arguments)
        function = self._functions[program_for(arguments.inputs).name]
        calls.append(Call(model, stand_in, function, self._by_name(arguments)))
        if stop:
            raise _StoppedError
        return prepared(self, arguments, compare)

    with mock.patch.object(Programs, "prepared", noting):
        yield calls
