from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from compiled_llm.execution.lifecycle import runner_lifecycle
from compiled_llm.execution.threads.calling_thread import CallingThread
from compiled_llm.execution.threads.device_thread import DeviceThread


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=pytest.mark.either("executor")) for kind in (CallingThread, DeviceThread)],
)
def executor(request: pytest.FixtureRequest) -> Iterator[type]:
    """What holds on the caller's own thread, and on one that cudagraph trees need."""
    with mock.patch.object(runner_lifecycle, "executor_for", lambda device, config: request.param(device)):
        yield request.param
