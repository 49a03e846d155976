"""Sizes of prefills: of the one that is compiled, and of the largest, for which page table and plans are allocated."""

# Shapes: B rows, T packed tokens, S page size.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.config import WrapConfig
from compiled_llm.kinds.kind import Layer

COMPILED_ROWS = 3
"""Rows that prefill is compiled with."""

# Inductor's tilings for CUDA follow from the sizes that it compiles with and from timing its kernels there, so there
# should be many tokens; but from this many results for each multiprocessor on, it loops over what is summed.
_RESULTS_THAT_LOOP = 64


class PrefillRoom(NamedTuple):
    """The size of one launch, padding included, or the largest of all."""

    tokens: int  # T
    rows: int  # B
    pages: int  # entries of the page table

    @classmethod
    def of_all(
        cls,
        layers: Sequence[Layer],
        config: WrapConfig,
        device: torch.device,
        max_row_tokens: int,
        shapes: Sequence[StepKey],
    ) -> PrefillRoom:
        """Return the room that holds every launch, captured ``shapes`` and rows of ``max_row_tokens`` included."""
        size, rows = config.page_size, config.max_batch_size
        pages, compiled = rows * _pages(max_row_tokens, size), compiled_length(layers, device, max_row_tokens, size)
        launches = [
            cls(COMPILED_ROWS * compiled, COMPILED_ROWS, COMPILED_ROWS * _pages(compiled, size)),
            # A chunk as it comes; a row of one null token joins a single row.
            cls(config.prefill_tokens + 1, max(2, rows), pages + 1),
            # A chunk and, to fill a shape, rows without tokens and one row with all tokens that are missing.
            *(cls(shape.tokens, shape.rows + 1, pages + shape.rows + _pages(shape.tokens, size)) for shape in shapes),
        ]
        return cls(*map(max, zip(*launches, strict=True)))


def _pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def compiled_length(layers: Sequence[Layer], device: torch.device, max_row_tokens: int, page_size: int) -> int:
    """Return how many tokens each row has that prefill is compiled with; a symbolic size is at least 2."""
    most = min(typical_tokens(layers, device), max_row_tokens)
    return max(2, most // COMPILED_ROWS // page_size * page_size)


def typical_tokens(layers: Sequence[Layer], device: torch.device) -> int:
    """Return how many tokens prefill is best compiled with; 0 if that makes no difference."""
    if device.type != "cuda":
        return 0
    results = _RESULTS_THAT_LOOP * torch.cuda.get_device_properties(device).multi_processor_count
    return (results - 1) // max(layer.query_heads for layer in layers)
