"""Whether rows that decode take part in the pass of a prefill: the weights are read once then, not twice."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_llm.execution.batch import Batch
from compiled_llm.execution.device_state import DeviceState
from compiled_llm.execution.prefill import Prefill
from compiled_llm.kvcache.row import Row

# A pass of one's own reads the weights again; in a prefill's, attention reads keys and values of single tokens more
# slowly. With this share of the weights in keys and values the pass of one's own still takes longer.
_SHARE_OF_WEIGHTS = 4


class OnePass:
    """Judges batches that prefill and decode.

    Attributes:
        most_tokens: how many the rows that decode may have together.
    """

    def __init__(self, state: DeviceState, prefill: Prefill, weight_bytes: int) -> None:
        """Remember what a pass reads.

        Args:
            state: where keys and values lie.
            prefill: runs the pass.
            weight_bytes: what all layers' weights take.
        """
        self._prefill = prefill
        pool = state.pool
        bytes_a_token = state.page_bytes / ((pool.total + 1) * pool.page_size)
        self.most_tokens = int(weight_bytes / bytes_a_token / _SHARE_OF_WEIGHTS)

    def pays_for(self, batch: Batch) -> bool:
        """Whether the rows of ``batch.decode`` should run in the same pass as ``batch.extend``."""
        if batch.tokens is not None or batch.observer is not None or _tokens_of(batch.decode) > self.most_tokens:
            return False
        queries = [1] * len(batch.decode) + [len(extension.ids) for extension in batch.extend]
        before = [row.length for row in batch.decode] + [extension.row.length for extension in batch.extend]
        return self._prefill.is_one_launch(queries, [sum(both) for both in zip(queries, before, strict=True)])


def _tokens_of(rows: Sequence[Row]) -> int:
    return sum(row.length for row in rows)
