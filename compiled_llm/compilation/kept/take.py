"""Takes kept programs in a process that does not trace them, for as long as they fit."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from compiled_llm.compilation.kept.alike import UnknownError
from compiled_llm.compilation.kept.cache.stored_program import StoredProgram
from compiled_llm.compilation.kept.call import RegionCalls
from compiled_llm.compilation.kept.fingerprint.fingerprint import Fingerprint
from compiled_llm.compilation.kept.fingerprint.surroundings import THREADS, ProcessWatch
from compiled_llm.compilation.kept.inputs import Inputs, MisfitError, ModelTensors
from compiled_llm.model.version.model_version import ModelVersion

logger = logging.getLogger("compiled_llm.graphs")

Function = Callable[..., Any]


class GivenUpError(Exception):
    """A program fits no call of this process; the message says why."""


class Taker:
    """The kept programs of one model.

    Attributes:
        given_up: why programs that were kept are traced, by their names.
        misfits: why a call was traced that programs were not kept for, the first of each name, or for no call.
        taken: the names of programs that run as they were kept.
    """

    def __init__(self, programs: Sequence[StoredProgram], version: ModelVersion) -> None:
        """Of several programs of one name, the first that fits is taken."""
        self._version = version
        self._programs: dict[str, list[_Taken]] = defaultdict(list)
        self.misfits: dict[str, str] = {}
        for kept in programs:
            if kept.program.refused is None:
                self._programs[kept.program.name].append(_Taken(kept))
            else:
                self.misfits[kept.program.name] = f"it is not kept, since {kept.program.refused}"
        self._form: int | None = None  # of the model, for which all were taken
        self._let_gos = 0  # of the model's version, as of then
        self.given_up: dict[str, str] = {}
        self.taken: set[str] = set()

    @property
    def names(self) -> set[str]:
        """The names of programs that may be taken."""
        return {*self._programs}

    def bound(self, name: str, function: Function, arguments: Mapping[str, Any]) -> Function | None:
        """Return a call of a kept program with these arguments, by name; None if ``function`` has to be traced."""
        misfit = None
        for taken in [*self._candidates(name)]:
            try:
                call = self._bound(taken, function, arguments)
            except GivenUpError as error:
                self._give_up(taken, str(error))
            except MisfitError as error:
                misfit = str(error)
            else:
                self.taken.add(name)
                return call
        if misfit is not None and name not in self.misfits:
            self.misfits[name] = misfit
            logger.info("compiled_llm: %s is traced for a call that it was not kept for: %s", name, misfit)
        return None

    def checks(self, name: str, function: Function, arguments: Mapping[str, Any]) -> KeptChecks:
        """Return what has to hold for a captured call with these arguments."""
        return KeptChecks(lambda: self.bound(name, function, arguments) is not None)

    def drop_tensors(self) -> None:
        """Let go of the model's tensors until they are needed."""
        for taken in self._all():
            taken.of_model.drop()

    def _all(self) -> list[_Taken]:
        return [taken for programs in self._programs.values() for taken in programs]

    def _candidates(self, name: str) -> Sequence[_Taken]:
        if self._form is not None and self._programs:
            if self._version.let_gos != self._let_gos:  # its version has nothing to compare the model with
                self._form = None
                for taken in self._all():  # as before they were taken first
                    taken.process = None
            elif self._version.form != self._form:
                for taken in self._all():
                    self._give_up(taken, "the model has changed")
        return self._programs.get(name, ())

    def _bound(self, taken: _Taken, function: Function, arguments: Mapping[str, Any]) -> Function:
        """Return a call; GivenUpError if the program fits none, MisfitError if it may fit other calls."""
        try:
            if taken.process is None:
                self._check(taken, function, arguments)
            elif not taken.process.holds():
                different = Fingerprint.decoded(taken.program.fingerprint).process_differences()
                raise MisfitError("; ".join(different) or "the process has other settings")
            if not taken.of_model.take(arguments["model"], self._version):
                raise GivenUpError("its model has other tensors")
            return taken.bound(arguments)
        except (LookupError, AttributeError, TypeError, UnknownError) as error:
            raise MisfitError(f"an argument is not what it was ({type(error).__name__}: {error})") from error

    def _check(self, taken: _Taken, function: Function, arguments: Mapping[str, Any]) -> None:
        """Raise GivenUpError if anything differs from where the program was kept; else watch what may change."""
        kept = Fingerprint.decoded(taken.program.fingerprint)
        now = kept.now(arguments["model"], function, arguments)
        process = ProcessWatch(THREADS in kept.entries)
        if different := kept.compared(now):
            raise GivenUpError("; ".join(different))
        try:
            taken.load()
        except Exception as error:  # any: the files are what they were, and this torch may not run them
            raise GivenUpError(f"its code cannot be loaded: {type(error).__name__}: {error}") from error
        self._version.watch_code(now.places)
        self._form = self._version.form
        self._let_gos = self._version.let_gos
        taken.process = process

    def _give_up(self, taken: _Taken, why: str) -> None:
        name = taken.program.name
        self._programs[name].remove(taken)
        if not self._programs[name]:
            del self._programs[name]
            self.taken.discard(name)
            self.given_up[name] = why
            logger.info("compiled_llm: %s is traced, and not taken as it was kept: %s", name, why)


class KeptChecks:
    """The guards of a kept program's call whose CUDA graph is replayed."""

    def __init__(self, fits: Callable[[], bool]) -> None:
        self._fits = fits

    def find(self) -> None:
        """Do nothing: it held when the call was made ready."""

    def valid(self) -> bool:
        """Whether the same program would be taken."""
        return self._fits()


class _Taken:
    """One kept program."""

    def __init__(self, kept: StoredProgram) -> None:
        self.program = kept.program
        self.process: ProcessWatch | None = None  # None until the fingerprint was compared
        self._kept = kept
        self._inputs = Inputs(kept.program)
        self.of_model = ModelTensors(kept.program)
        self._calls: RegionCalls | None = None

    def load(self) -> None:
        self._calls = self._calls or self._kept.load()

    def bound(self, arguments: Mapping[str, Any]) -> Function:
        """Return a call with these arguments; MisfitError if they do not fit."""
        assert self._calls is not None, "loaded before"
        return self._calls.bind(self._inputs.find(arguments, self.of_model))
