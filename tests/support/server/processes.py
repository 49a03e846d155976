"""What Linux says of other processes: their children, and what they hold."""

from __future__ import annotations

import os
from pathlib import Path


def children(pid: int) -> list[int]:
    """The children of all threads of a process."""
    listed = (file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children"))
    return sorted(int(number) for numbers in listed for number in numbers)


def files_of(pid: int) -> list[str]:
    """What its open files are."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except FileNotFoundError:  # it was closed meanwhile
            continue
    return sorted(found)


def threads_of(pid: int) -> int:
    """How many threads it has."""
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def memory_of(pid: int, peak: bool = False) -> int:
    """How many bytes it has in memory, or had at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM" if peak else "VmRSS"))
    return 1024 * int(line.split()[1])


def forget_peak(pid: int) -> None:
    """Count the most that it has in memory from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
