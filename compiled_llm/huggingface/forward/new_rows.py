"""Calls of ``forward`` that need no pages: each row is new and without padding, and only logits are asked for.

Shapes: B rows, Q tokens of each, Q' of them with logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.huggingface.cache.cache_columns import kept_columns, on_host
from compiled_llm.huggingface.cache.paged_cache import PagedCache
from compiled_llm.huggingface.handle import CompiledModel
from compiled_llm.model.inputs import check_range


class NewRows(NamedTuple):
    """The rows of such a call.

    Attributes:
        ids: ``[B, Q]``.
        positions: ``[B, Q]``, rotary positions.
        columns: ``[Q']``, those of the tokens whose logits are wanted.
    """

    model_runner: ModelRunner
    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    columns: NDArray[np.int64]

    @classmethod
    def of(cls, runtime: CompiledModel, arguments: Mapping[str, Any]) -> NewRows | None:
        """Return the rows of a call without a ``forward_obstacle`` and without a cache; None if they need pages."""
        model_runner = runtime.runner_lifecycle.present  # whether it still fits the model has just been asked
        input_ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
        if model_runner is None or input_ids is None or not model_runner.unpaged.serves(*input_ids.shape):
            return None
        if mask is not None and not (mask.shape == input_ids.shape and on_host(mask).all()):
            return None
        ids: NDArray[np.int64] = on_host(input_ids).astype(np.int64)
        check_range(int(ids.min()), int(ids.max()), model_runner.vocabulary)
        given, new = arguments.get("position_ids"), ids.shape[1]
        positions = np.arange(new) if given is None else on_host(given)
        columns = kept_columns(arguments.get("logits_to_keep", 0), new)
        return cls(model_runner, ids, np.broadcast_to(positions, ids.shape).astype(np.int64), columns)

    def forward(self, keeps: bool) -> tuple[Tensor, PagedCache | None]:
        """Return ``[B, Q', V]`` logits in the model's dtype, and a cache of these tokens if the call ``keeps`` one."""
        rows, new = self.ids.shape
        keep = (np.arange(rows)[:, None] * new + self.columns).ravel()
        thread = self.model_runner.thread
        logits, computed = thread.call(self.model_runner.unpaged.run, self.ids, self.positions, keep)
        cache = PagedCache(self.model_runner, computed) if keeps else None
        return logits.unflatten(0, (rows, len(self.columns))), cache
