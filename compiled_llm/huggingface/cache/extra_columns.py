"""The extra inputs of a forward's rows, besides token ids, by column."""

# Shapes: B rows, Q columns, C hidden size.

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.execution.batch import ExtraInputs
from compiled_llm.execution.prefill.embedded import EmbeddedTokens


class ExtraColumns(Protocol):
    """The extra inputs of B rows in Q columns."""

    def select(self, row: int, columns: NDArray[np.int64]) -> ExtraInputs | None:
        """Return those of a row in some columns, ascending; None if it has none there."""
        ...


class EmbeddedColumns(NamedTuple):
    """Embeddings in place of ids."""

    embeddings: Tensor  # ``[B, Q, C]`` in the model's dtype

    def select(self, row: int, columns: NDArray[np.int64]) -> EmbeddedTokens:
        """Return those of a row."""
        return EmbeddedTokens(self.embeddings[row], columns)
