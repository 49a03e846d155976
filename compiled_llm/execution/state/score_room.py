"""How much memory indexers take to choose tokens, and how large launches may be so that it stays at that."""

# Shapes: B rows, T packed tokens, S page size.

from __future__ import annotations

from typing import NamedTuple

from compiled_llm.config import WrapConfig
from compiled_llm.execution.state.prefill_room import COMPILED_ROWS
from compiled_llm.kinds.kind import ScoreSizes

SHARE = 8
"""Prefills may take this part of what the pages take, if decode steps do not take more anyway."""


class ScoreRoom(NamedTuple):
    """The most that scores take while a step runs: what the largest decode step takes, or a share of the pages."""

    scores: ScoreSizes  # what they take by the sizes of a launch
    page_size: int  # S
    row_pages: int  # pages that a decode step scores for each row
    limit: int  # bytes

    @classmethod
    def of(
        cls, scores: ScoreSizes, config: WrapConfig, max_row_tokens: int, compiled: int, pages: int, nbytes: int
    ) -> ScoreRoom:
        """Return the room beside a pool of ``pages``, with the null page, that takes ``nbytes``."""
        # ``compiled`` is how many tokens each row of the compiled prefill has.
        size = config.page_size
        longest = min(-(-max_row_tokens // size), pages)
        room = cls(scores, size, longest, 0)
        least = (
            room.of_decode(config.max_batch_size),
            room.of_prefill(2, longest + 1),  # one token, beside a row of one null token
            room.of_prefill(COMPILED_ROWS * compiled, COMPILED_ROWS * -(-compiled // size)),
        )
        return room._replace(limit=max(*least, nbytes // SHARE))

    def of_decode(self, rows: int, new_tokens: int = 1) -> int:
        """Return the bytes of a decode step; with several new tokens, keys are copied for each of a row."""
        tokens = rows * new_tokens
        return self.scores.nbytes(tokens, self.scores.keys(self.row_pages, self.page_size), tokens)

    def of_prefill(self, tokens: int, pages: int) -> int:
        """Return the bytes of a prefill of T tokens, whose rows have so many pages together."""
        return self.scores.nbytes(tokens, self.scores.keys(pages, self.page_size))

    def check_pool(self, pages: int) -> None:
        """Raise ValueError if a pool of so many pages holds less than a query reads of blocks."""
        tokens = pages * self.page_size
        if self.scores.of_one_row and tokens < self.scores.chosen:
            raise ValueError(
                f"kv_memory: {pages} pages hold {tokens} tokens, and a query reads {self.scores.chosen} in blocks of "
                f"{self.scores.block_size}; give room for that many"
            )

    def holds(self, tokens: int, pages: int, rows: int) -> bool:
        """Whether a prefill may be launched, beside a row of one null token."""
        if self.scores.of_one_row and rows > 1:
            return False
        return self.of_prefill(tokens + 1, pages + 1) <= self.limit
