"""What engines ask the part that answers typed questions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from compiled_llm.features import Seam

if TYPE_CHECKING:
    from compiled_llm.requests.outputs import Decisions, RequestOutput
    from compiled_llm.requests.sampling_params import SamplingParams


class QuestionRead(Protocol):
    """The prompt of one question."""

    @property
    def prompt(self) -> list[int]: ...
    @property
    def params(self) -> SamplingParams: ...


class QuestionReader(Protocol):
    """A tokenizer with the settings of questions."""

    def reads(self, state: Any, questions: Any) -> Sequence[QuestionRead]: ...


class DecisionsPart(Protocol):
    """The part that answers typed questions."""

    def decider_of(self, tokenizer: Any, source: str | None) -> QuestionReader: ...
    def decisions_of(self, reads: Sequence[Any], outputs: Iterable[RequestOutput]) -> Decisions: ...


DECISIONS = Seam[DecisionsPart]("decisions", "requests")
