"""Whether hashes of what a trace has read are the same; the process's are compared whenever a step is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from compiled_llm.compilation.kept.fingerprint.fingerprint import Fingerprint, compare
from compiled_llm.compilation.kept.fingerprint.surroundings import THREADS, ProcessWatch, process_state
from compiled_llm.model.version.code import Place


class RefusedPrintError(ValueError):
    """A program depends on something that cannot be hashed; the message says on what."""


def traced(
    function: Callable[..., Any], arguments: Mapping[str, Any], graph: fx.Graph, for_threads: bool
) -> dict[str, Any]:
    """Return the fingerprint of the trace that a backend is called in, or raise RefusedPrintError.

    ``for_threads`` says whether the compiled code is made for the number of torch's threads, as C++ kernels are.
    """
    found = Fingerprint.of_trace(arguments["model"], function, arguments, graph)
    if found.refused is not None:
        raise RefusedPrintError(found.refused)
    return (found if for_threads else found.for_any_threads()).encoded()


class Prints:
    """The fingerprint of a kept program, compared in this process."""

    def __init__(self, kept: Fingerprint) -> None:
        self._kept = kept
        self._process: ProcessWatch | None = None
        self.places: Sequence[Place] = ()  # where a change is to be noticed

    @classmethod
    def of(cls, said: Any) -> Prints:
        """Read ``Fingerprint.encoded``; ValueError if it is none."""
        return cls(Fingerprint.decoded(said))

    def differences(self, model: Any, function: Callable[..., Any], arguments: Mapping[str, Any]) -> list[str]:
        """Return in words what differs from where the program was kept; nothing if it may be taken."""
        now = self._kept.now(model, function, arguments)
        self.places, self._process = now.places, ProcessWatch(THREADS in self._kept.entries)
        return self._kept.compared(now)

    def process_differs(self) -> bool:
        """Whether this process or thread has other settings than at the last comparison."""
        return self._process is None or not self._process.holds()

    def process_differences(self) -> list[str]:
        """Return in words how they differ from where the program was kept."""
        now = process_state()
        return compare({name: entry for name, entry in self._kept.entries.items() if name in now}, now)
