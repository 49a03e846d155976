"""The key of a step, by which it is captured, counted, and named in profiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Phase = Literal["decode", "prefill", "scoring", "sampling"]
"""A decode step; a prefill; one that gives all tokens' logits and samples none; or a sampling made later."""
STEPS: tuple[Phase, ...] = ("decode", "prefill", "scoring")  # those that run the model

ACCEPTED = "accepted"
"""How a want begins that is no output of the model: of each row's new tokens the device decides how many count."""

POOLED = "pooled"
"""How a want begins that stands in place of logits: the step gives other numbers of tokens, and samples none."""


class StepKey(NamedTuple):
    """A phase and a padded size; steps of one key can be replays of one CUDA graph."""

    phase: Phase  # prefill, decode, and so on
    tokens: int  # how many it computes, padding included; of a decode step, equally many in each row
    # how many of them sample a token, or could, padding included. A prefill has one row more, whose tokens, if any are
    # missing, fill up ``tokens``
    rows: int
    # of a prefill how the backend divides it among thread blocks, which only the backend understands; of a sampling 1
    # if it writes masks first; of a decode step 1 if pages that rows share are read once; else 0
    schedule: int = 0
    wants: tuple[str, ...] = ()  # outputs of the model that it gives besides logits, by HuggingFace's names
    program: str = ""  # of a prefill whose rows have extra inputs, the name of the program that reads them

    @classmethod
    def decode(cls, rows: int, new_tokens: int = 1, shares: bool = False) -> StepKey:
        return cls("decode", rows * new_tokens, rows, int(shares))

    @classmethod
    def prefill(cls, tokens: int, rows: int, schedule: int = 0) -> StepKey:
        return cls("prefill", tokens, rows, schedule)

    @classmethod
    def sampling(cls, rows: int, masked: bool) -> StepKey:
        return cls("sampling", rows, rows, int(masked))

    @property
    def outputs(self) -> tuple[int, int]:
        """How many tokens it gives logits of, and how many it samples, padding included."""
        return self.rows if self.phase == "prefill" else self.tokens, self.rows if self.is_prefill else self.tokens

    @property
    def is_prefill(self) -> bool:
        """Whether it is a prefill, of whichever tokens it gives logits."""
        return self.phase in ("prefill", "scoring")

    @property
    def new_tokens_per_row(self) -> int:
        """Of a decode step, whose rows have equally many."""
        return self.tokens // self.rows

    @property
    def shares(self) -> bool:
        """Whether it is a decode step that reads pages which rows share once."""
        return self.phase == "decode" and self.schedule > 0

    @property
    def pools(self) -> bool:
        """Whether the step gives something in place of logits."""
        return pools(self.wants)

    @property
    def accepts(self) -> bool:
        """Whether the step feeds in guesses, of which the device decides how many count."""
        return any(want.startswith(ACCEPTED) for want in self.wants)

    def __str__(self) -> str:
        wants = "".join(f", {want}" for want in (*self.wants, *filter(None, [self.program])))
        return f"{self.phase} with tokens={self.tokens}, rows={self.rows}, schedule={self.schedule}{wants}"


def pools(wants: Sequence[str]) -> bool:
    """Return whether a step that is to give these outputs gives one of them in place of logits."""
    return any(want.startswith(POOLED) for want in wants)
