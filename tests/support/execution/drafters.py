"""Drafters that know the answers, and loops that draft with them, beside loops that do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from compiled_llm.compilation.drafts import NEW_TOKENS
from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm.execution.drafts import part
from compiled_llm.execution.drafts.part import DraftSettings
from compiled_llm.execution.drafts.rounds import Rounds
from compiled_llm.execution.drafts.rule import Rule
from compiled_llm.execution.drafts.texts import Texts
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.kvcache.row import Row

Kind = Literal["right", "wrong", "empty every third step", "right now and then", "wrong for one row"]
KINDS: tuple[Kind, ...] = ("right", "wrong", "empty every third step", "right now and then")


FIRST = 10
"""The first token of the row for which drafts are wrong."""


class Knowing(NamedTuple):
    """A drafter that knows the whole text of each row, by its first token."""

    texts: Tensor  # ``[X, L]`` int32, of ``Texts``
    answers: Tensor  # ``[V, L]`` int64
    kind: Kind

    def propose(self, slots: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
        own = self.answers[self.texts[slots, 0].long()]
        at = (lengths.long()[:, None] + torch.arange(k, device=slots.device)).clamp(max=own.shape[1] - 1)
        tokens, counts = own.gather(1, at), torch.full_like(lengths, k)
        if self.kind == "wrong":
            tokens = tokens ^ 1
        elif self.kind == "wrong for one row":
            tokens = tokens ^ (self.texts[slots, :1] == FIRST).long()
        elif self.kind == "empty every third step":
            counts = torch.where(lengths % 3 == 0, 0, counts)
        elif self.kind == "right now and then":
            tokens = tokens ^ (at * 7 % 5 == 0).long()
        return tokens, counts


def knowing(model: Any, texts: Sequence[Sequence[int]], kind: Kind) -> Callable[[Texts], Knowing]:
    """Return what makes the drafter of rows with these texts, whose first tokens differ."""

    def made(of: Texts) -> Knowing:
        answers = torch.zeros(model.config.vocab_size, of.tokens.shape[1], dtype=torch.int64)
        for text in texts:
            answers[text[0], : len(text)] = torch.tensor(text[: answers.shape[1]])
        return Knowing(of.tokens, answers, kind)

    return made


class Turning(Rule):
    """Feeds in another number of tokens in each step, with as many drafts as there can be."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._turns = cycle(sizes)

    def size(self, rows: Sequence[Row]) -> int:
        return next(self._turns)

    def limit(self, row: Row) -> int:
        return 7

    def note(self, *_: object) -> None:
        pass


def let_sizes_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all loops feed in another number of tokens in each step."""
    monkeypatch.setattr(part, "Rule", lambda *_: Turning([1, *NEW_TOKENS]))


def plain_answers(
    model: Any, prompts: Sequence[Sequence[int]], new: int, settings: Sequence[Sampling | None]
) -> list[list[int]]:
    """Return the ``new`` tokens that each prompt gets without drafts."""
    loop: GenerateLoop = model.compiled.generate_loop()
    rows = [loop.admit(prompt, new, own) for prompt, own in zip(prompts, settings, strict=True)]
    answers: dict[Row, list[int]] = {row: [] for row in rows}
    for number in range(new + 1):
        for row, token in (loop.step() if number < new else loop.drain()).items():
            answers[row].append(token)
    loop.close()
    return [answers[row] for row in rows]


def drafting(
    model: Any,
    prompts: Sequence[Sequence[int]],
    new: int,
    settings: Sequence[Sampling | None],
    kind: Kind | None = None,
    answers: Sequence[Sequence[int]] = (),
    most: int = 7,
    sizes: Sequence[int] | None = (8,),
    name: str = "",
    rule: Rule | None = None,
) -> tuple[GenerateLoop, Rounds]:
    """Return a loop of prompts and its rounds, by n-grams or a drafter that knows the answers."""
    # Steps have ``sizes`` in turn, or what the ``rule`` says, the own one if ``sizes`` are None.
    loop: GenerateLoop = model.compiled.generate_loop()
    for prompt, own in zip(prompts, settings, strict=True):
        loop.admit(prompt, new, own)
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=False)]
    drafter = () if kind is None else (knowing(model, texts, kind), f"{kind} {name}")
    known = [np.array(prompt, dtype=np.int64) for prompt in prompts]
    if rule is None and sizes is not None:
        rule = Turning(sizes)
    return loop, Rounds(loop, DraftSettings(most), known, new, rule, *drafter)


def drafted_answers(loop: GenerateLoop, rounds: Rounds, new: int) -> list[list[int]]:
    """Return the ``new`` tokens that each row gets, and close the loop."""
    rows = list(loop.rows)
    answers: dict[Row, list[int]] = {row: [] for row in rows}
    while min(map(len, answers.values())) < new:
        for row, token in rounds.next().items():
            answers[row].append(token)
    loop.close()
    return [answers[row] for row in rows]
