"""The n-gram drafter."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from compiled_llm.execution.drafts.texts import Texts
from compiled_llm_ops import ngram_drafts


class NgramDrafter(NamedTuple):
    """A drafter that looks a row's last tokens up in its text, and proposes what came after them there."""

    texts: Tensor  # ``[X, L]`` int32
    longest: Tensor  # ``[X]`` int32, how many tokens of each slot's row are looked up at most
    shortest: Tensor  # ``[X]`` int32, and at least

    def propose(self, slots: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See ``Drafter``."""
        return ngram_drafts(self.texts, slots, lengths, self.longest, self.shortest, k)


def drafter_of(texts: Texts) -> NgramDrafter:
    return NgramDrafter(texts.tokens, texts.longest, texts.shortest)
