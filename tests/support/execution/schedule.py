"""Loops whose rows come and go at random, each row compared with a twin in HuggingFace's forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.features import has
from compiled_llm.kvcache.row import Row
from support.execution.alone import Alone

TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}


def assert_logits(generate_loop: GenerateLoop, *twins: Alone) -> None:
    torch.testing.assert_close(generate_loop.logits(), torch.stack([twin.logits for twin in twins]), **TOLERANCE)


def prompt_of(length: int, rng: np.random.Generator) -> list[int]:
    return rng.integers(3, 128, length).tolist()


def first_layer(generate_loop: GenerateLoop) -> list[Tensor]:
    """The keys and values of each row, one after the other."""
    return [states for stored in generate_loop.stored(0) for states in stored]


class Schedule:
    """A loop and its rows' twins, each alone on HuggingFace's forward."""

    def __init__(self, generate_loop: GenerateLoop, plain: PreTrainedModel, rng: np.random.Generator) -> None:
        self.generate_loop, self._plain, self._rng = generate_loop, plain, rng
        self.twins: dict[Row, Alone] = {}
        self.waiting: dict[Row, list[int]] = {}
        self.expected: dict[Row, int] = {}  # of the step before
        self.left: dict[Row, int] = {}
        self.drafted = 0  # steps of several tokens
        self.drafts: Any = None  # a copy of the package without drafts has none
        if has("drafts"):
            from support.execution.scripted_drafts import ScriptedDrafts

            self.drafts = ScriptedDrafts(generate_loop)
        self.unread: list[Any] = []  # launched steps of which some tokens count
        self.forks: list[tuple[GenerateLoop, list[Tensor]]] = []
        self.has_next = True  # and not forgotten or computed elsewhere

    def admit(self, length: int, new: int) -> None:
        prompt = prompt_of(length, self._rng)
        row = self.generate_loop.admit(prompt, new)
        self.waiting[row], self.left[row] = prompt, new

    def release(self, row: Row) -> None:
        self.generate_loop.release(row)
        self.waiting.pop(row, None)
        self.twins.pop(row, None)
        del self.left[row]

    def step(self, forced: bool) -> None:
        """One step, and everything about it that HuggingFace can confirm."""
        tokens = None
        if self.waiting:
            took_part = list(self.waiting)
            for row in took_part:
                self.twins[row] = Alone(self._plain, self.waiting.pop(row))
        else:
            took_part = list(self.generate_loop.rows)
            if forced or not self.has_next:
                tokens = torch.tensor(prompt_of(len(took_part), self._rng))
            for index, row in enumerate(took_part):
                self.left[row] -= 1
                self.twins[row].feed([self.twins[row].next if tokens is None else int(tokens[index])])
            self.has_next = True
        arrived = self.generate_loop.step(tokens)
        assert arrived == self.expected, "tokens of the step before, of the rows that took part in it"
        assert_logits(self.generate_loop, *(self.twins[row] for row in took_part))
        self.expected = {row: self.twins[row].next for row in took_part}
        assert all(row.length_at_least <= len(self.twins[row].fed) <= row.length_at_most for row in took_part)

    def extend(self) -> None:
        """Like the user's next words in a conversation."""
        rows = list(self.twins)
        more = [prompt_of(int(self._rng.integers(1, 5)), self._rng) for _ in rows]
        lengths = [len(self.twins[row].fed) for row in rows]
        positions = [np.arange(length, length + len(ids)) for length, ids in zip(lengths, more, strict=True)]
        logits = self.generate_loop.extend(rows, list(map(np.array, more)), positions)
        for row, ids in zip(rows, more, strict=True):
            self.twins[row].feed(ids)
        torch.testing.assert_close(logits, torch.stack([self.twins[row].logits for row in rows]), **TOLERANCE)

    def draft(self) -> None:
        """Drafts in one step, of which the device decides how many count; some results are never read."""
        rows = self.generate_loop.rows
        new = int(self._rng.choice([new for new in (2, 4, 8) if new <= min(self.left[row] for row in rows)]))
        counts = self._rng.integers(1, new + 1, len(rows)).tolist()
        self.unread.append(self.drafts.launch(new, counts, [self.twins[row] for row in rows]))
        for row, count in zip(rows, counts, strict=True):
            self.left[row] -= count
        self.drafted += 1

    def read(self) -> None:
        self.unread.pop(int(self._rng.integers(len(self.unread)))).check()

    def rewind(self) -> None:
        row = list(self.twins)[self._rng.integers(len(self.twins))]
        row.rewind(int(self._rng.integers(1, len(self.twins[row].fed) + 1)))
        self.twins[row] = Alone(self._plain, self.twins[row].fed[: row.length_at_most])

    def fork(self) -> None:
        fork = self.generate_loop.fork()
        self.forks.append((fork, first_layer(fork)))
        if len(self.forks) > 2:
            self.close_fork()

    @property
    def all_loops(self) -> list[GenerateLoop]:
        return [self.generate_loop, *(fork for fork, _ in self.forks)]

    def close_fork(self) -> None:
        fork, held = self.forks.pop(0)
        assert all(map(torch.equal, first_layer(fork), held)), "others have written into its pages"
        fork.close()

    def close(self) -> None:
        while self.forks:
            self.close_fork()
        self.generate_loop.close()

    def anything(self) -> None:
        """Admit, release, extend, rewind, fork and step at random; rows that reached their promise leave."""
        for row in [row for row, left in self.left.items() if left == 0]:
            self.release(row)
        if self.left and self._rng.random() < 0.18:
            self.release(list(self.left)[self._rng.integers(len(self.left))])
        drafts = self.drafts is not None and self.has_next and self.twins and not self.waiting
        if drafts and min(self.left.values()) > 1 and self._rng.random() < 0.25:
            self.draft()
        if self.unread and self._rng.random() < 0.4:
            self.read()
        if self.twins and self._rng.random() < 0.12:
            (self.extend, self.rewind)[self._rng.integers(2)]()
            self.has_next = False
        if self._rng.random() < 0.1:
            self.fork()
        room = 9 - len(self.left)
        wanted = self._rng.choice([1, room]) if not self.left else (self._rng.random() < 0.2) * self._rng.integers(1, 4)
        for _ in range(min(room, int(wanted))):
            self.admit(int(self._rng.integers(1, 25)), int(self._rng.integers(1, 40)))
        self.step(forced=bool(self._rng.random() < 0.4))
