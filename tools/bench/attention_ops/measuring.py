"""One contender on one case: prepared, checked, timed; whatever goes wrong becomes the remark of its row."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from cold_launches import LAUNCHES, NumberedLaunch, captured, launched
from torch import Tensor

from attention_ops.cases import Case, Heads
from attention_ops.checking import TOLERANCE, deviation
from attention_ops.contenders import OpContender
from attention_ops.inputs import Inputs, Launch

LONGEST_GRAPH = 30_000.0
"""Microseconds after which a graph has enough launches: long ones have less to gain from being many."""
FEWEST = 3


class LostDeviceError(Exception):
    """A kernel has left the device unusable: nothing else can be measured in this process."""


class Measured(NamedTuple):
    """What came of one contender on one case.

    Attributes:
        us: microseconds of a launch; None if there are none.
        timed: how.
        off: as of ``deviation``; None if it was not checked.
        remark: why there is no time, or no graph.
    """

    us: float | None = None
    timed: str = ""
    off: float | None = None
    remark: str = ""

    @property
    def differs(self) -> bool:
        return self.off is not None and not self.off <= TOLERANCE


class Peaks(NamedTuple):
    """What this device does at best, measured in the same run.

    Attributes:
        bandwidth: bytes/s that it reads.
        product: FLOP/s of a matrix product.
        of: the product, in words.
    """

    bandwidth: float
    product: float
    of: str


def measure(contender: OpContender, inputs: Inputs, expected: Tensor | None) -> Measured:
    """Measure a contender; with ``expected`` compare its first result. Raises as ``measured``."""
    off = None if expected is None else lambda result: deviation(result, expected)
    return measured(lambda: contender.prepare(inputs), inputs.device, len(inputs.pages), off)


def measured(
    prepare: Callable[[], NumberedLaunch | str],
    device: torch.device,
    copies: int,
    off: Callable[[Any], float] | None = None,
) -> Measured:
    """Measure launches.

    Args:
        prepare: returns what launches once, by the launch's number, or why nothing does.
        device: that is measured.
        copies: how many launches read other memory.
        off: says how far the first result is off; None to leave that out.

    Raises:
        LostDeviceError: the device is unusable.
    """
    found = Measured()
    try:
        launch = prepare()
        if isinstance(launch, str):
            return Measured(remark=launch)
        result = launch(0)
        if off is not None:
            found = found._replace(off=off(result))
        us, timed, remark = timed_launches(launch, device, copies)
        return found._replace(us=us, timed=timed, remark=remark)
    except Exception as error:
        check_device(device)
        return found._replace(remark=reason(error))


def timed_launches(launch: NumberedLaunch, device: torch.device, copies: int) -> tuple[float, str, str]:
    """Return microseconds of a launch, how they were measured, and why not in a graph; so many read other copies."""
    if device.type != "cuda":
        return by_the_clock(launch), "by the clock", ""
    once = launched(launch, launches=1, replays=2)
    launches = max(FEWEST, min(max(LAUNCHES, copies), int(LONGEST_GRAPH / once)))
    try:
        return captured(launch, launches), f"a graph of {launches}", ""
    except Exception as error:
        check_device(device)
        return launched(launch, launches), f"{launches} by the host", f"not captured: {reason(error)}"


def by_the_clock(launch: NumberedLaunch, runs: int = 3) -> float:
    """Return the microseconds of a launch on a CPU, the best of some."""
    times = []
    for number in range(runs):
        start = time.perf_counter()
        launch(number)
        times.append(time.perf_counter() - start)
    return 1e6 * min(times)


def check_device(device: torch.device) -> None:
    """Raise ``LostDeviceError`` if the last error is one of those after which a process cannot use the device."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except Exception as error:
            raise LostDeviceError(reason(error)) from error


def reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def result_of(contender: OpContender, case: Case, heads: Heads, itemsize: int, found: Measured, peaks: Peaks) -> Any:
    """Return what a report keeps of it, a dict that goes into JSON."""
    nbytes, flops = case.nbytes(heads, itemsize), case.flops(heads)
    figures: dict[str, float] = {}
    if found.us is not None:
        per_second = 1e6 / found.us
        figures = {
            "us": found.us,
            "bytes_per_s": nbytes * per_second,
            "of_bandwidth": nbytes * per_second / peaks.bandwidth,
            "flops_per_s": flops * per_second,
            "of_product": flops * per_second / peaks.product,
        }
    return {
        "kind": case.kind,
        "case": case.name,
        "contender": contender.name,
        "heads": heads._asdict(),
        "rows": len(case.rows),
        "new_tokens": case.tokens,
        "keys": case.keys,
        "nbytes": nbytes,
        "flops": flops,
        "product": {"of": peaks.of, "flops_per_s": peaks.product},
        "timed": found.timed,
        "off": found.off,
        "differs": found.differs,
        "remark": found.remark,
        "figures": figures,
    }


def measure_peaks(bandwidth: float, device: torch.device, dtype: torch.dtype) -> Peaks:
    """Measure a matrix product as large as keeps a GPU busy, the best of some, beside the read bandwidth."""
    size = 8192 if device.type == "cuda" else 512
    random = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=random, device=device, dtype=dtype) for _ in range(2))
    work: Launch = lambda _: (torch.mm(left, right),)  # noqa: E731
    us = launched(work, launches=10) if device.type == "cuda" else by_the_clock(work)
    name = str(dtype).removeprefix("torch.")
    return Peaks(bandwidth, 2 * size**3 * 1e6 / us, f"two {name} matrices of {size} by {size}")
