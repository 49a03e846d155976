"""In Python, ``wrap`` says once that threads which spin are slow beside other work; the command sets how they wait."""

from __future__ import annotations

import logging
import os

import pytest
import torch

import compiled_llm
from compiled_llm.execution.threads import busy_cores
from support.tiny_models import tiny_qwen3


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that nobody has told how many threads there are, and how they wait, on two cores."""
    monkeypatch.setattr(busy_cores, "_said", False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)


def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, load: float = 3.0) -> list[str]:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    with caplog.at_level(logging.WARNING, "compiled_llm"):
        for _ in range(2):
            compiled_llm.wrap(tiny_qwen3(), mode="eager")
    return [record.getMessage() for record in caplog.records if "they spin" in record.getMessage()]


def test_it_is_said_once_with_the_variables(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert said(monkeypatch, caplog) == [
        "compiled_llm: 3.0 jobs share 2 cores, and threads wait for each other; they spin, so answers may take many "
        "times as long: start Python with OMP_NUM_THREADS=1, or with GOMP_SPINCOUNT=10000"
    ]


def test_on_a_quiet_machine_nothing_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert said(monkeypatch, caplog, load=1.5) == []


@pytest.mark.parametrize("variable", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_who_has_set_how_threads_wait_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    assert said(monkeypatch, caplog) == []


def test_one_thread_waits_for_no_other(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert said(monkeypatch, caplog) == []
