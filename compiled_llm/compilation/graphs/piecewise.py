"""A CUDA graph in pieces: ops that cannot or shall not be captured are launched between two of them."""

# Each piece is a CUDA graph of its own, and all allocate from one pool. The piece before a launch writes the launch's
# arguments, and its results are copied to where the next piece reads them. The pool may give that memory to a later
# piece of the same step, as it would in one graph: pieces and launches run one after the other, on one stream.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm_ops.attention.left_out import capture_of_this_thread

_TYPE_OF_SIZE = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}


class _Between(NamedTuple):
    """A launch between two pieces, which returns results in new tensors; they are copied to ``targets``."""

    launch: Callable[[Any], Any]
    arguments: Any
    targets: Sequence[Tensor]

    def replay(self) -> None:
        results = self.launch(self.arguments)
        for target, result in zip(self.targets, _listed(results), strict=True):
            target.copy_(result)


class GraphInPieces:
    """A graph that is captured, replayed and reset like a ``torch.cuda.CUDAGraph``; ops that may be left out are."""

    def __init__(
        self,
        new_graph: Callable[[], Any] = torch.cuda.CUDAGraph,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        """``new_graph`` makes a piece; ``pause`` is called between two pieces."""
        self._pause = pause
        self._new_graph = new_graph
        self._graphs: list[Any] = []
        self._parts: list[Callable[[], None]] = []
        self._options: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    @property
    def pieces(self) -> int:
        return len(self._graphs)

    def capture_begin(self, *args: object, **kwargs: object) -> None:
        """Begin to capture on the current stream; arguments as of ``CUDAGraph.capture_begin``."""
        self._options = args, kwargs
        self._begin_piece()
        capture_of_this_thread(self)

    def capture_end(self) -> None:
        capture_of_this_thread(None)
        self._graphs[-1].capture_end()

    def leave_out(self, launch: Callable[[Any], Any], arguments: Any, allocate: Callable[[Any], Any]) -> Any:
        self._graphs[-1].capture_end()
        self._pause()
        self._begin_piece()
        results = allocate(arguments)  # by the capture, so from the pool, for as long as the step holds them
        # The pool gives the memory away once the step drops what lies there, as if a graph used it.
        where = type(arguments)(*map(unowned, arguments)), [unowned(result) for result in _listed(results)]
        self._parts.insert(-1, _Between(launch, *where).replay)
        return results

    def _begin_piece(self) -> None:
        graph, (args, kwargs) = self._new_graph(), self._options
        graph.capture_begin(*args, **kwargs)
        self._graphs.append(graph)
        self._parts.append(graph.replay)

    def replay(self) -> None:
        for replay in self._parts:
            replay()

    def reset(self) -> None:
        self._parts = []
        for graph in self._graphs:
            graph.reset()


def _listed(results: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return (results,) if isinstance(results, Tensor) else results


class _Memory:
    """Memory on a CUDA device, in the interface that libraries share."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = interface


def unowned(value: object) -> Any:
    """Return a tensor over the same memory that does not keep it; other values and host tensors as they are."""
    if not isinstance(value, Tensor) or not value.is_cuda or not value.numel():
        return value
    size = value.element_size()
    memory = _Memory(
        {
            "shape": tuple(value.shape),
            "strides": tuple(size * stride for stride in value.stride()),
            "typestr": _TYPE_OF_SIZE[size],
            "data": (value.data_ptr(), False),
            "version": 3,
            "stream": None,
        }
    )
    return torch.as_tensor(memory, device=value.device).view(value.dtype)
