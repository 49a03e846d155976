"""The profiler takes what makes it watch all threads."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import profile

from compiled_llm.compat.torch import profiler

pytestmark = pytest.mark.core


def test_profiler_takes_what_makes_it_watch_all_threads():
    with profile(experimental_config=profiler.profiling_all_threads(True)) as profiled:
        torch.zeros(3) + 1
    assert any("add" in event.name for event in profiled.events())
