"""Code that one process has compiled serves the others, whatever room for rows they have."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from support.compilation import start_with_rows

pytestmark = pytest.mark.core


def compiled_in_new_processes(epsilon: float, *rooms: tuple[int, int]) -> list[int]:
    """What each of several processes, one after the other, had to compile."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    sizes = [str(size) for room in rooms for size in room]
    command = [sys.executable, start_with_rows.__file__, str(epsilon), *sizes]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return [int(line) for line in done.stdout.splitlines()[-len(rooms) :]]


@pytest.mark.whole
def test_a_second_process_with_other_room_compiles_nothing() -> None:
    new = 1e-6 * (1 + random.SystemRandom().random())  # a constant of the kernels, which no cache has
    # Prefill, and decode of one row.
    assert compiled_in_new_processes(new, (64, 1), (1, 256)) == [2, 0]
