"""Calls of the model itself whose rows are new: on a CPU they need no pages, and their rows no slots."""

# A row in pages is written there, gathered again, and attended over alone. Rows that nobody goes on with save that, and
# the host's work for pages, which is most of the time of a short forward of a small model.
# Shapes: B rows, Q columns, T packed tokens, L of them whose logits are wanted, V vocabulary, K kv heads, D head
# dimension.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compilation.inputs import UnpagedInputs
from compiled_llm.compilation.program_list import UNPAGED
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.execution.steps.graph_manager import GraphManager

_COMPILED = np.ones((3, 2), dtype=np.bool_)
"""The columns that the program is compiled with, all of them shown: no two sizes are the same."""
_KEPT = np.zeros(5, dtype=np.int64)
"""Those of them whose logits are wanted."""


class KeysAndValues(NamedTuple):
    """What a forward leaves outside of pages."""

    layers: Sequence[Tensor]  # ``[2, T, K, D]`` of each layer
    shown: NDArray[np.bool_]  # ``[B, Q]`` bool, which columns hold these T tokens, row by row
    positions: NDArray[np.int64]  # ``[T]``, rotary positions

    def by_layer(self) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of each layer as HuggingFace's caches have them, ``[B, K, Q, D]``."""
        shaped = (self._in_columns(layer).unflatten(1, self.shown.shape).transpose(2, 3) for layer in self.layers)
        return [(layer[0], layer[1]) for layer in shaped]

    def _in_columns(self, layer: Tensor) -> Tensor:
        """Return ``[2, B * Q, K, D]``, zeros in columns that are not shown."""
        if self.shown.all():
            return layer
        columns = layer.new_zeros(2, self.shown.size, *layer.shape[2:])
        return columns.index_copy_(1, torch.from_numpy(np.flatnonzero(self.shown)), layer)

    def next_positions(self) -> list[int]:
        """Return the rotary position of each row's next token; 0 if it has none."""
        rows = np.split(self.positions, self.shown.sum(axis=1).cumsum()[:-1])
        return [int(positions[-1]) + 1 if len(positions) else 0 for positions in rows]


class Unpaged:
    """The forwards of one model that need no pages."""

    def __init__(self, state: RunnerState, graph_manager: GraphManager) -> None:
        self._state = state
        self._graph_manager = graph_manager
        config, device, facts = state.config, state.device, state.facts
        self._serves_model = (
            device.type == "cpu"  # on a GPU one kernel attends for all rows
            and not graph_manager.cuda_graphs.ours  # replays take no longer than what they save
            and not (config.batch_invariant or config.eager_first_on(device.type) or config.artifacts)
            and not (facts.states or state.scales or any(layer.logits_soft_cap for layer in facts.layers))
            and all(layer.kind.unpaged(layer, 1) is not None for layer in facts.layers)
        )
        self._longest = min(facts.windows, default=state.max_positions)

    def serves(self, shown: NDArray[np.bool_]) -> bool:
        """Return whether the tokens shown of rows ``[B, Q]`` can run without pages, all of them in one launch."""
        # No window reaches over a column that is not shown: none is shorter than a row.
        fits = 2 <= np.count_nonzero(shown) <= self._state.config.prefill_tokens and shown.shape[1] <= self._longest
        return bool(fits) and self._serves_model and not self._state.facts.hooks.placed

    def run(
        self,
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        shown: NDArray[np.bool_],
        keep: NDArray[np.int64],
    ) -> tuple[Tensor, KeysAndValues]:
        """Run new rows: ``[L, V]`` logits in the model's dtype, and the keys and values of all layers.

        Args:
            ids: ``[T]``, their tokens one after the other; the program reads these very arrays.
            positions: ``[T]``, rotary positions.
            shown: ``[B, Q]``, which ``serves``: the columns that hold these tokens.
            keep: ``[L]``, those of the tokens whose logits are wanted.
        """
        self._make_ready(len(shown))
        wanted = len(keep)
        if wanted < 2:  # a symbolic size is at least 2
            keep = np.concatenate([keep, np.zeros(2 - wanted, dtype=np.int64)])
        logits, layers = self._launch(ids, positions, shown, keep)
        return logits[:wanted], KeysAndValues(layers, shown, positions)

    def _make_ready(self, waiting: int) -> None:
        """Compile the program, if it is not compiled yet, for ``waiting`` rows."""
        graph_manager = self._graph_manager
        graph_manager.check_model()
        if UNPAGED in graph_manager.prefills or graph_manager.eager:
            return
        with graph_manager.preparing(UNPAGED, waiting, UNPAGED):
            zeros = np.zeros(_COMPILED.size, dtype=np.int64)
            self._launch(zeros, zeros.copy(), _COMPILED, _KEPT)
        graph_manager.prefills.add(UNPAGED)

    def _launch(
        self,
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        shown: NDArray[np.bool_],
        keep: NDArray[np.int64],
    ) -> tuple[Tensor, list[Tensor]]:
        graph_manager = self._graph_manager
        ends = np.zeros(len(shown) + 1, dtype=np.int32)
        shown.sum(axis=1).cumsum(out=ends[1:])
        packed, at, kept, begins = map(torch.from_numpy, (ids[None], positions[None], keep, ends))
        known = tuple(ends.tolist()) if graph_manager.programs.interpreted else ()
        inputs = UnpagedInputs(packed, at, kept, begins, known)
        state, shapes = self._state, [layer.kind.unpaged(layer, len(ids)) for layer in self._state.facts.layers]
        layers = [torch.empty(shape, dtype=state.dtype, device=state.device) for shape in shapes if shape is not None]
        arguments = graph_manager.arguments(inputs)._replace(pages=layers)
        with graph_manager.paged():
            return graph_manager.programs.unpaged(arguments), layers
