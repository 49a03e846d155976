"""Random schedules of threads: whatever meets, calls end, tokens are right, and nothing is left.

For an hour, each schedule with its seed printed, and one of them again:

    pytest tests/engine/test_random_threads.py --fuzz-seconds 3600 --fuzz-seed 1000 -s
    pytest tests/engine/test_random_threads.py --fuzz-cases 1 --fuzz-seed 1007 -s
"""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest
from transformers.utils.logging import disable_progress_bar

from compiled_llm.engine.steps.loop import Loop
from compiled_llm.execution.generate_loop import GenerateLoop
from support.engine.thread_search import Expected, Schedule

pytestmark = pytest.mark.usefixtures("one_thread")


# Python drops a Ctrl-C that arrives while it calls a finalizer or a weak reference's callback, and prints that.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_schedules_end_and_leave_nothing(tmp_path_factory, pytestconfig, monkeypatch, seed):
    expected, done = Expected(tmp_path_factory.mktemp("weights")), Counter[str]()
    first, cases = pytestconfig.getoption("fuzz_seed"), pytestconfig.getoption("fuzz_cases")
    seconds = pytestconfig.getoption("fuzz_seconds")
    disable_progress_bar()
    short = cases is None and not seconds
    over = time.monotonic() + seconds
    for count in itertools.count():
        if count >= (cases or 1) and time.monotonic() >= over:
            break
        number = (1000 * seed if first is None else first) + count
        print(f"schedule {number}", flush=True)
        for loop in (Loop, GenerateLoop):  # as on a GPU
            monkeypatch.setattr(loop, "asynchronous", bool(number % 2))
        schedule = Schedule(number, expected)
        began = time.monotonic()
        schedule.run(actions=4 if short else 30)
        print(f"{time.monotonic() - began:.1f} s", flush=True)
        done += schedule.done
    print(f"{count} schedules:", ", ".join(f"{name} {times}" for name, times in sorted(done.items())))
