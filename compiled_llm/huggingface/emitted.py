"""Hidden states that steps compute for a call's tokens, of all layers or of chosen ones, in HuggingFace's shapes."""

# Shapes: B rows, Q columns of a call's new tokens, T packed tokens of a launch.

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from compiled_llm.compilation.graphs.outputs import Emitted, StepOutputs
from compiled_llm.execution.batch import Tap, TokenSpan
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.execution.state.staging import Staging
from compiled_llm.execution.taps.emitted_steps import EmittedSteps
from compiled_llm.huggingface.cache.cache_columns import RowUpdate
from compiled_llm.huggingface.cache.more_outputs import EmittedOfSteps
from compiled_llm.huggingface.call.call import PagedCall
from compiled_llm.kvcache.row import Row
from compiled_llm.model.traced.hooks import TracedHooks

if TYPE_CHECKING:
    from compiled_llm.huggingface import emitted as this
    from compiled_llm.huggingface.cache.more_outputs import EmittedPart

    checked: EmittedPart = this


class WantedOutputs(NamedTuple):
    """The outputs that a call asks of its steps besides logits."""

    hidden_states: bool = False
    # hidden states, as HuggingFace counts them, from the end if negative; all if None
    numbers: Sequence[int] | None = None
    hooks: bool = False  # whether it gets what traced hooks emit

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs that steps have to return, besides logits."""
        return ("hidden_states",) if self.hidden_states else ()

    def steps(self, call: PagedCall) -> StepStates:
        """Return what reads each step of a call of ``generate``."""
        return StepStates(call, self)

    def column_bytes(self, model: PreTrainedModel) -> int:
        """Return what the hidden states of a token take; of what hooks emit that is known once they have run."""
        config = model.config.get_text_config(decoder=True)
        layers = len(self._of(config.num_hidden_layers + 1)) if self.hidden_states else 0
        return layers * int(config.hidden_size) * model.dtype.itemsize

    @classmethod
    def of(cls, asked: bool | int | Sequence[int] | None, hooks: TracedHooks) -> WantedOutputs:
        """Return what ``output_hidden_states`` says, and what the model's hooks emit."""
        if not asked or isinstance(asked, bool):  # HuggingFace takes 0 and an empty list for no
            return cls(bool(asked), None, bool(hooks))
        return cls(True, [asked] if isinstance(asked, int) else list(asked), bool(hooks))

    @contextmanager
    def reading(
        self, generate_loop: GenerateLoop, rows: Sequence[RowUpdate], first: int, new: int
    ) -> Iterator[Callable[[], StepEmitted]]:
        """Collect what the rows' ``new`` columns from ``first`` emit in the block; yields what returns it."""
        places = {
            row: RowColumns(update.kept, np.where(update.columns < first, -1, number * new + update.columns - first))
            for number, (row, update) in enumerate(zip(generate_loop.rows, rows, strict=True))
        }
        columns = EmittedColumns(self, generate_loop.model_runner.state.staging, places, (len(rows), new))
        with generate_loop.watched([columns]):
            yield columns.outputs

    def chosen(self, emitted: Emitted) -> dict[int | str, Tensor]:
        numbers = self._of(sum(isinstance(name, int) for name in emitted))
        return {name: tensor for name, tensor in emitted.items() if isinstance(name, str) or name in numbers}

    def _of(self, layers: int) -> Collection[int]:
        """Return the numbers that are wanted of so many hidden states."""
        if self.numbers is None:
            return range(layers)
        return {number % layers for number in self.numbers if -layers <= number < layers}


