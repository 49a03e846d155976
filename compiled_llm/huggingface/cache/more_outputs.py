"""Outputs of a call besides tokens, logits and a cache, by a part that can be taken out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from compiled_llm.execution.batch import Tap
from compiled_llm.features import Seam, needed
from compiled_llm.model.traced.hooks import TracedHooks

if TYPE_CHECKING:
    from compiled_llm.execution.generate_loop import GenerateLoop
    from compiled_llm.huggingface.cache.cache_columns import RowUpdate
    from compiled_llm.kvcache.row import Row


class GivenOutputs(Protocol):
    """What a call's tokens have emitted."""

    def put_into(self, output: ModelOutput) -> None: ...
    def map(self, change: Callable[[Tensor], Tensor]) -> GivenOutputs: ...
    @classmethod
    def joined(cls, parts: Sequence[Any]) -> GivenOutputs:
        """Return those of several parts of a batch, in their order."""
        ...


class EmittedOfSteps(Tap):
    """What reads each step of a call of ``generate``."""

    def begin(self, rows: Sequence[Row], new: Sequence[int]) -> None:
        """Note the rows of the call, and of each how many of its last tokens are computed: others have the rest."""
        raise NotImplementedError

    def outputs(self, steps: int) -> Mapping[str, Any]:
        """Return the fields of ``generate``'s output for the first steps."""
        raise NotImplementedError


class MoreOutputs(Protocol):
    """The outputs that a call asks of its steps besides logits."""

    def steps(self, call: Any) -> EmittedOfSteps: ...
    def column_bytes(self, model: PreTrainedModel) -> int:
        """Return what the outputs of a token take, as far as that is known."""
        ...

    def reading(
        self, generate_loop: GenerateLoop, rows: Sequence[RowUpdate], first: int, new: int
    ) -> AbstractContextManager[Callable[[], GivenOutputs]]:
        """Collect what the rows' ``new`` columns from ``first`` emit in the block; yields what returns it."""
        ...


class EmittedPart(Protocol):
    """The part that reads what steps emit."""

    def wanted(self, asked: bool | int | Sequence[int] | None, hooks: TracedHooks) -> MoreOutputs: ...


_EMITTED = Seam[EmittedPart]("hidden_states", "huggingface")


def more_outputs(asked: bool | int | Sequence[int] | None, hooks: TracedHooks) -> MoreOutputs | None:
    """Return what ``output_hidden_states`` and the hooks ask for; None for nothing, ValueError if it is not there."""
    return needed(_EMITTED).wanted(asked, hooks) if asked or hooks else None
