"""A row of one batch for each setting of sampling: what plain steps give it, and what steps that draft do.

Shapes: B rows, X slots.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_llm.compilation.drafts import NOT_ACCEPTED, Drafter, drafted_step
from compiled_llm.compilation.sampling.bias import BARRED, Bias, packed
from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm.execution.drafts.ngram import NgramDrafter
from support.compilation.drafted_rows import (
    VOCABULARY,
    Known,
    Parts,
    Rows,
    all_of,
    always,
    at_position,
    never,
    parts_of,
    prompts_of,
    some_of,
    sometimes,
    tiny_model,
)
from support.ops.sampling_cases import BRANCHES, CHOSEN, EDITED
from support.tiny_models import WINDOWS

START = 999
"""Position of the first token that rows feed in: settings have biases whose steps begin and end there."""

STEPS = 16
LOOKING_BACK = [
    Sampling(temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0),
    Sampling(temperature=0.8, frequency_penalty=2.0, repetition_penalty=1.5, seen=np.arange(0, 100, 7)),
    Sampling(temperature=0.0, biases=packed(Bias((5 * u + 3) % VOCABULARY, 30.0, after=(u,)) for u in range(128))),
    Sampling(
        temperature=0.9,
        biases=packed(Bias((3 * u + 5) % VOCABULARY, 9.0, after=(u, v)) for u in range(128) for v in (7, 9)),
        tail=np.array([7, 9, 2]),
    ),
    Sampling(temperature=0.0, biases=packed(Bias(token, BARRED, 0, 6) for token in range(0, 128, 2))),
]
"""What the drafts before a token change: penalties, and biases that follow others."""

SETTINGS = [
    at_position(own, 1000 + number, START + 1) for number, own in enumerate([*BRANCHES, *EDITED, *LOOKING_BACK])
]


class Case(NamedTuple):
    """A model, and what rows of each setting sample in plain steps."""

    parts: Parts
    page_size: int
    prompts: list[list[int]]
    answers: Tensor  # ``[X, STEPS]`` int64
    after: Rows  # as the steps have left them

    def rows(self) -> Rows:
        return Rows(self.parts, self.page_size, self.prompts, SETTINGS, START)

    def known(self, wrong_by: Any = never, counted: Any = all_of) -> Known:
        device = self.after.texts.device
        lengths = torch.tensor([*map(len, self.prompts), 1], device=device)
        return Known(self.answers.to(device), lengths, wrong_by, counted)


@cache
def case_of(page_size: int, seed: int, device: str = "cpu", windows: bool = False) -> Case:
    model = tiny_model(page_size, rows=len(SETTINGS), device=device, overrides=WINDOWS if windows else {})
    parts, prompts = parts_of(model), prompts_of(len(SETTINGS), seed, int(CHOSEN[-1]))
    rows = Rows(parts, page_size, prompts, SETTINGS, START)
    answers = torch.stack([rows.step() for _ in range(STEPS)], dim=1)
    return Case(parts, page_size, prompts, answers, rows)


def drafted_answers(rows: Rows, drafter: Drafter, new: Callable[[int], int], step: Any = drafted_step) -> Tensor:
    """`[X, STEPS]` int64, what rows sample in as many steps of ``new`` tokens as that takes."""
    answers: list[list[int]] = [[] for _ in rows.limits]
    number, padding = 0, len(answers) - 1
    while min(len(own) for own in answers[:padding]) < STEPS:
        stopped = torch.tensor([len(own) >= STEPS for own in answers[:padding]] + [True], device=rows.limits.device)
        rows.limits[stopped] = 0  # they do not outgrow their pages
        for own, tokens in zip(answers, rows.drafted(drafter, new(number), step).tolist(), strict=True):
            own += [token for token in tokens if token > NOT_ACCEPTED]
        assert len(answers[padding]) == number + 1, "padding grows by one token"
        number += 1
    return torch.tensor([own[:STEPS] for own in answers[:padding]])


def check(case: Case, drafter: Callable[[Rows], Drafter], new: Callable[[int], int], step: Any = drafted_step) -> None:
    rows = case.rows()
    answers = drafted_answers(rows, drafter(rows), new, step)
    wrong = (answers != case.answers[:-1]).any(dim=1).nonzero()[:, 0].tolist()
    assert not wrong, f"rows {wrong} get other tokens"


DRAFTERS: dict[str, Callable[[Case], Callable[[Rows], Drafter]]] = {
    "right": lambda case: lambda rows: case.known(),
    "wrong": lambda case: lambda rows: case.known(always),
    "mixed": lambda case: lambda rows: case.known(sometimes, some_of),
    "ngrams": lambda case: lambda rows: ngrams_of(rows),
}


def ngrams_of(rows: Rows) -> Drafter:
    longest = torch.arange(len(rows.limits), dtype=torch.int32, device=rows.limits.device) % 4 + 1
    return NgramDrafter(rows.texts, longest, torch.ones_like(longest))
