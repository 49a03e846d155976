"""Whether prompts, and all that they may grow by, fit the model, the batch size and the pages."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from compiled_llm.execution.model_runner import ModelRunner


def checked_prompt(model_runner: ModelRunner, prompt: ArrayLike, max_new_tokens: int) -> tuple[NDArray[np.int64], int]:
    """Return a prompt's tokens ``[Q]``, and how many its row will store; ValueError as ``GenerateLoop.admit``."""
    ids, facts = np.asarray(prompt), model_runner.state.facts
    if facts.sees_prompts_both_ways:
        raise ValueError(
            f"prompt: {facts.model_class.__name__} sees the tokens of a prompt both ways, which HuggingFace's forward "
            "alone computes; call model.generate"
        )
    if ids.size == 0:
        raise ValueError("prompt is empty: give at least one token")
    vocabulary = model_runner.vocabulary
    if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocabulary:
        raise ValueError(
            f"prompt: token ids are integers from 0 to {vocabulary - 1}; got {ids.dtype} from {ids.min()} to "
            f"{ids.max()}"
        )
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens}: must not be negative")
    stored = ids.size + max(0, max_new_tokens - 1)  # the last token is sampled but never stored
    if stored > model_runner.max_positions:
        raise ValueError(
            f"prompt: {ids.size} tokens and max_new_tokens={max_new_tokens} take {stored} positions, and the model "
            f"has {model_runner.max_positions}"
        )
    return ids.astype(np.int64).reshape(-1), stored


def whole_limit(limit: float) -> int:
    """Return a limit of HuggingFace's as a number of tokens: a text ends at the first length that is not below it."""
    return math.ceil(min(limit, sys.maxsize))


def pages_needed(model_runner: ModelRunner, prompts: Sequence[int], max_new: int, shared: Sequence[int] = ()) -> int:
    """Return how many pages prompts of these lengths may need with all ``max_new`` tokens that each may grow by."""
    # The last token of a row is sampled but never stored. ``shared`` is how many tokens each row has in common with an
    # earlier one, if any; full pages of them are counted once.
    pool = model_runner.pool
    return sum(pool.pages_for(prompt + max_new - 1) for prompt in prompts) - sum(map(pool.filled_by, shared))


def check_fits(
    model_runner: ModelRunner, prompts: Sequence[int], max_new: int, needed: int | None = None, beams: int = 1
) -> None:
    """Check prompts with all that they may grow by; ValueError has the numbers if they do not fit."""
    # ``needed`` pages are beyond those that the rows have, all if None; each prompt is searched with ``beams`` rows.
    rows = f"{len(prompts)} rows" if beams == 1 else f"{len(prompts)} beams (num_beams={beams})"
    longest, positions = max(prompts) + max_new, model_runner.max_positions
    if longest > positions:
        raise ValueError(
            f"max_new_tokens={max_new}: with a prompt of {max(prompts)} tokens that makes {longest}, and the model "
            f"has {positions} positions; shorten the prompt or generate at most {max(0, positions - max(prompts))}"
        )
    if len(prompts) > model_runner.max_batch_size:
        raise ValueError(
            f"input_ids: {rows} are more than max_batch_size={model_runner.max_batch_size}; "
            f"{_ways_to_fewer_rows(len(prompts), beams)}, or wrap(model, max_batch_size={len(prompts)})"
        )
    pool = model_runner.pool
    needed = pages_needed(model_runner, prompts, max_new) if needed is None else needed
    if needed > pool.available:
        raise ValueError(
            f"input_ids and max_new_tokens={max_new}: {rows} of up to {longest} tokens need {needed} "
            f"pages of {pool.page_size} tokens, and {pool.available} of {pool.total} are available "
            f"({pool.tokens_in(pool.available)} tokens); shorten or split the batch, drop caches you keep, or wrap "
            "with a larger kv_memory"
        )


def _ways_to_fewer_rows(rows: int, beams: int) -> str:
    ways = (["search with fewer beams"] if beams > 1 else []) + (["split the batch"] if rows > beams else [])
    return ", ".join(ways)
