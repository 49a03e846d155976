"""The program that chooses tokens after a decode step, and the device tables it reads.

It is a program of its own, so that greedy decoding pays nothing for it, and so that no setting changes the graphs: one
is compiled for batch 1 and one, symbolic, for all larger batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_llm.compat import forget_when_gone, graph_count, own_copy
from compiled_llm.compile import compiled
from compiled_llm.config import WrapConfig
from compiled_llm.kv_cache import DecodeInputs, mark_static
from compiled_llm.page_table import Row
from compiled_llm.sampling import Sampling, SamplingTables, choose, upload_settings
from compiled_llm.staging import Staging

# Rows of calls that interleave (a callback calling the model again) are in the tables together.
_ROOM = 2


def _choose_next(logits: Tensor, slots: Tensor, inputs: DecodeInputs, tables: SamplingTables) -> Tensor:
    """Choose tokens and feed them to the next step; returns ``[B]`` with ``NOT_A_TOKEN`` where there is none."""
    chosen = choose(logits, slots, inputs.positions, tables)
    inputs.tokens.copy_(chosen.clamp(min=0))
    return chosen


class Sampler:
    """Settings of the sampled rows of one model, and the choosing of their tokens; on the device thread only."""

    def __init__(
        self, config: WrapConfig, vocabulary: int, staging: Staging, device: torch.device, cudagraphs: bool
    ) -> None:
        """Allocate the tables; the program is compiled at its first call for a bucket."""
        self._staging = staging
        entries = _ROOM * config.max_batch_size
        with torch.inference_mode(False):
            self.tables = SamplingTables.allocate(entries, vocabulary, device)
            self._slots = torch.zeros(config.max_batch_size, dtype=torch.int64, device=device)
        for table in self.tables:
            mark_static(table)
        self._padding = entries
        self._free = list(range(entries))
        self._buckets: dict[int, Tensor] = {}
        self._one_function, self._many_function = own_copy(_choose_next), own_copy(_choose_next)
        forget_when_gone(self, [self._one_function, self._many_function])
        options = {"triton.cudagraphs": cudagraphs}
        self._one = compiled(self._one_function, config, options)
        self._many = compiled(self._many_function, config, options)

    def admit(self, rows: Sequence[Row], settings: Sequence[Sampling]) -> None:
        """Give rows entries in the tables.

        Raises:
            RuntimeError: more rows are sampled at once, over all calls, than there are entries.
        """
        if len(rows) > len(self._free):
            raise RuntimeError(
                f"{len(rows)} more rows cannot be sampled: calls in progress take {self._padding - len(self._free)} of "
                f"{self._padding} entries; wrap with a larger max_batch_size"
            )
        for row in rows:
            row.take_slot(self._free)
        upload_settings(self.tables, [row.slot for row in rows if row.slot is not None], settings)

    def seat(self, rows: Sequence[Row], bucket: int) -> None:
        """Note whose tokens the decode buffers hold."""
        slots = np.full(bucket, self._padding, dtype=np.int64)
        slots[: len(rows)] = self._slots_of(rows)
        self._staging.upload([(slots, self._bucket(bucket))])

    def choose_first(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """Choose the tokens after a prefill; ``logits`` is ``[len(rows), V]``."""
        positions = np.array([row.position for row in rows], dtype=np.int64)
        slots, positions_there = self._staging.to_device([np.array(self._slots_of(rows)), positions])
        return choose(logits, slots, positions_there, self.tables)

    def choose_next(self, logits: Tensor, inputs: DecodeInputs) -> Tensor:
        """Choose the tokens of a whole bucket and feed them to the next step."""
        bucket = logits.shape[0]
        if bucket > 1:
            torch._dynamo.mark_dynamic(logits, 0)
        program = self._one if bucket == 1 else self._many
        chosen: Tensor = program(logits, self._bucket(bucket), inputs, self.tables)
        return chosen

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """What is compiled, by name."""
        return {"sampling, batch 1": self._one_function, "sampling, larger batches": self._many_function}

    def graph_counts(self) -> dict[str, int]:
        """Return how many graphs each program has been compiled into."""
        return {name: graph_count(function) for name, function in self.functions.items()}

    def _slots_of(self, rows: Sequence[Row]) -> list[int]:
        return [self._padding if row.slot is None else row.slot for row in rows]

    def _bucket(self, rows: int) -> Tensor:
        if rows not in self._buckets:
            slots = mark_static(self._slots[:rows])
            if rows > 1:
                torch._dynamo.mark_dynamic(slots, 0)
            self._buckets[rows] = slots
        return self._buckets[rows]