class StepEmitted(NamedTuple):
    """The outputs that a call's tokens have emitted."""

    # ``[B, Q, ...]`` each
    tensors: dict[int | str, Tensor] = {}  # noqa: RUF012  # never written to
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
    def in_output(cls, output: Mapping[str, Any]) -> StepEmitted:
        states = output.get("hidden_states") or ()
        chosen: dict[int | str, Tensor] = {number: own for number, own in enumerate(states) if own is not None}
        by_name: dict[int | str, Tensor] = output.get("emitted") or {}
        return cls({**chosen, **by_name}, len(states))

    def map(self, change: Callable[[Tensor], Tensor]) -> StepEmitted:
        return self._replace(tensors={name: change(tensor) for name, tensor in self.tensors.items()})

    @classmethod
    def joined(cls, parts: Sequence[StepEmitted]) -> StepEmitted:
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
        self._wanted = wanted
        self._staging = staging
        self._places = places
        self._shape = shape
        self._collected: dict[int | str, Tensor] = {}

    def launched(self, spans: Sequence[TokenSpan], outputs: StepOutputs, later: int = 0) -> None:
        """Put tokens into their columns."""
        emitted = outputs.emitted
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
        packed = [np.zeros(0, dtype=np.int64)]
        columns = [np.zeros(0, dtype=np.int64)]
        at = 0
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


class StepStates(EmittedOfSteps):
    """A reader of what each step emits: of the prompts together, and then of one token a row."""

    def __init__(self, call: PagedCall, wanted: WantedOutputs) -> None:
        self._call = call
        self._wanted = wanted
        self._first = 0
        self.wants = wanted.outputs
        self._rows: list[Row] = []
        self._prompts: EmittedColumns | None = None
        self._shared: list[tuple[int, int]] = []  # of each row the one that it begins as, and with how many tokens
        self._steps: EmittedSteps | None = None

    def begin(self, rows: Sequence[Row], new: Sequence[int]) -> None:
        """Note the rows of the call, and of each how many of its last tokens are computed: others have the rest."""
        call = self._call
        self._first = first = call.cache.seen
        width = call.last - first
        self._rows = list(rows)
        places: dict[Row, RowColumns] = {}
        for number, (row, update, count) in enumerate(zip(rows, call.updates, new, strict=True)):
            columns = np.where(update.columns < first, -1, number * width + update.columns - first)
            shared = len(columns) - count
            places[row] = RowColumns(update.kept + shared, columns[shared:])
            self._shared.append((call.leaders[number], shared))
        staging = call.model_runner.state.staging
        self._prompts = EmittedColumns(self._wanted, staging, places, (len(rows), width))

    def launched(self, spans: Sequence[TokenSpan], outputs: StepOutputs, later: int = 0) -> None:
        """Keep a copy."""
        assert self._prompts is not None, "the call has begun"
        if self._prompts.left:
            self._prompts.launched(spans, outputs)
            return
        if not later:
            assert [span.row for span in spans[: len(self._rows)]] == self._rows, "a step is of all rows"
        if self._steps is None:
            self._steps = EmittedSteps([slice(len(self._rows))], self._wanted.chosen(outputs.emitted).keys())
        self._steps.append(outputs.emitted)

    def outputs(self, steps: int) -> dict[str, Any]:
        """Return the fields of ``generate``'s output for the first steps."""
        emitted = self.read_steps(steps)
        fields = dict[str, Any]()
        if self.wants:
            fields["hidden_states"] = tuple(step.hidden_states for step in emitted)
        if names := emitted[0].by_name if emitted else ():
            fields["emitted"] = {name: tuple(step.by_name[name] for step in emitted) for name in names}
        return fields

    def read_steps(self, steps: int) -> list[StepEmitted]:
        """Return what first steps emitted, ``[B, Q, ...]`` of the prompts (zeros if masked), then ``[B, 1, ...]``."""
        assert self._prompts is not None, "the call has begun"
        if self._call.outputs is not None:  # by a forward of their own, or else in steps
            prompts = StepEmitted.in_output(self._call.outputs)
        else:
            prompts = self._prompts.outputs().map(self._with_shared)
        later = [] if self._steps is None else self._steps.by_step()
        return [prompts, *(StepEmitted(step, prompts.layers) for step in later)][:steps]

    def _with_shared(self, tensor: Tensor) -> Tensor:
        """Return prompts' tensors with the beginnings that were computed for another row."""
        for number, (leads, shared) in enumerate(self._shared):
            if shared:
                own, other = (self._call.updates[row].columns[:shared] - self._first for row in (number, leads))
                tensor[number, own] = tensor[leads, other]
        return tensor


wanted = WantedOutputs.of
