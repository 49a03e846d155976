"""Where the time of one run of a program goes, by kind of kernel, against the bytes that it has to move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compiled_llm.explaining.profile.kernels import KINDS, KernelLaunch
from compiled_llm.explaining.profile.step_bytes import StepBytes

TOP = 25


@dataclass(frozen=True)
class Kind:
    """Kernels of one kind in one step."""

    name: str
    us: float  # their time, in microseconds
    launches: float
    nbytes: int | None  # the bytes that they have to read or write; None if these are not counted


@dataclass(frozen=True)
class Kernel:
    """One kernel in one step."""

    name: str
    us: float
    launches: float


@dataclass(frozen=True)
class Breakdown:
    """The time of one step by kinds of kernels."""

    measured: str  # ``kernels``, or on a CPU ``operators``
    step_us: float  # one step without the profiler, in microseconds: the median over the runs
    busy_us: float  # the time in a step during which any kernel ran, in microseconds
    steps: int  # how many steps were profiled
    weight_bytes: int | None  # the weights that a step reads; None where that is not known
    kv_bytes: int  # the keys and values that a step reads
    read_bandwidth: float  # bytes/s, measured in the same run
    host_us: float | None  # the host's time for the launch of a step, in microseconds; None where that was not measured
    kinds: list[Kind]
    kernels: list[Kernel]  # the kernels that took longest

    @property
    def gaps_us(self) -> float:
        """The time of a step in which no kernel ran, in microseconds."""
        return max(0.0, self.step_us - self.busy_us)

    @property
    def launches(self) -> float:
        return sum(kind.launches for kind in self.kinds)

    @property
    def of_bandwidth(self) -> float | None:
        """The bytes that a step has to read, over its time, as a share of the read bandwidth."""
        nbytes = self.nbytes
        return None if nbytes is None else self.share_of_bandwidth(nbytes, self.step_us)

    @property
    def nbytes(self) -> int | None:
        return None if self.weight_bytes is None else self.weight_bytes + self.kv_bytes

    def share_of_bandwidth(self, nbytes: int, us: float) -> float:
        return nbytes / (us * 1e-6) / self.read_bandwidth

    def figures(self) -> dict[str, float | None]:
        return {"gaps_us": self.gaps_us, "launches": self.launches, "of_bandwidth": self.of_bandwidth}

    def columns(self) -> list[str]:
        head = "launches" if self.measured == "kernels" else "calls"
        return [self.measured, head, "us", "of the step", "MB", "of the read bandwidth"]

    def rows(self) -> list[list[str]]:
        rows = [
            [kind.name, f"{kind.launches:.1f}", *self._spent(kind.us), *self._moved(kind.nbytes, kind.us)]
            for kind in self.kinds
        ]
        idle = "gaps: no kernel runs" if self.measured == "kernels" else "the rest: compiled loops, Python"
        rows.append([idle, "", *self._spent(self.gaps_us), "", ""])
        total = [f"{self.launches:.1f}", f"{self.step_us:,.1f}", "100%"]
        return [*rows, ["in all", *total, *self._moved(self.nbytes, self.step_us)]]

    def kernel_rows(self) -> list[list[str]]:
        return [[kernel.name, f"{kernel.launches:.1f}", f"{kernel.us:,.1f}"] for kernel in self.kernels]

    def _spent(self, us: float) -> list[str]:
        return [f"{us:,.1f}", f"{us / self.step_us:.1%}"]

    def _moved(self, nbytes: int | None, us: float) -> list[str]:
        if nbytes is None:
            return ["", ""]
        return [f"{nbytes / 1e6:,.1f}", f"{self.share_of_bandwidth(nbytes, us):.1%}"]


def moved_by_decode(nbytes: StepBytes, batch: int) -> dict[str, int | None]:
    """Return what a decode step of ``batch`` rows has to move, by kind of kernel, in bytes."""
    return {
        "matrix products": nbytes.weights,
        "attention": batch * nbytes.kv_per_row,
    }


def moved_by_prefill(
    nbytes: StepBytes, prepared: int, tokens: int, launches: Sequence[KernelLaunch]
) -> dict[str, int | None]:
    """Return the bytes that prefill of ``tokens`` moves, by kind of kernel; none where layers of two ways ran."""
    appends = {"page append": tokens * nbytes.kv_written, "rotary and page append": tokens * prepared}
    ran = appends.keys() & {launch.kind for launch in launches}
    return {"matrix products": nbytes.weights, **(appends if len(ran) < 2 else {})}


def kinds_of(launches: Sequence[KernelLaunch], steps: int, moved: Mapping[str, int | None]) -> list[Kind]:
    """Return time and ``moved`` bytes by kind, for one of the steps; kinds that never ran are left out."""
    kinds = []
    for kind, _ in KINDS:
        spent = [launch.us for launch in launches if launch.kind == kind]
        if spent:
            kinds.append(Kind(kind, sum(spent) / steps, len(spent) / steps, moved.get(kind)))
    return kinds


def kernels_of(launches: Sequence[KernelLaunch], steps: int) -> list[Kernel]:
    spent: dict[str, list[float]] = {}
    for launch in launches:
        spent.setdefault(launch.name, []).append(launch.us)
    longest = sorted(spent, key=lambda name: sum(spent[name]), reverse=True)[:TOP]
    return [Kernel(name[:160], sum(spent[name]) / steps, len(spent[name]) / steps) for name in longest]
