"""A trial forward that need not run if it would find what an earlier one has found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from transformers import PreTrainedModel

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

    def __init__(
        self,
        model: PreTrainedModel,
        known: Sequence[KeptProgram],
        keep: Callable[[KeptProgram], object] | None = None,
    ) -> None:
        """``known`` are those that were kept; ``keep`` is called with this one if none of them fits."""
        self._model, self._known, self._keep = model, known, keep
        self._fingerprint: Fingerprint | None = None
        self._layers: list[Layer] | None = None
        self._groups: Sequence[FusedGroup] | None = None

    def layers(self, probe: Probe) -> list[Layer]:
        """Return what ``probe`` finds, which runs if no earlier one has found it; errors as it raises."""
        if (found := self._found()) is not None:
            layers, self._groups = found
            return layers
        if self._keep is None:
            return probe()
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
        self._write(groups)
        return groups

    def _found(self) -> tuple[list[Layer], Sequence[FusedGroup]] | None:
        for known in self._known:
            try:
                fingerprint = Fingerprint.decoded(known.fingerprint)
                if different := fingerprint.differences(self._model, type(self._model).forward, {}):
                    logger.info("compiled_llm: the trial forward runs again: %s", "; ".join(different[:4]))
                    continue
                layers, groups = decoded(known.result)
            except ValueError as error:
                logger.debug("what a trial forward has found cannot be read: %s", error)
                continue
            return layers, groups
        return None

    def _write(self, groups: Sequence[FusedGroup]) -> None:
        if self._keep is None or self._fingerprint is None or self._layers is None:
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
        self._keep(KeptProgram(NAME, result=result, fingerprint=self._fingerprint.for_any_threads().encoded()))
