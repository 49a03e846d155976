"""Draws of how long answers will be."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compiled_llm.engine.admission.state import Counts, Requests

_GOLDEN = 0.6180339887498949
"""Multiples of it lie evenly between whole numbers, however many there are."""


def drawn(requests: Requests, lengths: Counts, shift: NDArray[np.float64] | float = 0.0) -> Counts:
    """Return how many tokens each row still grows by, ``[N]`` or, for shifts ``[K, 1]``, ``[K, N]``.

    It is drawn from the ``lengths`` that are longer than the answer already is, the same one each time: a request's
    number says how far up in them, and ``shift``, between 0 and 1, how far beyond that.
    """
    place = (requests.numbers * _GOLDEN + shift) % 1.0
    shorter = np.searchsorted(lengths, requests.answered, side="right")
    longer = len(lengths) - shorter
    known = requests.exact | (longer == 0)
    if known.all():  # also if none has been seen
        return np.broadcast_to(requests.left, place.shape)
    chosen = np.minimum(shorter + (place * longer).astype(np.int64), len(lengths) - 1)
    return np.where(known, requests.left, np.minimum(lengths[chosen] - 1 - requests.answered, requests.left))
