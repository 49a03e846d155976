"""In a forked process a wrapped model works on, whatever other threads were doing with it: they do not exist there."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import compiled_llm
from compiled_llm.compat import huggingface
from compiled_llm.execution.threads import calling_thread, device_thread
from compiled_llm.execution.threads.interrupts import deferred
from support.forking import PATIENCE, forked
from support.in_threads import in_thread, start
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

pytestmark = [
    pytest.mark.usefixtures("executor", "one_thread"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here"),
]


@pytest.fixture
def model() -> PreTrainedModel:
    options: dict[str, Any] = {"page_size": 4, "kv_memory": "400 tokens", "max_batch_size": 4, "progress": False}
    return compiled_llm.wrap(tiny_qwen3(eos_token_id=None, num_hidden_layers=1), mode="eager", **options)


class Held(BaseStreamer):
    """Holds a call of another thread up after its first token."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def put(self, value: Tensor) -> None:
        if value.dim() == 1:
            self.reached.set()
            self.go_on.wait()

    def end(self) -> None:
        pass


@contextmanager
def another_thread(work: Callable[[Held], Any]) -> Iterator[None]:
    """Have another thread in the midst of something for the block."""
    held = Held()
    running = start(lambda: work(held))
    held.reached.wait()
    try:
        yield
    finally:
        held.go_on.set()
        running.result(timeout=PATIENCE)


def assert_works(model: PreTrainedModel, inputs: dict[str, Tensor], expected: Tensor) -> None:
    for _ in range(2):
        assert torch.equal(greedy(model, inputs, 6), expected)
    with torch.device("cpu"):
        assert torch.equal(greedy(model, inputs, 6), expected)
    assert in_thread(lambda: torch.equal(greedy(model, inputs, 6), expected))
    assert model.compiled.stats().generate_calls["fast loop"] >= 4
    assert_account_is_empty(model)


@pytest.mark.core
def test_a_call_after_one_inside_a_mode_of_torchs(model, seed):
    inputs = mixed_prompts([5, 9], 128, seed)
    with torch.device("cpu"):
        expected = greedy(model, inputs, 6)
    forked(lambda: assert_works(model, inputs, expected))
    forked(lambda: forked(lambda: assert_works(model, inputs, expected)))
    assert_works(model, inputs, expected)


@pytest.mark.core
def test_a_call_while_another_thread_generates(model, seed):
    inputs, single = mixed_prompts([5, 9], 128, seed), mixed_prompts([7], 128, seed)
    expected = greedy(model, inputs, 6)
    with another_thread(lambda held: greedy(model, single, 60, streamer=held)):
        forked(lambda: assert_works(model, inputs, expected))
        assert torch.equal(greedy(model, inputs, 6), expected)
    assert_account_is_empty(model)


def test_a_call_while_another_thread_is_inside_a_step(model, seed):
    inputs = mixed_prompts([5, 9], 128, seed)
    expected = greedy(model, inputs, 6)
    device_model = model.compiled.device_model()

    def step(held: Held) -> None:
        with model.compiled.facts.attention.original(), device_model.pool.lock:
            held.put(torch.zeros(1))

    with another_thread(lambda held: device_model.thread.call(step, held)):
        forked(lambda: assert_works(model, inputs, expected))
        forked(calling_thread._let_calls_end)
        forked(device_thread._finish_running_calls)
    assert_works(model, inputs, expected)


def test_a_call_while_another_thread_holds_a_short_lock(model, seed):
    inputs = mixed_prompts([5, 9], 128, seed)
    expected = greedy(model, inputs, 6)
    runtime = model.compiled
    for lock in (runtime.device_side._allocation, runtime.counters._lock, huggingface._readers_lock):

        def hold(held: Held, lock: Any = lock) -> None:
            with lock:
                held.put(torch.zeros(1))

        with another_thread(hold):
            forked(lambda: assert_works(model, inputs, expected))


def test_a_callback_may_fork(model, seed):
    inputs = mixed_prompts([5, 9], 128, seed)
    expected, single = greedy(model, inputs, 6), mixed_prompts([7], 128, seed)
    alone = greedy(model, single, 9)

    class Forks(BaseStreamer):
        child: int | None = None

        def put(self, value: Tensor) -> None:
            if value.dim() == 1 and self.child is None:
                self.child = os.fork()
                if self.child == 0:
                    signal.alarm(PATIENCE)

        def end(self) -> None:
            pass

    forks = Forks()
    text = greedy(model, single, 9, streamer=forks)
    if forks.child == 0:
        try:
            assert torch.equal(text, alone)
            assert_works(model, inputs, expected)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(forks.child or 0, 0)[1] == 0
    assert torch.equal(text, alone)


def test_ctrl_c_is_as_it_was_if_another_thread_forks_while_it_is_deferred():
    def press() -> None:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), deferred():
            signal.raise_signal(signal.SIGINT)

    with deferred():
        in_thread(lambda: forked(press))
