"""What steps emit of a call's tokens, in HuggingFace's shapes: hidden states of all layers, or of chosen ones.

Shapes: B rows, Q columns of a call's new tokens, T packed tokens of a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.utils.generic import ModelOutput

from compiled_llm.compilation.graphs.outputs import Emitted
from compiled_llm.execution.batch import Tap, TokenSpan
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.execution.state.staging import Staging
from compiled_llm.huggingface.cache.cache_columns import RowUpdate
from compiled_llm.kvcache.row import Row
from compiled_llm.model.traced_hooks import TracedHooks


class WantedOutputs(NamedTuple):
    """The outputs that a call asks of its steps besides logits."""

    hidden_states: bool = False
    # hidden states, as HuggingFace counts them, from the end if negative; all if None
    numbers: Sequence[int] | None = None
    hooks: bool = False  # whether it gets what traced hooks emit

    def __bool__(self) -> bool:
        return self.hidden_states or self.hooks

    @property
    def outputs(self) -> tuple[str, ...]:
        """What steps are asked for."""
        return ("hidden_states",) if self.hidden_states else ()

    @classmethod
    def of(cls, asked: bool | int | Sequence[int] | None, hooks: TracedHooks) -> WantedOutputs:
        """Return what ``output_hidden_states`` says, and what the model's hooks emit."""
        if not asked or isinstance(asked, bool):  # HuggingFace takes 0 and an empty list for no
            return cls(bool(asked), None, bool(hooks))
        return cls(True, [asked] if isinstance(asked, int) else list(asked), bool(hooks))

    def columns(self, generate_loop: GenerateLoop, rows: Sequence[RowUpdate], first: int, new: int) -> EmittedColumns:
        """Return what collects it of a loop's rows, for their ``new`` columns from ``first``."""
        places = {
            row: RowColumns(update.kept, np.where(update.columns < first, -1, number * new + update.columns - first))
            for number, (row, update) in enumerate(zip(generate_loop.rows, rows, strict=True))
        }
        return EmittedColumns(self, generate_loop.model_runner.state.staging, places, (len(rows), new))

    def chosen(self, emitted: Emitted) -> dict[int | str, Tensor]:
        numbers = self._of(sum(isinstance(name, int) for name in emitted))
        return {name: tensor for name, tensor in emitted.items() if isinstance(name, str) or name in numbers}

    def count_of(self, layers: int) -> int:
        return len(self._of(layers)) if self.hidden_states else 0

    def _of(self, layers: int) -> Collection[int]:
        """Return the numbers that are wanted of so many hidden states."""
        if self.numbers is None:
            return range(layers)
        return {number % layers for number in self.numbers if -layers <= number < layers}


NOTHING_WANTED = WantedOutputs()


class StepEmitted(NamedTuple):
    """The outputs that a call's tokens have emitted."""

    # ``[B, Q, ...]`` each
    tensors: dict[int | str, Tensor] = {}  # noqa: RUF012  # nobody writes to it
    layers: int = 0  # how many hidden states the model has, chosen or not

    @property
    def hidden_states(self) -> tuple[Tensor | None, ...] | None:
        """Hidden states as HuggingFace gives them: None for those that are not chosen; None if there are none."""
        return tuple(self.tensors.get(number) for number in range(self.layers)) or None

    @property
    def by_name(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.tensors.items() if isinstance(name, str)}

    def put_into(self, output: ModelOutput) -> None:
        if self.hidden_states is not None:
            output["hidden_states"] = self.hidden_states
        if self.by_name:
            output["emitted"] = self.by_name

    @classmethod
    def in_output(cls, output: ModelOutput) -> StepEmitted:
        states = output.get("hidden_states") or ()
        chosen: dict[int | str, Tensor] = {number: own for number, own in enumerate(states) if own is not None}
        by_name: dict[int | str, Tensor] = output.get("emitted") or {}
        return cls({**chosen, **by_name}, len(states))

    def map(self, change: Callable[[Tensor], Tensor]) -> StepEmitted:
        return self._replace(tensors={name: change(tensor) for name, tensor in self.tensors.items()})

    @classmethod
    def joined(cls, parts: Sequence[StepEmitted]) -> StepEmitted:
        if len(parts) == 1:
            return parts[0]
        names = parts[0].tensors
        return cls({name: torch.cat([part.tensors[name] for part in parts]) for name in names}, parts[0].layers)


class RowColumns(NamedTuple):
    """The columns of a row's tokens from its ``first``, ``[n]``, counted over all rows; negative if none is theirs."""

    first: int
    columns: NDArray[np.int64]


class EmittedColumns(Tap):
    """The outputs that launches emit of a call's new tokens, of which ``left`` have not been computed yet."""

    def __init__(
        self, wanted: WantedOutputs, staging: Staging, places: dict[Row, RowColumns], shape: tuple[int, int]
    ) -> None:
        """Collect tensors ``[B, Q, ...]`` of this ``shape``; tokens of other rows are skipped."""
        self.left = sum(len(own.columns) for own in places.values())
        self.layers = 0
        self.wants = wanted.outputs
        self._wanted, self._staging, self._places, self._shape = wanted, staging, places, shape
        self._collected: dict[int | str, Tensor] = {}

    def launched(self, spans: Sequence[TokenSpan], emitted: Emitted, later: int = 0) -> None:
        """Put tokens into their columns."""
        packed, columns = self._where(spans, later)
        self.left -= len(packed)
        self.layers = sum(isinstance(name, int) for name in emitted)
        if not (emitted and (columns >= 0).any()):
            return
        read, written = self._staging.to_device([packed[columns >= 0], columns[columns >= 0]])
        for name, tensor in self._wanted.chosen(emitted).items():
            if name not in self._collected:
                self._collected[name] = tensor.new_zeros(self._shape[0] * self._shape[1], *tensor.shape[1:])
            self._collected[name].index_copy_(0, written, tensor.index_select(0, read))

    def _where(self, spans: Sequence[TokenSpan], later: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return which of the packed tokens belong to the call, and their columns."""
        packed, columns, at = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)], 0
        for row, first, size in spans:
            if (own := self._places.get(row)) is not None:
                packed.append(np.arange(at, at + size))
                start = first + later - own.first
                columns.append(own.columns[start : start + size])
            at += size
        return np.concatenate(packed), np.concatenate(columns)

    def outputs(self) -> StepEmitted:
        """Return all of it; zeros for tokens that were not computed."""
        whole = {name: tensor.view(*self._shape, *tensor.shape[1:]) for name, tensor in self._collected.items()}
        return StepEmitted(whole, self.layers)
