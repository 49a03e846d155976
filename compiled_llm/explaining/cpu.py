"""The processor's name, without torch."""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from pathlib import Path


def cpu_name() -> str:
    with suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine()
