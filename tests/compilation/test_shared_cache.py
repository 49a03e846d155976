"""Code that one process has compiled serves the others, whatever room for rows they have."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from support.compilation import start_with_rows

pytestmark = pytest.mark.core


def compiled_in_new_process(*arguments: float) -> int:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, start_with_rows.__file__, *map(str, arguments)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def test_a_second_process_with_other_room_compiles_nothing() -> None:
    new = 1e-6 * (1 + random.SystemRandom().random())  # a constant of the kernels, which no cache has
    assert compiled_in_new_process(new, 64, 1) == 2  # prefill, and decode of one row
    assert compiled_in_new_process(new, 1, 256) == 0
