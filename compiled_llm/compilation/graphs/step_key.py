"""The key of a step, by which it is captured, counted, and named in profiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:  # imports torch
    from compiled_llm.compilation.inputs import Pooling

Phase = Literal["decode", "prefill", "scoring", "sampling"]
"""A decode step; a prefill; one that gives all tokens' logits and samples none; or a sampling made later."""
STEPS: tuple[Phase, ...] = ("decode", "prefill", "scoring")  # those that run the model


class StepKey(NamedTuple):
    """A phase and a padded size; steps of one key can be replays of one CUDA graph."""

    phase: Phase  # prefill, decode, and so on
    tokens: int  # how many it computes, padding included; of a decode step, equally many in each row
    # how many of them sample a token, or could, padding included. A prefill has one row more, whose tokens, if any are
    # missing, fill up ``tokens``
    rows: int
    schedule: int = 0  # of a prefill how the backend divides it among thread blocks, which only the backend understands
    shares: bool = False  # whether it is a decode step that reads pages which rows share once
    masked: bool = False  # whether it is a sampling that writes masks first
    wants: tuple[str, ...] = ()  # outputs of the model that it gives besides logits, by HuggingFace's names
    drafter: str = ""  # who proposes drafts in a decode step, of which the device decides how many count
    pooling: Pooling = ""  # of a prefill
    program: str = ""  # of a prefill whose rows have extra inputs, the name of the program that reads them

    @classmethod
    def decode(cls, rows: int, new_tokens: int = 1, shares: bool = False) -> StepKey:
        return cls("decode", rows * new_tokens, rows, shares=shares)

    @classmethod
    def prefill(cls, tokens: int, rows: int, schedule: int = 0) -> StepKey:
        return cls("prefill", tokens, rows, schedule)

    @classmethod
    def sampling(cls, rows: int, masked: bool) -> StepKey:
        return cls("sampling", rows, rows, masked=masked)

    @classmethod
    def numbered(cls, phase: Phase, tokens: int, rows: int, variant: int) -> StepKey:
        """Return the key of a plain step by the numbers that reports and profiles have."""
        if phase == "decode":
            return cls(phase, tokens, rows, shares=variant > 0)
        if phase == "sampling":
            return cls(phase, tokens, rows, masked=variant > 0)
        return cls(phase, tokens, rows, variant)

    @property
    def numbers(self) -> tuple[Phase, int, int, int]:
        """Those of ``numbered``."""
        return self.phase, self.tokens, self.rows, self.variant

    @property
    def variant(self) -> int:
        """Of a prefill its schedule, of other steps 1 if they share pages or write masks."""
        return self.schedule or int(self.shares or self.masked)

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
    def purpose(self) -> tuple[object, ...]:
        """Whatever it is for besides logits and tokens after token ids; steps are padded to those of one purpose."""
        return self.wants, self.drafter, self.pooling, self.program

    @property
    def is_plain(self) -> bool:
        """Whether it reads token ids, and gives logits and tokens."""
        return not any(self.purpose)

    def __str__(self) -> str:
        more = [*self.wants, self.drafter, self.pooling, self.program]
        for_more = "".join(f", {name}" for name in filter(None, more))
        return f"{self.phase} with tokens={self.tokens}, rows={self.rows}, schedule={self.variant}{for_more}"
