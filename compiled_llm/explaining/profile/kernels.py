"""The kernels that ran under a profiler, one by one, and what kind of work each does."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from compiled_llm.compat.torch.profiler import profiling_all_threads

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEvent


KINDS = (
    ("memory copies", r"^mem(cpy|set)"),
    ("rotary and page append", r"rope_append_paged"),
    ("page append", r"append_?paged"),
    ("attention, merge of splits", r"merge_?states?|attentionsum|splitkv_combine"),
    ("attention", r"batch(decode|prefill)with|flash|fmha|attention"),
    ("sampling", r"argmax|multinomial|top_?[kp]|sort|sampl|exponential|philox|cumsum|scan|rand"),
    ("matrix products", r"gemm|gemv|nvjet|split_?k|cutlass|xmma|cublas|(^|_|::)(add|b)?mm(_|$)|mkl|linear|dot_"),
    ("norms, rotary, elementwise", r"."),
)
"""Kinds of work and what their kernels are called, the first that fits; names are compared in lower case."""

_ANNOTATIONS = ("##", "ProfilerStep", "Torch-Compiled", "TorchDynamo", "CompiledFunction", "[pytorch|", "Pregraph")

P = TypeVar("P", bound="KernelProfiler")


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel that ran; on a CPU, one operator."""

    name: str
    kind: str  # one of ``KINDS``
    us: float  # its own time, in microseconds; so are ``start`` and ``end``
    start: float
    end: float


@dataclass(frozen=True)
class Spent:
    """What launches of one kind, or of one name, take in one step."""

    name: str
    us: float
    launches: float


def spent_by(name_of: Callable[[KernelLaunch], str], launches: Sequence[KernelLaunch], steps: int) -> list[Spent]:
    """Return what one of the steps spends on launches of each name, the longest first."""
    times: dict[str, list[float]] = {}
    for launch in launches:
        times.setdefault(name_of(launch), []).append(launch.us)
    spent = [Spent(name, sum(us) / steps, len(us) / steps) for name, us in times.items()]
    return sorted(spent, key=lambda one: one.us, reverse=True)


def kind_of(names: Iterable[str]) -> str:
    """Return the kind of a kernel by its name and those of the operators around it: in attention, all is attention."""
    whole = ("attention", "rotary and page append", "page append")
    kinds = [next(kind for kind, pattern in KINDS if re.search(pattern, name.lower())) for name in names]
    return next((kind for kind in kinds[1:] if kind in whole), kinds[0])


def busy_us(launches: Iterable[KernelLaunch]) -> float:
    """Return how long at least one of the launches ran: they may overlap."""
    busy = 0.0
    reached = float("-inf")
    for launch in sorted(launches, key=lambda launch: launch.start):
        busy += max(0.0, launch.end - max(launch.start, reached))
        reached = max(reached, launch.end)
    return busy


class KernelProfiler:
    """A recorder of kernels between ``start`` and ``stop``, on any thread; ``launches`` has them after the block."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.launches: list[KernelLaunch] = []
        self._profile: Any = None

    def __enter__(self: P) -> P:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it tells stderr each time it starts
        if self._cuda:
            # As torch does for its own CUDA graphs: with CUPTI torn down between profiles, replays can crash.
            os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
            os.environ.setdefault("TEARDOWN_CUPTI", "0")
            with self._new_profile():  # the first start takes a second
                torch.cuda.synchronize()
        return self

    def __exit__(self, *error: object) -> None:
        if self._profile is not None and error[0] is None:
            self.launches = list(self._launches())
            if not self.launches:
                raise RuntimeError("the profiler saw nothing; with KINETO_LOG_LEVEL=0 it says why")

    def start(self) -> None:
        """Begin to record, with an idle device."""
        self._synchronize()
        self._profile = self._new_profile()
        self._profile.start()

    def stop(self) -> None:
        """Stop, once everything that was launched has finished."""
        self._synchronize()
        self._profile.stop()

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.current_stream().synchronize()

    def _new_profile(self) -> profile:
        # Compiled programs may run on a thread of their own; kernels are seen from any.
        everywhere = profiling_all_threads(not self._cuda)
        activity = ProfilerActivity.CUDA if self._cuda else ProfilerActivity.CPU
        return profile(activities=[activity], experimental_config=everywhere, acc_events=True)

    def _launches(self) -> Iterator[KernelLaunch]:
        wanted = "CUDA" if self._cuda else "CPU"
        for event in self._profile.events():
            if event.device_type.name == wanted and not _is_annotation(event):
                span = event.time_range
                spent = span.elapsed_us() if self._cuda else event.self_cpu_time_total
                yield KernelLaunch(event.name, kind_of(_names(event)), float(spent), float(span.start), float(span.end))


def _names(event: FunctionEvent | None) -> Iterator[str]:
    while event is not None:
        yield event.name
        event = event.cpu_parent


def _is_annotation(event: FunctionEvent) -> bool:
    # A range that code was marked with, which encloses kernels.
    return bool(getattr(event, "is_user_annotation", False)) or event.name.startswith(_ANNOTATIONS)
