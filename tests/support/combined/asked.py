"""What one request asks for, as features have it, and the logits processors that do the same in HuggingFace's way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import LogitsProcessor

from compiled_llm.engine.engine import Engine
from compiled_llm.engine.wanted import wanted_of
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.sampling_params import SamplingParams


@dataclass
class Asked:
    """A request; features write into it before it is sent.

    Attributes:
        ids: the prompt, with the places of images.
        tokens: how many its answer has, unless a grammar ends it.
        begins: after how many tokens of the first request it is sent.
        inputs: what a processor gives for images, ``input_ids`` among it; None for text.
        params: fields of ``SamplingParams``.
        processors: what make HuggingFace's processors, which do to logits what ``params`` do.
        hidden: whether it wants the last hidden states.
        cancelled: after how many tokens of the first request it is cancelled; None if it is not.
    """

    ids: list[int]
    tokens: int
    begins: int = 0
    inputs: dict[str, Tensor] | None = None
    params: dict[str, Any] = field(default_factory=dict)
    processors: list[Callable[[], LogitsProcessor]] = field(default_factory=list)
    hidden: bool = False
    cancelled: int | None = None

    @property
    def sampling(self) -> SamplingParams:
        ends = {} if "stop_token_ids" in self.params else {"ignore_eos": True}
        return SamplingParams(**{"temperature": 0.0, "max_tokens": self.tokens, **ends, **self.params})

    @property
    def choices(self) -> int:
        """Among how many of the most likely tokens each one is drawn."""
        return 1 if self.sampling.temperature == 0 else self.sampling.top_k

    def prepared(self, engine: Engine) -> RequestHandle:
        """Return its handle, checked as by ``submit``; ``Engine.begin`` sends it, from any thread."""
        runner = engine._checked_runner()
        params, wanted = wanted_of(engine._runtime.facts, self.sampling, [-1] if self.hidden else None, None, False)
        return engine._intake.handle(runner, self.ids if self.inputs is None else self.inputs, params, wanted)
