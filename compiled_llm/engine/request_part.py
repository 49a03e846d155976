"""What a request asks of features that can be taken out: a loop asks all of its parts, and knows none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiled_llm.engine.loop_settings import LoopSettings
from compiled_llm.execution.batch import Extension
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.kvcache.prefix_tree import PrefixTree
from compiled_llm.kvcache.row import Row
from compiled_llm.requests.columns import SentColumn


class RequestPart(SentColumn):
    """What one request has of one feature, besides its tokens or in place of them."""

    narrows: bool = False  # whether it says, once all tokens before one were read, which may come: ``narrow`` is called

    def unseen(self, start: int) -> int | None:
        """Return the first token, from ``start`` on, that is computed with all logits; None if none is."""
        return None

    @property
    def needed(self) -> int | None:
        """The first token that has to be computed, whatever the prefix cache has of it; None if none has to."""
        return self.unseen(0)

    def runs_apart(self, start: int) -> Any:
        """Return who computes a chunk from ``start`` on in launches of its own (``RunsApart``); None for steps."""
        return None

    @property
    def prompt_ids(self) -> NDArray[np.int64] | None:
        """``[T]`` int64, its prompt as the model takes it; None if that is how the prefix cache has it, too."""
        return None

    def position_after(self, length: int) -> int | None:
        """Return the rotary position after the first ``length`` tokens of its text; None if that is ``length``."""
        return None

    def extension(self, row: Row, ids: NDArray[np.int64], is_last: bool, model_runner: ModelRunner) -> Extension | None:
        """Return a chunk of its text as steps take it; None if that is ids at the next positions.

        Called in the model's executor.
        """
        return None

    def recall(self, prefixes: PrefixTree, again: bool) -> None:
        """Take what is kept beside cached pages, before its text begins with some; ``again`` forgets all before."""

    def needs_single_tokens(self, settings: LoopSettings) -> bool:
        """Return whether no step of such a loop may sample several tokens of its request."""
        return False

    def narrow(self, allowed: NDArray[np.int32], tokens: Sequence[int]) -> None:
        """Clear the bits of tokens that must not come after these of its answer, in ``allowed`` ``[words]``."""
