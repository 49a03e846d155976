"""Errors after which the device runs nothing more in this process: CUDA says so, and only a new process helps."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from compiled_llm.engine.steps.loop import Loop

_LOST = re.compile(
    "an illegal memory access was encountered|device-side assert triggered|unspecified launch failure|"
    "misaligned address|an illegal instruction was encountered|invalid program counter|hardware stack error|"
    "operation not supported on global/shared address space|the launch timed out and was terminated|"
    "uncorrectable (?:ECC|NVLink) error",
    re.IGNORECASE,
)
"""Of which CUDA's documentation says that the process must be relaunched. Triton and FlashInfer say it, too."""
_HARMLESS = re.compile("captur|invalid argument|invalid configuration|too many resources", re.IGNORECASE)
"""Errors of a launch after which the next one may succeed."""


class DeviceLostError(RuntimeError):
    """The device runs nothing more in this process."""


def restarted(loop: Loop, error: BaseException) -> DeviceLostError | None:
    """Restart a loop after a step that failed of ``error``; return why if it cannot, and stop it."""
    lost = device_lost(error)
    try:
        if lost is None:
            loop.restart()
    except Exception as another:
        lost = device_lost(another) or _lost_by(another, f"{type(another).__name__} after {type(error).__name__}")
    loop.stuck = loop.stuck or lost is not None
    return lost


def device_lost(error: BaseException) -> DeviceLostError | None:
    """Return the error to report if nothing runs on the device after ``error``."""
    # Memory that the allocator lacks (``torch.OutOfMemoryError``) is not such an error: others may give it back.
    for each in _chain(error):
        if isinstance(each, DeviceLostError):
            return each
        if (what := _what(each)) is not None:
            return _lost_by(error, what)
    return None


def _what(error: BaseException) -> str | None:
    said = str(error)
    if "cuda" in said.lower() and (found := _LOST.search(said)) is not None:
        return found[0]
    if isinstance(error, torch.AcceleratorError) and not _HARMLESS.search(said):
        return said.partition("\n")[0]  # advice follows
    return None


def _lost_by(error: BaseException, what: str) -> DeviceLostError:
    lost = DeviceLostError(
        f"the device has failed ({what}), and nothing more runs on it in this process; start the process again"
    )
    lost.__cause__ = error
    return lost


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
