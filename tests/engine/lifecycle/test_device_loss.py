"""After some errors of CUDA nothing runs in a process any more: all requests end, and none waits for ever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from compiled_llm.engine.device_loss import DeviceLostError, device_lost
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.requests.sampling_params import SamplingParams
from support.engine.tiny_engines import PATIENCE, wrapped
from support.execution.failing_calls import fail_once

ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported elsewhere"
LONG = SamplingParams(max_tokens=900, ignore_eos=True)


@pytest.fixture
def engine(one_thread: None) -> Iterator[Engine]:
    with Engine(wrapped(4000), max_num_seqs=2) as engine:
        engine.generate([3, 4], SamplingParams(max_tokens=2))
        yield engine
    assert engine.closed


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (torch.AcceleratorError(ILLEGAL), "an illegal memory access was encountered"),
        (torch.AcceleratorError("CUDA error: device-side assert triggered\n..."), "device-side assert triggered"),
        (torch.AcceleratorError("CUDA error: out of memory\n..."), "CUDA error: out of memory"),
        (torch.AcceleratorError("CUDA error: something new\n..."), "CUDA error: something new"),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), "misaligned address"),
        (RuntimeError("CUDA Error: unspecified launch failure (719) /x.cu: 7"), "unspecified launch failure"),
        (torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"), None),
        (torch.AcceleratorError("CUDA error: invalid configuration argument"), None),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB"), None),
        (RuntimeError("misaligned address"), None),
        (MemoryError(), None),
    ],
    ids=str,
)
def test_errors_that_end_a_process_and_errors_that_end_a_request(error, what):
    lost = device_lost(error)
    assert (lost is None) == (what is None)
    if lost is not None:
        assert str(lost).startswith(f"the device has failed ({what}), and nothing more runs on it in this process; ")
        assert lost.__cause__ is error
        led_to = RuntimeError("a step has failed")
        led_to.__cause__ = error
        assert device_lost(led_to) is not None


def test_all_requests_end_and_no_more_are_taken(engine, monkeypatch):
    handles = [engine.submit([3, 4, number], LONG) for number in range(5)]  # two of them run
    next(iter(handles[0]))
    with engine.paused():
        fail_once(monkeypatch, engine._engine_thread.loop, "step", torch.AcceleratorError(ILLEGAL), after=1)
    for handle in handles:
        with pytest.raises(DeviceLostError, match="an illegal memory access was encountered"):
            handle.result(PATIENCE)
    for call in (engine.submit, engine.generate):
        with pytest.raises(DeviceLostError, match="start the process again"):
            call([3, 4], LONG)
    assert isinstance(engine.lost, DeviceLostError)
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)
    assert engine.stats().new_tokens >= 1


def test_a_loop_that_cannot_restart_ends_requests(engine, monkeypatch):
    handle = engine.submit([3, 4], LONG)
    next(iter(handle))
    with engine.paused():
        loop = engine._engine_thread.loop
        fail_once(monkeypatch, loop, "step", RuntimeError("planted"), after=1)
        monkeypatch.setattr(Loop, "restart", lambda _: {}["missing"])
    with pytest.raises(DeviceLostError, match=r"the device has failed \(KeyError after RuntimeError\)"):
        handle.result(PATIENCE)


def test_a_device_that_cannot_be_prepared_any_more_is_lost(engine, monkeypatch):
    with engine.paused():
        engine._engine_thread.placed.drop()
        handle = engine.submit([3, 4], LONG)
        monkeypatch.setattr(engine._engine_thread.check, "_submitted", None)
        fail_once(monkeypatch, engine._runtime, "model_runner", torch.AcceleratorError(ILLEGAL), after=1)
    with pytest.raises(DeviceLostError):
        handle.result(PATIENCE)
    assert engine.lost is not None


def test_memory_that_others_may_give_back_ends_what_runs_alone(engine, monkeypatch):
    handle = engine.submit([3, 4], LONG)
    next(iter(handle))
    with engine.paused():
        fail_once(
            monkeypatch, engine._engine_thread.loop, "step", torch.OutOfMemoryError("CUDA out of memory"), after=1
        )
    with pytest.raises(torch.OutOfMemoryError):
        handle.result(PATIENCE)
    assert engine.lost is None
    assert len(engine.generate([3, 4], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
