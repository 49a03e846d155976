"""What a step emits of the tokens that it computes, copied next to it and read with its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from compiled_llm.compilation.graphs.outputs import Emitted
from compiled_llm.engine.steps.request import InvalidRequestError, Request
from compiled_llm.engine.steps.request_emitted import RequestEmitted
from compiled_llm.execution.batch import TokenSpan
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.state.staging import Readback


class _Span(NamedTuple):
    """``size`` tokens of a request, from position ``first`` on."""

    request: Request
    emitted: RequestEmitted
    first: int
    size: int


class ArrivingEmitted(NamedTuple):
    """What one launch has emitted, on its way to the host.

    Attributes:
        spans: whose it is.
        tensors: ``[K, ...]`` each, without their numbers.
        readback: the bytes of all of them.
    """

    spans: Sequence[_Span]
    tensors: Emitted
    readback: Readback

    def hand_out(self) -> dict[Request, InvalidRequestError]:
        """Give it to requests that have not ended; return those that want what the launch has not emitted."""
        arrived, at, failed = self._unpacked(), 0, {}
        for request, emitted, first, size in self.spans:
            if lacking := emitted.wanted.keys.difference(arrived):
                failed[request] = _lacks(min(lacking, key=str))
            elif not request.done:
                emitted.append(first, {key: tensor[at : at + size] for key, tensor in arrived.items()})
            at += size
        return failed

    def _unpacked(self) -> Emitted:
        whole = torch.from_numpy(self.readback.array())
        parts = whole.split([like.nbytes for like in self.tensors.values()])
        both = zip(self.tensors.items(), parts, strict=True)
        return {key: part.view(like.dtype).view(like.shape) for (key, like), part in both}


def _lacks(key: int | str) -> InvalidRequestError:
    if isinstance(key, str):
        return InvalidRequestError(f"emitted: no traced hook emits {key!r}; leave it out")
    return InvalidRequestError(f"hidden_states: the forward of this model gives none of layer {key}; leave it out")


class EmittedReader:
    """Reads what each step of one plan emits of its requests' tokens; a ``Reader``.

    Attributes:
        hidden_states: whether one of them wants hidden states.
    """

    def __init__(self, model_runner: ModelRunner, wanting: Iterable[tuple[Request, RequestEmitted]]) -> None:
        self._model_runner = model_runner
        self._wanting = {request.running_row: (request, emitted) for request, emitted in wanting}
        self._keys = {key for _, emitted in self._wanting.values() for key in emitted.wanted.keys}
        self.hidden_states = any(isinstance(key, int) for key in self._keys)
        self._arriving: list[ArrivingEmitted] = []

    @classmethod
    def of(cls, model_runner: ModelRunner, requests: Iterable[Request]) -> EmittedReader | None:
        """Return a reader for those that want something; None if nobody does."""
        wanting = [(request, request.emitted) for request in requests if request.emitted is not None]
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

    def _chosen(self, places: NDArray[np.int64], emitted: Emitted) -> Emitted:
        """Return what is wanted at these places of the packed tokens; each begins where its dtype may, among bytes."""
        (there,) = self._model_runner.state.staging.to_device([places])
        keys = sorted(self._keys.intersection(emitted), key=lambda key: -emitted[key].itemsize)
        return {key: emitted[key].index_select(0, there) for key in keys}

    def _start(self, spans: Sequence[_Span], tensors: Emitted) -> None:
        numbers = [tensor.flatten().view(torch.uint8) for tensor in tensors.values()]
        device = self._model_runner.device
        packed = torch.cat(numbers) if numbers else torch.empty(0, dtype=torch.uint8, device=device)
        without = {key: torch.empty_like(tensor, device="meta") for key, tensor in tensors.items()}
        self._arriving.append(ArrivingEmitted(spans, without, self._model_runner.readbacks.start_once(packed)))

    def taken(self) -> list[ArrivingEmitted]:
        """Return what was read since the last call."""
        arriving, self._arriving = self._arriving, []
        return arriving
