"""From vectors of last tokens to embeddings, in an engine and in an API server; imports no torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from compiled_llm.requests.sampling_params import SamplingParams

POOLED = SamplingParams(max_tokens=0)
"""The settings of requests for the vector of a prompt, which has no answer."""


def embeddings_of(vectors: Sequence[array[float]], dimensions: int, normalize: bool = True) -> NDArray[np.float32]:
    """Return ``[N, dimensions]`` float32: the first numbers of each vector, then of length 1 if they ``normalize``."""
    found = np.empty((len(vectors), dimensions), dtype=np.float32)
    for place, vector in enumerate(vectors):
        found[place] = np.frombuffer(vector, dtype=np.float32)[:dimensions]
    if normalize:
        found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), np.float32(1e-12))
    return found


def check_dimensions(dimensions: int, most: int) -> None:
    """Raise ValueError if an embedding of ``most`` numbers cannot be cut to so many."""
    if isinstance(dimensions, bool) or not isinstance(dimensions, int) or not 1 <= dimensions <= most:
        raise ValueError(f"dimensions={dimensions!r}: embeddings of this model have 1 to {most}; leave it out for all")
