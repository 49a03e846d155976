"""Some places of tensors on the device, which the host lists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.execution.state.staging import Staging


def picked(parts: Sequence[tuple[Tensor, NDArray[np.int64]]], dimension: int, staging: Staging) -> list[Tensor]:
    """Return of each tensor its places of a dimension, ascending; a view if they follow one another."""
    # All other lists are uploaded at once, from pinned memory: a copy from ordinary memory waits for the device.
    scattered = [places for _, places in parts if not _adjoin(places)]
    uploaded = iter(staging.to_device(scattered) if scattered else ())
    return [
        tensor.narrow(dimension, int(places[0]) if len(places) else 0, len(places))
        if _adjoin(places)
        else tensor.index_select(dimension, next(uploaded))
        for tensor, places in parts
    ]


def _adjoin(places: NDArray[np.int64]) -> bool:
    return not len(places) or int(places[-1] - places[0]) + 1 == len(places)
