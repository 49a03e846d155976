"""Steps of which a test says how many drafts count, each row beside its twin in HuggingFace's forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_llm.compilation.drafts import NEW_TOKENS
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.execution.accepted import AcceptedTokens
from compiled_llm.execution.batch import Batch, Drafting
from compiled_llm.execution.drafts.part import Drafts, DraftSettings
from compiled_llm.execution.drafts.texts import Texts
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.kvcache.row import Row
from support.execution.alone import Alone
from support.execution.drafters import Turning

MOST = NEW_TOKENS[-1] - 1


class Scripted(NamedTuple):
    """A drafter that proposes what stands there for a row's slot."""

    tokens: Tensor  # ``[X, MOST]`` int64

    def propose(self, slots: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return self.tokens[slots, :k], torch.full_like(lengths, k)


class Launched(NamedTuple):
    """A step that was launched, and what each row will have got by it."""

    accepted: AcceptedTokens
    expected: dict[Row, list[int]]

    def check(self) -> None:
        """Read the step."""
        runs = dict(zip(self.accepted.rows, self.accepted.result(), strict=True))
        assert runs == self.expected


class ScriptedDrafts:
    """The drafts of one loop; those of all loops of a model stand in one place."""

    def __init__(self, loop: GenerateLoop) -> None:
        self._loop = loop
        settings, nothing = DraftSettings(MOST), np.zeros(0, dtype=np.int64)
        self._drafts = Drafts(loop.model_runner, settings, lambda row: nothing, _made, "scripted", Turning([1]))
        key = self._drafts.key(StepKey.decode(1, NEW_TOKENS[0]))
        self.drafter: Scripted = loop.model_runner.decode_buffers.drafts[key.drafter](key).drafter
        self._script: dict[Row, Tensor] = {}
        self._drafting = {new: _Drafting(self, self._drafts.drafting(new)) for new in NEW_TOKENS}

    def launch(self, new: int, counts: Sequence[int], twins: Sequence[Alone]) -> Launched:
        """Launch a step of ``new`` tokens a row, of which ``counts`` count; the rows' twins go on by as many."""
        rows = list(self._loop.rows)
        expected: dict[Row, list[int]] = {row: [] for row in rows}
        for row, twin, count in zip(rows, twins, counts, strict=True):
            for _ in range(count):
                twin.feed([twin.next])
                expected[row].append(twin.next)
            self._script[row] = torch.tensor([*expected[row][:-1], *[twin.next ^ 1] * MOST][:MOST])
        self._write([row for row in rows if row.slot is not None])
        batch = Batch(decode=rows, promise=self._loop.promise, drafting=self._drafting[new])
        self._loop.launch(batch)
        accepted = self._loop._pipeline.unread.pop().accepted  # the test reads it in any order, or nobody does
        assert accepted is not None
        return Launched(accepted, expected)

    def enter(self, rows: Sequence[Row]) -> None:
        """Have drafts of rows there that have slots by now."""
        self._drafts.enter(rows)
        self._write(rows)

    def _write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.drafter.tokens[row.slot] = self._script[row].to(self.drafter.tokens.device)


def _made(texts: Texts) -> Scripted:
    return Scripted(torch.zeros(len(texts.limits), MOST, dtype=torch.int64, device=texts.limits.device))


class _Drafting:
    def __init__(self, drafts: ScriptedDrafts, own: Drafting) -> None:
        self.read = own.read
        self._drafts, self.drafter, self.new_tokens = drafts, own.drafter, own.new_tokens

    def entering(self, rows: Sequence[Row]) -> None:
        self._drafts.enter(rows)
