"""Graphs in pieces on a CPU: a stand-in for CUDA graphs notes every operation, and a replay does the same ones again.

Like a CUDA graph, it reads and writes the tensors that there were, whatever they hold by then. Unlike one, it computes
while it is captured, what follows from attention that is left out being garbage; what that has written is put back.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compiled_llm.compilation import programs
from compiled_llm.compilation.graphs.cuda_graphs import CudaGraphs
from compiled_llm.compilation.graphs.piecewise import GraphInPieces
from compiled_llm.compilation.graphs.step_table import Cost
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture


class _Done(NamedTuple):
    operation: Callable[..., Any]
    args: Any
    kwargs: Any
    results: list[Tensor]


class _Noting(TorchDispatchMode):
    """Writes down what is done, on whichever tape is captured to."""

    tape: Tape | None = None

    def __init__(self) -> None:
        super().__init__()
        self._written: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tape, kwargs = self.tape, kwargs or {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._written += [(tensor, tensor.clone()) for tensor in _tensors(value)]
        results = func(*args, **kwargs)
        if tape is not None and tape is self.tape:  # else it was left out, and another tape begun
            tape.done.append(_Done(func, args, kwargs, _tensors(results)))
        return results

    def put_back(self) -> None:
        """Let nothing have been written."""
        while self._written:
            tensor, before = self._written.pop()
            tensor.copy_(before)


_noting = _Noting()


def _tensors(results: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]


class Tape:
    """What stands in for one CUDA graph."""

    def __init__(self) -> None:
        self.done: list[_Done] = []

    def capture_begin(self) -> None:
        _noting.tape = self

    def capture_end(self) -> None:
        assert _noting.tape is self
        _noting.tape = None

    def replay(self) -> None:
        for operation, args, kwargs, results in self.done:
            for result, value in zip(results, _tensors(operation(*args, **kwargs)), strict=True):
                if result.data_ptr() != value.data_ptr():
                    result.copy_(value)

    def reset(self) -> None:
        self.done = []


def captured(launch: Callable[[], Any]) -> tuple[GraphInPieces, Any]:
    """Capture what is launched, in pieces."""
    graph = GraphInPieces(Tape)
    with _noting:
        graph.capture_begin()
        try:
            outputs = launch()
        finally:
            graph.capture_end()
    _noting.put_back()
    return graph, outputs


class CapturedPieces:
    def __init__(self, graph: GraphInPieces, outputs: Any) -> None:
        self.cost = Cost(nbytes=1000, shared=10, seconds=0.5)
        self.graph, self.outputs = graph, outputs

    def launch(self) -> None:
        self.graph.replay()

    def release(self) -> None:
        self.graph.reset()


class PieceRecorder:
    """What stands in for a capturer."""

    def take_new_pool(self) -> None:
        pass

    def capture(self, launch: Callable[[], Any]) -> CapturedPieces:
        return CapturedPieces(*captured(launch))

    def begin(self, launch: Callable[[], Any], check: Callable[[], None]) -> Future[CapturedPieces]:
        check()
        begun: Future[CapturedPieces] = Future()
        begun.set_result(self.capture(launch))
        return begun

    def run_slices(self, ended: Callable[[], bool]) -> None:
        pass

    def finish(self) -> None:
        pass


def let_a_cpu_capture_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU capture as CUDA does in mode "piecewise", programs as they are: only operations are noted."""
    let_a_cpu_capture(monkeypatch)
    own = CudaGraphs.__init__

    def init(self: CudaGraphs, *args: Any) -> None:
        own(self, *args)
        self._capturer = PieceRecorder()
        self._compiled = False

    monkeypatch.setattr(CudaGraphs, "__init__", init)
    monkeypatch.setattr(programs, "compiled", lambda program, function, *more: function)
    monkeypatch.setattr(programs.Programs, "outlines_layers", False)
