"""What the rest asks the part that keeps programs for other processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from compiled_llm.features import Seam

if TYPE_CHECKING:
    from torch import fx

    from compiled_llm.compilation.backend import Keep
    from compiled_llm.compilation.graphs.validity import Checks
    from compiled_llm.config import WrapConfig
    from compiled_llm.model.facts import ModelFacts


class ProgramRecorder(Protocol):
    """What writes down the programs of a model while they are traced."""

    @property
    def refused(self) -> Mapping[str, str]:
        """Why programs are not kept, by their names."""
        ...

    def watching(
        self, name: str, function: Callable[..., Any], program: Callable[..., Any], arguments: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """Return what runs a program, and notes what its trace depends on."""
        ...

    def compile(
        self, module: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]
    ) -> Callable[..., Any]: ...
    @property
    def keep(self) -> Keep: ...


class ProgramTaker(Protocol):
    """What takes the programs of a model as they were kept."""

    @property
    def names(self) -> set[str]: ...
    @property
    def taken(self) -> set[str]: ...
    @property
    def misfits(self) -> Mapping[str, str]:
        """Why programs do not fit, by their names."""
        ...

    @property
    def given_up(self) -> Mapping[str, str]: ...
    def bound(
        self, name: str, function: Callable[..., Any], arguments: Mapping[str, Any]
    ) -> Callable[..., Any] | None: ...
    def checks(self, name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Checks: ...
    def drop_tensors(self) -> None: ...


class KeptPart(Protocol):
    """The part that keeps programs."""

    def recording(self, folder: Path) -> AbstractContextManager[None]: ...
    def not_kept(self, folder: Path) -> Mapping[str, str]: ...
    def of_model(
        self, facts: ModelFacts, config: WrapConfig, artifacts: Path | None
    ) -> tuple[ProgramRecorder | None, ProgramTaker | None]: ...


KEPT = Seam[KeptPart]("kept programs", "compilation")
