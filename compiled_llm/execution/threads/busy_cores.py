"""Whether other work wants the cores on which PyTorch's threads wait for each other; needs no torch."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("compiled_llm")

SPINS = "10000"
"""A ``GOMP_SPINCOUNT``, of GNU's OpenMP, that costs nothing on a quiet machine: docs/how-to/cpu.md has measurements."""
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""The variables that say how a thread of OpenMP waits; by default it spins, on a core that the awaited may need."""
_said = False


def other_work() -> str | None:
    """Return, in words, that other work wants more cores than there are; None if not, or with one thread alone."""
    if os.environ.get("OMP_NUM_THREADS") == "1":
        return None
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    return f"{load:.1f} jobs share {cores} cores, and threads wait for each other" if load > cores else None


def warn_of_spinning(threads: int) -> None:
    """Log, once in a process, that so many threads are slow beside other work, unless it is set how they wait."""
    global _said
    if _said or threads == 1 or any(name in os.environ for name in WAITING) or (busy := other_work()) is None:
        return
    _said = True
    logger.warning(
        "compiled_llm: %s; they spin, so answers may take many times as long: start Python with OMP_NUM_THREADS=1, or "
        "with GOMP_SPINCOUNT=%s",
        *(busy, SPINS),
    )
