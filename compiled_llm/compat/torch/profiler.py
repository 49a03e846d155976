"""The profiler, over all threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.autograd import profiler

if TYPE_CHECKING:
    from torch._C._profiler import _ExperimentalConfig


def profiling_all_threads(wanted: bool) -> _ExperimentalConfig:
    """Return the option that makes ``torch.profiler.profile`` watch threads other than the one that started it."""
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(profile_all_threads=wanted)


def is_profiling() -> bool:
    """Return whether a profiler notes what runs, in this thread or in another."""
    return bool(profiler._is_profiler_enabled)
