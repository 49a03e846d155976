"""Asking other programs: what they print, and which version they are."""

from __future__ import annotations

import re
import subprocess


def output(*command: str) -> str:
    """Run a command and return what it prints.

    Raises:
        RuntimeError: it fails.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{command[0]} fails: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


def version_of(path: str, pattern: str = ".+") -> str:
    """Return the part of ``PATH --version`` that matches the pattern."""
    found = re.search(pattern, output(path, "--version"))
    return "of unknown version" if found is None else found[0].strip()
