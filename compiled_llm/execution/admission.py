"""Whether a prompt is one: what a loop of one's own hands over is checked before anything is taken."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from compiled_llm.execution.model_runner import ModelRunner


def checked_prompt(model_runner: ModelRunner, prompt: ArrayLike, max_new_tokens: int) -> tuple[NDArray[np.int64], int]:
    """Return a prompt's tokens, and how many its row will store.

    Raises:
        ValueError: the prompt is empty or not of tokens of the model, ``max_new_tokens`` is negative, or the model has
            too few positions for both.
    """
    ids = np.asarray(prompt)
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
