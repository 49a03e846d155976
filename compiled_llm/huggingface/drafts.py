"""``generate(prompt_lookup_num_tokens=...)`` in the fast loop, for any number of rows: its part of drafts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compiled_llm.execution.drafts.part import MOST_DRAFTS, DraftSettings
from compiled_llm.execution.drafts.rounds import Rounds
from compiled_llm.execution.drafts.texts import UNKNOWN, texts_of
from compiled_llm.huggingface.call.call import PagedCall
from compiled_llm.huggingface.generate import Drafting
from compiled_llm.huggingface.processors.grammar import grammar_of
from compiled_llm.kinds.support import refusal

if TYPE_CHECKING:
    from compiled_llm.huggingface import drafts as this
    from compiled_llm.huggingface.paths import PromptLookupPart

    checked: PromptLookupPart = this

logger = logging.getLogger("compiled_llm")

_MOST_MATCHED = 2
"""HuggingFace's ``max_matching_ngram_size``, if it is not given."""

_OF_THE_METHOD = ("assistant_model", "assistant_tokenizer", "tokenizer", "inputs_tensor", "streamer", "synced_gpus")
"""Arguments of HuggingFace's method that are no inputs of the model."""


def drafting_of(call: PagedCall) -> Drafting | None:
    """Return what makes the rounds of a call, or None if HuggingFace's loop serves it."""
    config = call.config
    asked, matched = config.prompt_lookup_num_tokens, config.max_matching_ngram_size or _MOST_MATCHED
    others = call.kwargs.get("assistant_model") is not None or config.assistant_early_exit is not None
    if asked is None or asked < 1 or matched < 1 or others or not serves(call):
        return None
    if asked > MOST_DRAFTS and _warned.isdisjoint({asked}):
        _warned.add(asked)
        logger.warning("prompt_lookup_num_tokens=%d is cut to %d, the most that a step can check", asked, MOST_DRAFTS)
    settings = DraftSettings(min(asked, MOST_DRAFTS), matched, 1)

    def rounds(call: PagedCall, answers: Sequence[NDArray[np.int64]], left: int) -> Rounds:
        texts = [np.concatenate([*both]) for both in zip(_texts(call), answers, strict=True)]
        return Rounds(call.cache.generate_loop, settings, texts, left)

    return rounds


_warned: set[int] = set()


def serves(call: PagedCall) -> bool:
    """Return whether steps can draft for a call: its layers, its backend, and what it asks of each step."""
    runner = call.model_runner
    ops, kinds = runner.decode_buffers.ops, runner.state.facts.kinds
    several = ops is not None and ops.several and not runner.config.batch_invariant
    if not several or refusal(kinds, "drafts", "drafts") is not None or _is_padded(call):
        return False
    if call.wants_scores() or call.more is not None or grammar_of(call.processors) is not None:
        return False
    try:
        texts_of(runner)
    except ValueError:  # there is too little memory
        return False
    return True


def _is_padded(call: PagedCall) -> bool:
    """Whether the embeddings of one row have padding, which HuggingFace's loop with drafts counts as tokens."""
    # It takes no more than one row.
    mask = call.kwargs.get("attention_mask")
    return call.embedded and mask is not None and len(mask) == 1 and not bool(call.copies.of(mask).all())


def as_sampled(call: PagedCall) -> PagedCall:
    """Return the call as HuggingFace hands it to the loop without drafts."""
    kwargs = {name: value for name, value in call.kwargs.items() if name not in _OF_THE_METHOD}
    return replace(call, kwargs=kwargs, streamer=call.kwargs.get("streamer"))


def _texts(call: PagedCall) -> list[NDArray[np.int64]]:
    """Return the tokens that each row's pages hold once its prompt is computed, as far as they are known."""
    rows = call.cache.generate_loop.rows
    if call.prefilled_apart:
        return [np.full(row.exact_length, UNKNOWN, dtype=np.int64) for row in rows]
    if not call.cache.seen:
        return call.tokens
    kept = map(np.flatnonzero, call.cache.stored)
    return [
        np.concatenate([np.where(columns < call.first, UNKNOWN, ids[columns - call.first]), tokens])
        for columns, ids, tokens in zip(kept, call.ids, call.tokens, strict=True)
    ]
