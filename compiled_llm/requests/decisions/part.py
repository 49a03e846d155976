"""The functions by which the rest asks typed questions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from compiled_llm.requests.decisions.decider import Decider
from compiled_llm.requests.decisions.label_read import LabelRead
from compiled_llm.requests.outputs import Decisions, RequestOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from compiled_llm.requests.deciding import DecisionsPart
    from compiled_llm.requests.decisions import part as this

    checked: DecisionsPart = this


def decider_of(tokenizer: PreTrainedTokenizerBase, source: str | None) -> Decider:
    return Decider(tokenizer, source)


def decisions_of(reads: Sequence[LabelRead], outputs: Iterable[RequestOutput]) -> Decisions:
    """Return the answers that follow from what an engine has read."""
    found = Decisions()
    found.diagnostics, found.prompt_tokens, found.cached_tokens = {}, 0, 0
    for read, output in zip(reads, outputs, strict=True):
        found[read.question.name], found.diagnostics[read.question.name] = read.answer(output.outputs[0])
        found.prompt_tokens += len(output.prompt_token_ids)
        found.cached_tokens += output.cached_tokens
    return found
