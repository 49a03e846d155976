"""A grammar as a logits processor: it gives the tokens that may follow, and the graph need not wait for it."""

# Shapes: B rows, V vocabulary; a mask has a bit for each token, in words of 32.

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from transformers import LogitsProcessor

from compiled_llm.compat.xgrammar import is_grammar, masks_of
from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm.execution.decode.deferred_sampling import Masks
from compiled_llm.kvcache.row import Row


class Grammar(LogitsProcessor):
    """A marker for processors that are grammars."""


def grammar_of(processors: Iterable[Any]) -> object:
    return next((processor for processor in processors if is_grammar(processor)), None)


def masks_from(
    grammar: object, rows: Sequence[Row], settings: Sequence[Sampling | None], ids: Callable[[], Tensor]
) -> Callable[[], Masks] | None:
    """Return a function that gives each step's masks; None without a grammar."""
    # ``grammar``, a logits processor, is called as HuggingFace calls it, once a step, with ``ids()``: ``[B, T]`` int64
    # on the host, all tokens so far of ``rows``. Tokens that the masks of ``settings`` forbid stay forbidden.
    if grammar is None:
        return None
    always = np.stack([sampling.mask for sampling in settings if sampling is not None and sampling.mask is not None])

    def masks() -> Masks:
        filled = masks_of(grammar, ids())
        bits = always.copy()
        bits[:, : filled.shape[1]] &= filled[:, : bits.shape[1]]
        return Masks(rows, bits)

    return masks
