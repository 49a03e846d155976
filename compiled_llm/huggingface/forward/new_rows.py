"""Calls of ``forward`` that need no pages: each row is new, and only logits are asked for."""

# Shapes: B rows, Q columns, Q' of them whose logits are wanted, T packed tokens, V vocabulary.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.huggingface.cache.cache_columns import kept_columns, on_host
from compiled_llm.huggingface.cache.paged_cache import PagedCache
from compiled_llm.huggingface.handle import CompiledModel
from compiled_llm.model.inputs import check_range


class NewRows(NamedTuple):
    """The rows of such a call."""

    model_runner: ModelRunner
    ids: NDArray[np.int64]  # ``[T]``, those that the mask shows, row by row; nothing is computed for the others
    positions: NDArray[np.int64]  # ``[T]``, rotary positions
    shown: NDArray[np.bool_]  # ``[B, Q]`` bool, where they are
    columns: NDArray[np.int64]  # ``[Q']``, those whose logits are wanted

    @classmethod
    def of(cls, runtime: CompiledModel, arguments: Mapping[str, Any]) -> NewRows | None:
        """Return the rows of a call without a ``forward_obstacle`` and without a cache; None if they need pages."""
        model_runner = runtime.runner_lifecycle.present  # whether it still fits the model has just been asked
        input_ids = arguments.get("input_ids")
        mask = arguments.get("attention_mask")
        if model_runner is None or input_ids is None or not (mask is None or mask.shape == input_ids.shape):
            return None
        ids: NDArray[np.int64] = on_host(input_ids).astype(np.int64, copy=False)
        shown = np.ones(ids.shape, dtype=np.bool_) if mask is None else on_host(mask) != 0
        if not model_runner.unpaged.serves(shown):
            return None
        check_range(int(ids.min()), int(ids.max()), model_runner.vocabulary)
        columns = kept_columns(arguments.get("logits_to_keep", 0), ids.shape[1])
        if (given := arguments.get("position_ids")) is not None:
            positions = np.broadcast_to(on_host(given), ids.shape)[shown].astype(np.int64, copy=False)
        elif runtime.facts.default_positions == "unmasked":
            positions = shown.cumsum(axis=1)[shown] - 1
        else:
            positions = np.flatnonzero(shown) % ids.shape[1]
        return cls(model_runner, ids[shown], positions, shown, columns)

    def forward(self, keeps: bool) -> tuple[Tensor, PagedCache | None]:
        """Return ``[B, Q', V]`` logits in the model's dtype, zeros if hidden, and a cache if it ``keeps`` one."""
        places = self.shown.cumsum().reshape(self.shown.shape)[:, self.columns] - 1
        wanted = self.shown[:, self.columns]
        keep = places[wanted]
        thread = self.model_runner.thread
        unpaged = self.model_runner.unpaged
        logits, computed = thread.call(unpaged.run, self.ids, self.positions, self.shown, keep)
        if len(keep) < wanted.size:
            packed = logits
            logits = logits.new_zeros(wanted.size, logits.shape[-1])
            logits.index_copy_(0, torch.from_numpy(np.flatnonzero(wanted)), packed)
        cache = PagedCache(self.model_runner, computed) if keeps else None
        return logits.view(*wanted.shape, logits.shape[-1]), cache
