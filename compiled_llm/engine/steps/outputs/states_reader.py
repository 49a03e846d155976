"""Hidden states of the tokens that a step computes, copied next to it and read with its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compilation.graphs.outputs import Emitted
from compiled_llm.engine.steps.hidden_states import HiddenStates
from compiled_llm.engine.steps.request import InvalidRequestError, Request
from compiled_llm.execution.batch import TokenSpan
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.state.staging import Readback


class _Span(NamedTuple):
    """``size`` tokens of a request, from position ``first`` on."""

    request: Request
    states: HiddenStates
    first: int
    size: int


class ArrivingStates(NamedTuple):
    """Hidden states of one launch on their way to the host.

    Attributes:
        spans: whose they are.
        layers: ``[K, hidden]`` of each layer, without its numbers.
        readback: the bytes of all layers.
    """

    spans: Sequence[_Span]
    layers: Mapping[int, Tensor]
    readback: Readback

    def hand_out(self) -> dict[Request, InvalidRequestError]:
        """Give them to requests that have not ended; return those that want layers which the model does not give."""
        emitted, at, failed = self._unpacked(), 0, {}
        for request, states, first, size in self.spans:
            if lacking := sorted(set(states.layers.numbers.values()) - set(emitted)):
                failed[request] = InvalidRequestError(
                    f"hidden_states: the forward of this model gives none of layer {lacking[0]}; leave it out"
                )
            elif not request.done:
                states.append(first, {number: layer[at : at + size] for number, layer in emitted.items()})
            at += size
        return failed

    def _unpacked(self) -> dict[int, Tensor]:
        whole = torch.from_numpy(self.readback.array())
        parts = whole.split([like.nbytes for like in self.layers.values()])
        both = zip(self.layers.items(), parts, strict=True)
        return {number: part.view(like.dtype).view(like.shape) for (number, like), part in both}


class StatesReader:
    """Reads the hidden states of one plan's requests in each of its steps; a ``Reader``."""

    hidden_states = True

    def __init__(self, model_runner: ModelRunner, wanting: Iterable[tuple[Request, HiddenStates]]) -> None:
        self._model_runner = model_runner
        self._wanting = {request.running_row: (request, states) for request, states in wanting}
        self._numbers = {number for _, states in self._wanting.values() for number in states.layers.numbers.values()}
        self._arriving: list[ArrivingStates] = []

    @classmethod
    def of(cls, model_runner: ModelRunner, requests: Iterable[Request]) -> StatesReader | None:
        """Return a reader for those that want some; None if nobody does."""
        wanting = [(request, request.hidden_states) for request in requests if request.hidden_states is not None]
        return cls(model_runner, wanting) if wanting else None

    def read(self, spans: Sequence[TokenSpan], emitted: Emitted) -> None:
        """Start copying what is wanted of a launch; see ``Reader``."""
        found: list[_Span] = []
        places: list[NDArray[np.int64]] = []
        at = 0
        for row, first, size in spans:
            if row in self._wanting:
                found.append(_Span(*self._wanting[row], first, size))
                places.append(np.arange(at, at + size))
            at += size
        if found:
            self._start(found, self._chosen(np.concatenate(places), emitted))

    def _chosen(self, places: NDArray[np.int64], emitted: Emitted) -> dict[int, Tensor]:
        """Return the wanted layers at these places of the packed tokens."""
        (there,) = self._model_runner.state.staging.to_device([places])
        return {number: emitted[number].index_select(0, there) for number in self._numbers if number in emitted}

    def _start(self, spans: Sequence[_Span], layers: Mapping[int, Tensor]) -> None:
        numbers = [layer.flatten().view(torch.uint8) for layer in layers.values()]
        device = self._model_runner.device
        packed = torch.cat(numbers) if numbers else torch.empty(0, dtype=torch.uint8, device=device)
        without = {number: torch.empty_like(layer, device="meta") for number, layer in layers.items()}
        self._arriving.append(ArrivingStates(spans, without, self._model_runner.readbacks.start_once(packed)))

    def taken(self) -> list[ArrivingStates]:
        """Return what was read since the last call."""
        arriving, self._arriving = self._arriving, []
        return arriving
