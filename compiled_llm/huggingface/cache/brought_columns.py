"""What the rows of a forward bring besides token ids, by column, as its inputs have it."""

# Shapes: B rows, Q columns, C hidden size.

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.execution.batch import Brought
from compiled_llm.execution.prefill.embedded import EmbeddedTokens


class BroughtColumns(Protocol):
    """What B rows bring in Q columns."""

    def select(self, row: int, columns: NDArray[np.int64]) -> Brought | None:
        """Return what a row brings in some columns, ascending; None if that is nothing."""
        ...


class EmbeddedColumns(NamedTuple):
    """Embeddings in place of ids."""

    embeddings: Tensor  # ``[B, Q, C]`` in the model's dtype

    def select(self, row: int, columns: NDArray[np.int64]) -> EmbeddedTokens:
        """Return those of a row."""
        return EmbeddedTokens(self.embeddings[row], columns)
