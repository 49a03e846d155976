"""Drafts for the steps of one loop; all loops of a model share the buffers in which they are looked up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from compiled_llm.compilation.drafts import BAD_COUNTS, NEW_TOKENS, Drafter, DraftInputs
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.execution.accepted import AcceptedTokens
from compiled_llm.execution.batch import Drafting
from compiled_llm.execution.drafts import ngram
from compiled_llm.execution.drafts.costs import Costs
from compiled_llm.execution.drafts.rule import Rule
from compiled_llm.execution.drafts.texts import Texts, texts_of
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.kvcache.row import Row
from compiled_llm.model.sizes import matrix_bytes

_COMPILED = ("compiled", "capturing", "ready", "evicted", "failed")
"""States of steps for which nothing has to be compiled."""

MOST_DRAFTS = NEW_TOKENS[-1] - 1


class DraftSettings(NamedTuple):
    """How many drafts a row may have, and how many of its last tokens are looked up."""

    num_speculative_tokens: int  # 1 to ``MOST_DRAFTS``
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 1


class Drafts:
    """The drafts of one loop.

    Attributes:
        name: of the drafter, in reports and errors.
        most: how many drafts of a row may count in one step.
        rule: says how many tokens the steps of this loop feed in, and how many drafts each row may have.
    """

    def __init__(
        self,
        model_runner: ModelRunner,
        settings: DraftSettings,
        text_of: Callable[[Row], NDArray[np.int64]],
        drafter: Callable[[Texts], Drafter] = ngram.drafter_of,
        name: str = "ngram",
        rule: Rule | None = None,
        heard: Callable[[AcceptedTokens], None] = lambda accepted: None,
    ) -> None:
        """Draft by n-grams, or with another ``drafter`` of this ``name``, which is the same object each time.

        Args:
            heard: hears of each step that was read.
            text_of: returns the tokens of a row that the host knows, ``[T]`` int64, from the first that its pages hold;
                ``UNKNOWN`` stands for those that are embeddings.

        Raises:
            ValueError: there is too little memory for the texts.
        """
        texts = texts_of(model_runner)
        self.texts = texts
        self.most = settings.num_speculative_tokens
        self._text_of = text_of
        self._heard = heard
        longest = texts.longest_text  # no row has more to look up; the device counts in int32
        self._lookup = min(settings.prompt_lookup_max, longest), min(settings.prompt_lookup_min, longest)
        self.name = name
        self._runner = model_runner
        known = model_runner.decode_buffers.drafts
        if self.name not in known:
            made = drafter(texts)
            known.setdefault(
                self.name, lambda step: DraftInputs(made, texts.tokens, texts.limits, step.new_tokens_per_row)
            )
        costs = Costs(matrix_bytes(model_runner.state.facts.model), model_runner.device.type == "cuda")
        # A step that is repeated tells the device of no limit, so the next one is made anew.
        changed = model_runner.state.validity.invalidate
        self.rule = rule or Rule(self.sizes_at_once, costs, self.most, changed)
        self._drafting = {new: _Drafting(self, new) for new in NEW_TOKENS}

    @property
    def sizes(self) -> list[int]:
        """How many tokens a row may feed in: one, which is a plain step, or with drafts."""
        return [1, *(new for new in NEW_TOKENS if new == NEW_TOKENS[0] or new // 2 <= self.most)]

    def sizes_at_once(self, rows: int) -> list[int]:
        """Return those of ``sizes`` that so many rows can have without compiling, 1 and others."""
        # If there are no others, it is the largest, which is compiled when it first runs, or if calls do not wait for
        # that, once a thread has compiled it.
        runner = self._runner
        if runner.config.mode == "eager":
            return self.sizes
        entries = runner.state.step_table.entries
        alike = {key: entry.state for key, entry in list(entries.items()) if key.drafter == self.name}
        known = {key.new_tokens_per_row for key in alike if alike[key] in _COMPILED and (key.rows == 1) is (rows == 1)}
        if known:
            return [1, *(size for size in self.sizes if size in known)]
        largest = self.sizes[-1]
        return [1, largest] if self._is_there(rows, largest) else [1]

    def _is_there(self, rows: int, size: int) -> bool:
        """Whether so many rows may have a step of a size, whose program a thread compiles if calls do not wait."""
        runner = self._runner
        if not runner.config.compiles_drafts_beside_on(runner.device.type):
            return True
        step = self.key(runner.steps.step_of_several(rows, size))
        return runner.thread.call(runner.steps.compiled_beside, step)

    def drafting(self, new_tokens: int) -> Drafting:
        """Return what has a step of so many tokens a row draft, always the same one."""
        return self._drafting[new_tokens]

    def key(self, step: StepKey) -> StepKey:
        """Return the key of a step of so many rows and tokens, with drafts."""
        return step._replace(drafter=self.name)

    def enter(self, rows: Sequence[Row]) -> None:
        """Have the texts of rows there that are about to draft."""
        self.texts.enter(rows, self._text_of, [(self.rule.limit(row), *self._lookup) for row in rows])

    def read(self, accepted: AcceptedTokens) -> list[list[int]]:
        """Return the tokens of each row that count, at least one, waiting for their step, and have the rule know.

        RuntimeError if the drafter was wrong about how many tokens it has proposed.
        """
        runs = accepted.result()
        if min(runs)[0] == BAD_COUNTS:  # no token is less
            raise RuntimeError(f"drafts: {self.name} has given numbers of drafts that are below 0 or above its limit")
        self.rule.note(accepted.rows, accepted.new_tokens, accepted.offered, accepted.right)
        self._heard(accepted)
        return runs


class _Drafting:
    """Has steps draft."""

    def __init__(self, drafts: Drafts, new_tokens: int) -> None:
        self._drafts, self.drafter, self.new_tokens = drafts, drafts.name, new_tokens

    def entering(self, rows: Sequence[Row]) -> None:
        self._drafts.enter(rows)

    def read(self, accepted: AcceptedTokens) -> list[list[int]]:
        return self._drafts.read(accepted)
