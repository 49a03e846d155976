"""A trial forward that need not run if it would find what an earlier one has found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from transformers import PreTrainedModel

from compiled_llm.compilation.kept.cache.program_cache import ProgramCache
from compiled_llm.compilation.kept.fingerprint.fingerprint import Fingerprint
from compiled_llm.compilation.kept.kept_program import KeptProgram
from compiled_llm.compilation.kept.trial.executed import ExecutedCode
from compiled_llm.compilation.kept.trial.values import UnsaidError, decoded, encoded
from compiled_llm.kinds.kind import Layer
from compiled_llm.model.weights.fused_weights import FusedGroup

logger = logging.getLogger("compiled_llm.graphs")

NAME = "trial forward"

Probe = Callable[[], list[Layer]]


class KeptTrial:
    """The trial forward of one model, on fake tensors."""

    def __init__(self, model: PreTrainedModel, cache: ProgramCache) -> None:
        self._model, self._cache = model, cache
        self._fingerprint: Fingerprint | None = None
        self._layers: list[Layer] | None = None
        self._groups: Sequence[FusedGroup] | None = None

    def layers(self, probe: Probe) -> list[Layer]:
        """Return what ``probe`` finds, which runs if no earlier one has found it; errors as it raises."""
        if (found := self._found()) is not None:
            layers, self._groups = found
            return layers
        with ExecutedCode() as executed:
            layers = probe()
        if executed.whole:
            self._fingerprint = Fingerprint.of_run(self._model, type(self._model).forward, executed.codes)
        self._layers = [*layers]
        return layers

    def groups(self, find: Callable[[], Sequence[FusedGroup]]) -> Sequence[FusedGroup]:
        """Return which weights are read together, found by ``find`` if the trial forward has run; then it is kept."""
        if self._groups is not None:
            return self._groups
        groups = find()
        self._keep(groups)
        return groups

    def _found(self) -> tuple[list[Layer], Sequence[FusedGroup]] | None:
        for entry in self._cache.read():
            try:
                known = Fingerprint.decoded(entry.program.fingerprint)
                if different := known.differences(self._model, type(self._model).forward, {}):
                    logger.info("compiled_llm: the trial forward runs again: %s", "; ".join(different[:4]))
                    continue
                layers, groups = decoded(entry.program.result)
            except ValueError as error:
                logger.debug("what a trial forward has found cannot be read: %s", error)
                continue
            return layers, groups
        return None

    def _keep(self, groups: Sequence[FusedGroup]) -> None:
        if self._fingerprint is None or self._layers is None:
            return
        try:
            if self._fingerprint.refused is not None:
                raise UnsaidError(self._fingerprint.refused)
            result = encoded((self._layers, [*groups]))
            if decoded(result) != (self._layers, [*groups]):
                raise UnsaidError("layers are others once they are read")
        except ValueError as error:
            logger.debug("what the trial forward has found stays in this process: %s", error)
            return
        self._cache.keep(
            KeptProgram(NAME, result=result, fingerprint=self._fingerprint.for_any_threads().encoded()), {}
        )
