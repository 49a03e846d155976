"""Inductor's timing of a kernel's tilings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from compiled_llm.compat.torch.capturing import captured_into, new_graph
from compiled_llm.compat.torch.gate import tuned_alone

if TYPE_CHECKING:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner


_LAUNCHES = 20  # of one tiling in a graph, one after the other
_REPLAYS = 5  # of that graph; the fastest counts


@functools.cache
def time_kernels_in_graphs() -> None:
    """Let Inductor choose its kernels' tilings, from now on, by launches that follow each other in a CUDA graph."""
    # It times single launches, each after a copy of what the kernel overwrites, with an empty L2 cache. For kernels
    # that run for microseconds that measures mostly the copy, and not how they overlap: in one compile or another it
    # chose tilings that took three times as long as others.
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    setattr(CachingAutotuner, "bench", timed_in_a_graph(CachingAutotuner.bench))  # noqa: B010


@functools.cache
def let_inductor_time_alone() -> None:
    """Let nothing be captured, from now on, while Inductor times kernels in any way: it waits for the whole device."""
    from torch._inductor.runtime import benchmarking

    kinds = [kind for kind in vars(benchmarking).values() if isinstance(kind, type) and torch.cuda.is_available()]
    for kind in kinds:
        for name in {"benchmark_gpu", "benchmark_gpu_with_cuda_graph"} & {*vars(kind)}:
            setattr(kind, name, tuned_alone(vars(kind)[name]))


class Launcher(Protocol):
    """What launches a kernel of Triton's with one tiling."""

    n_spills: int

    def __call__(self, *args: object, **kwargs: object) -> None: ...


def timed_in_a_graph(bench: Callable[..., float]) -> Callable[..., float]:
    """Return Inductor's ``bench`` of one tiling, in milliseconds, with launches in a graph."""
    # Kernels that a user has written, and tilings that spill registers, are left to Inductor, which may refuse them.

    @functools.wraps(bench)
    def timed(self: CachingAutotuner, launcher: Launcher, *args: object, **kwargs: object) -> float:
        if self.device_props.type != "cuda" or self.custom_kernel or launcher.n_spills != 0:
            return bench(self, launcher, *args, **kwargs)
        overwritten, named = self.clone_args(*args, **kwargs)
        return tuned_alone(_milliseconds)(launcher, overwritten, named)

    return timed


def _milliseconds(launcher: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    device = torch.device("cuda", torch.cuda.current_device())
    stream, graph = torch.cuda.Stream(device), new_graph()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def launch(times: int = _LAUNCHES) -> None:
        for _ in range(times):
            launcher(*args, **kwargs, stream=stream.cuda_stream)

    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        launch(times=1)
        captured_into(graph, torch.cuda.graph_pool_handle(), device, launch)
        graph.replay()
        took: list[float] = []
        for _ in range(_REPLAYS):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            took.append(begin.elapsed_time(end) / _LAUNCHES)
    graph.reset()
    return min(took)
