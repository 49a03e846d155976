"""The shapes that decode steps and prefills are padded to and captured in."""

from __future__ import annotations

import bisect
import itertools

from compiled_llm.compilation.graphs.step_key import StepKey

# From 64 tokens on the room left for padding stays under a quarter, and from 128 on all are multiples of 64: matmuls
# compute tiles of 64 tokens.
CAPTURED_TOKENS = (
    *(16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048),
    *(2560, 3072, 3584, 4096),
)
# Weights of a layer times tokens: from this product on, an H200 takes at least twice as long to compute the layer as
# the host takes to launch its kernels.
_DEVICE_BOUND = 2**38
# Up to this product, with pairs of a query and a key, an H200 waits for the host: launches that took it 15 ms took the
# host 24 to 26.
_HOST_BOUND = 5 * 2**35
_SOME_ROWS = 32
"""Shapes of so many rows have fewer tokens than those of as many rows as there may be."""


def buckets_up_to(max_rows: int) -> list[int]:
    """Return the batch sizes that decode is captured for: 1, 2, 4, 8, every 8 to 64, every 16, ``max_rows`` itself."""
    sizes = [size for size in (1, 2, 4, *range(8, 64, 8), *range(64, max_rows, 16)) if size < max_rows]
    return [*sizes, max_rows]


def bucket_for(rows: int, max_rows: int) -> int:
    return next(size for size in buckets_up_to(max_rows) if size >= rows)


class CapturedShapes:
    """The shapes of prefills, up to the most tokens that are worth capturing."""

    # The device takes longer over more tokens than the host takes to launch them. Nor are more tokens captured than the
    # rows can have.

    def __init__(self, max_rows: int, weights: int, max_row_tokens: int, max_tokens: int, query_width: int = 0) -> None:
        """Find the shapes for numbers of rows, of weights in a layer's matrices, and of tokens in a row and a chunk.

        ``query_width`` is the size of a layer's queries, of all heads together.
        """
        most = max(2, max_rows)  # a symbolic size is at least 2
        worth = [tokens for tokens in CAPTURED_TOKENS if tokens * weights <= _DEVICE_BOUND]
        self._weights, self._query_width = weights, query_width
        # tokens that the device computes in half the time that the host takes to launch a prefill
        self.spare = _DEVICE_BOUND // (4 * max(1, weights))
        self._by_rows: dict[int, list[StepKey]] = {}
        for rows in sorted({2, min(8, most), most}):
            needed = max(rows, min(max_tokens, min(rows, max_rows) * max_row_tokens))
            counts = worth[: bisect.bisect_left(worth, needed) + 1]  # up to the first that is not less
            self._by_rows[rows] = [StepKey.prefill(count, rows) for count in counts if count >= rows]
        if most > _SOME_ROWS:  # no shape has fewer tokens than rows, and a few tokens beside some rows are frequent
            fewer = [StepKey.prefill(count, _SOME_ROWS) for count in worth if _SOME_ROWS <= count < most]
            self._by_rows = dict(sorted({**self._by_rows, _SOME_ROWS: [*fewer, *self._by_rows[most]]}.items()))

    def of(self, rows: int) -> list[StepKey]:
        """Return the shapes of prefills of ``rows`` rows, smallest first."""
        return next(shapes for most, shapes in self._by_rows.items() if most >= rows)

    def all(self) -> list[StepKey]:
        """Return the shapes of prefills of any number of rows."""
        return [*dict.fromkeys(itertools.chain.from_iterable(self._by_rows.values()))]

    def anchors(self) -> list[StepKey]:
        """Return a few shapes, the most important first, in the next larger of which any other can run."""
        # The largest holds all, but takes long: most prefills run in those of up to half as many tokens. Below that
        # each has a quarter of the next one's tokens, so that few prefills compute much more padding than tokens.
        if (largest := self.largest) is None:
            return []
        chosen: list[StepKey] = []
        for shape in reversed(self.of(largest.rows)[:-1]):
            if shape.tokens <= (chosen[-1].tokens / 4 if chosen else largest.tokens / 2):
                chosen.append(shape)
        return [*chosen[:2], largest, *chosen[2:]]

    @property
    def largest(self) -> StepKey | None:
        """The shape that holds all others; None if none is worth capturing."""
        shapes = [*self._by_rows.values()][-1]
        return shapes[-1] if shapes else None

    def cut(self, tokens: int, pairs: int) -> int | None:
        """Return how many tokens launches have at most if a prefill of more than the shapes hold is faster cut.

        ``pairs`` are its pairs of a query and a key.
        """
        # None if it is not: the device computes so many before the host has launched them, one kernel after the other.
        # What each launch costs in addition, a reading of the weights, is little beside so many tokens.
        largest = self.largest
        if largest is None or tokens <= largest.tokens:
            return None
        # A pair is a multiplication for its score and one for its value, where a weight is one.
        computed = tokens * self._weights + 2 * pairs * self._query_width
        return largest.tokens if computed <= _HOST_BOUND else None

    def smallest(self, tokens: int, rows: int) -> StepKey | None:
        """Return the smallest shape that holds a prefill of ``tokens`` tokens, or None if all are too small."""
        return next((shape for shape in self.of(rows) if shape.tokens >= tokens), None)
