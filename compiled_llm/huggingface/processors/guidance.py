"""Classifier-free guidance (``guidance_scale``) as two rows a request: one step computes a prompt and its negative."""

# HuggingFace's processor calls the model for the negative prompts, with a cache of their own, between any two steps.
# Here each row has a twin instead, which holds the negative prompt and is fed the same tokens. Shapes: B rows, V
# vocabulary.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.execution.limits import pages_needed
from compiled_llm.huggingface.call.call import PagedCall
from compiled_llm.kvcache.row import Row


class GuidanceByTwins(UnbatchedClassifierFreeGuidanceLogitsProcessor):
    """HuggingFace's processor over logits that are computed already."""

    logits: Tensor  # ``[B, V]``, the twins', in the model's dtype

    def get_unconditional_logits(self, input_ids: Tensor) -> Tensor:
        """Return the twins' logits as ``[B, 1, V]``."""
        return self.logits[:, None]


@dataclass(frozen=True)
class Twins:
    """The second rows of a call; ``processor`` is its first one."""

    processor: GuidanceByTwins
    tokens: list[NDArray[np.int64]]  # each row's negative prompt
    positions: list[NDArray[np.int64]]  # rotary, of these tokens

    def pages_needed(self, call: PagedCall) -> int:
        return pages_needed(call.model_runner, [len(tokens) for tokens in self.tokens], call.max_new)

    @contextmanager
    def rows_in(self, generate_loop: GenerateLoop, max_new: int) -> Iterator[list[Row]]:
        """Let the twins be the last rows of ``generate_loop`` for the block; each may grow by ``max_new`` tokens."""
        first = len(generate_loop.rows)
        try:
            for tokens in self.tokens:
                generate_loop.add_row(len(tokens) + max_new - 1)
            yield generate_loop.rows[first:]
        finally:
            for row in generate_loop.rows[first:]:
                generate_loop.release(row)

    def take_logits(self, logits: Tensor) -> Tensor:
        """Keep the twins' half of ``[2 * B, V]`` for the processor, and return the half of the call's own rows."""
        rows = len(self.tokens)
        self.processor.logits = logits[rows:]
        return logits[:rows]


def with_twins(call: PagedCall) -> tuple[PagedCall, Twins | None]:
    """Return the call with twins that compute its guidance, and these; the same call and None if there can be none."""
    processor = call.processors[0] if call.processors else None
    if type(processor) is not UnbatchedClassifierFreeGuidanceLogitsProcessor:
        return call, None
    if any(isinstance(other, UnbatchedClassifierFreeGuidanceLogitsProcessor) for other in call.processors[1:]):
        return call, None
    if (prompts := _negative_prompts(processor, call)) is None:
        return call, None
    counted = call.runtime.facts.default_positions == "unmasked"
    positions = [np.arange(len(columns)) if counted else columns for _, columns in prompts]
    by_twins = GuidanceByTwins(processor.guidance_scale, processor.model)
    twins = Twins(by_twins, [tokens for tokens, _ in prompts], positions)
    if not _fit(twins, call):
        return call, None
    return replace(call, processors=LogitsProcessorList([by_twins, *call.processors[1:]])), twins


def _negative_prompts(
    processor: UnbatchedClassifierFreeGuidanceLogitsProcessor, call: PagedCall
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]] | None:
    """Return rows' negative tokens (by default the prompt's last) and columns; None if HuggingFace has others."""
    context = processor.unconditional_context
    if processor.model is not call.runtime.facts.model or not (context["first_pass"] and context["use_cache"]):
        return None
    if call.runtime.facts.default_positions == "own":
        return None
    ids = context["input_ids"]
    mask = context["attention_mask"]
    read = call.ids[:, -1:] if ids is None else call.copies.of(ids).numpy().astype(np.int64)
    shown = np.ones(read.shape, dtype=bool) if mask is None else call.copies.of(mask).numpy() != 0
    padded_left = shown.shape == read.shape and bool((shown[:, 1:] >= shown[:, :-1]).all() and shown[:, -1:].all())
    if len(read) != len(call.ids) or not padded_left:
        return None
    return [(row[columns], np.flatnonzero(columns)) for row, columns in zip(read, shown, strict=True)]


def _fit(twins: Twins, call: PagedCall) -> bool:
    """Whether the batch has room for twins, if there are pages."""
    model_runner = call.model_runner
    return (
        2 * len(twins.tokens) <= model_runner.max_batch_size
        and max(int(columns[-1]) + 1 for columns in twins.positions) + call.max_new <= model_runner.max_positions
        and all(int(ids.min()) >= 0 and int(ids.max()) < model_runner.vocabulary for ids in twins.tokens)
    )
