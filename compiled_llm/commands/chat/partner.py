"""Who answers: a model in this process, or a generator in another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from compiled_llm.client.handle import RemoteHandle
    from compiled_llm.engine.metrics import EngineStats
    from compiled_llm.engine.thread.handle import RequestHandle
    from compiled_llm.protocol.messages import Stats
    from compiled_llm.requests.sampling_params import SamplingParams

Handle: TypeAlias = "RequestHandle | RemoteHandle"


class Partner(Protocol):
    """Answers prompts.

    Attributes:
        name: of the model.
        tokenizer: HuggingFace's.
        max_tokens: how many tokens a prompt may have with its answer.
    """

    name: str
    tokenizer: Any
    max_tokens: int

    def refresh(self) -> bool:
        """Wait until it answers, with what its attributes say by then; whether it is another model than before."""
        ...

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> Handle:
        """Begin to answer token ids."""
        ...

    def stats(self) -> EngineStats | Stats:
        """Return how it is doing."""
        ...
