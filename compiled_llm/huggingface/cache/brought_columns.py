"""What the rows of a forward bring besides token ids, by column, as its inputs have it."""

# Shapes: B rows, Q columns, C hidden size.

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.execution.batch import Brought
from compiled_llm.execution.prefill.embedded import EmbeddedTokens


class BroughtColumns(Protocol):
    """What B rows bring in Q columns."""

    def of(self, row: int, columns: NDArray[np.int64]) -> Brought | None:
        """Return what a row brings in some columns, ascending; None if that is nothing."""
        ...


class EmbeddedColumns(NamedTuple):
    """Embeddings in place of ids."""

    embeddings: Tensor  # ``[B, Q, C]`` in the model's dtype

    def of(self, row: int, columns: NDArray[np.int64]) -> EmbeddedTokens:
        """Return those of a row."""
        return EmbeddedTokens(taken(self.embeddings[row], 0, columns))


def taken(tensor: Tensor, dimension: int, places: NDArray[np.int64]) -> Tensor:
    """Return ``places``, ascending and at least one, of a dimension of a tensor; a view of those that follow."""
    first, count = int(places[0]), len(places)
    if int(places[-1]) - first + 1 == count:
        return tensor.narrow(dimension, first, count)
    return tensor.index_select(dimension, torch.from_numpy(places).to(tensor.device))
