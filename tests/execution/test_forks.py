"""A forked process is told that a wrapped model works elsewhere, waits for no other thread, and may wrap its own."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import compiled_llm
from compiled_llm.compat import huggingface
from compiled_llm.execution.threads import calling_thread, device_thread
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.model import checks
from support.execution.forking import ELSEWHERE, PATIENCE, forked, told_elsewhere
from support.in_threads import in_thread, start
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

pytestmark = [
    pytest.mark.usefixtures("executor", "one_thread"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here"),
]


def wrapped() -> PreTrainedModel:
    options: dict[str, Any] = {"page_size": 4, "kv_memory": "400 tokens", "max_batch_size": 4, "progress": False}
    return compiled_llm.wrap(tiny_qwen3(eos_token_id=None, num_hidden_layers=1), mode="eager", **options)


@pytest.fixture
def model() -> PreTrainedModel:
    return wrapped()


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
    assert held.reached.wait(PATIENCE)
    try:
        yield
    finally:
        held.go_on.set()
        running.result(timeout=PATIENCE)


def uses(model: PreTrainedModel) -> dict[str, Callable[[], Any]]:
    ids = torch.tensor([[3, 4, 5]])
    return {
        "generate": lambda: greedy(model, mixed_prompts([5], 128, 0), 3),
        "forward": lambda: model(ids),
        "generate_batch": lambda: model.generate_batch([[3, 4]], GenerationConfig(max_new_tokens=2)),
        "warmup": lambda: model.compiled.warmup(1),
        "save_profile": lambda: model.compiled.save_profile("profile"),
        "stats": lambda: model.compiled.stats(),
        "explain": lambda: model.compiled.explain(),
        "compiled_llm.explain": lambda: compiled_llm.explain(model),
        "new_cache": lambda: model.compiled.new_cache(),
        "Engine": lambda: compiled_llm.Engine(model),
        "wrap": lambda: compiled_llm.wrap(model),
        "unwrap": lambda: compiled_llm.unwrap(model),
    }


def assert_elsewhere(model: PreTrainedModel) -> None:
    told_elsewhere(uses(model))
    assert "eager" in repr(model.compiled)


def assert_own_works() -> None:
    own, inputs = wrapped(), mixed_prompts([5, 9], 128, 0)
    expected = greedy(own, inputs, 6)
    with torch.device("cpu"):
        assert torch.equal(greedy(own, inputs, 6), expected)
    assert in_thread(lambda: torch.equal(greedy(own, inputs, 6), expected))
    assert own.compiled.stats().generate_calls["fast loop"] == 3
    assert_account_is_empty(own)


def end() -> None:
    """Do what the end of the interpreter does."""
    gc.collect()
    calling_thread._let_calls_end()
    device_thread._finish_running_calls()


def check_child(model: PreTrainedModel) -> None:
    assert_elsewhere(model)
    assert_own_works()
    forked(lambda: assert_elsewhere(model))
    forked(assert_own_works)
    end()


@pytest.mark.core
def test_a_forked_process_is_told_and_wraps_its_own(model, seed):
    inputs = mixed_prompts([5, 9], 128, seed)
    with torch.device("cpu"):
        expected = greedy(model, inputs, 6)
    forked(lambda: check_child(model))
    assert torch.equal(greedy(model, inputs, 6), expected)


@pytest.mark.core
def test_while_another_thread_generates(model, seed):
    inputs, single = mixed_prompts([5, 9], 128, seed), mixed_prompts([7], 128, seed)
    expected = greedy(model, inputs, 6)
    with another_thread(lambda held: greedy(model, single, 60, streamer=held)):
        forked(lambda: check_child(model))
        assert torch.equal(greedy(model, inputs, 6), expected)
    assert_account_is_empty(model)


def test_while_another_thread_holds_every_lock_inside_a_step(model, seed):
    inputs = mixed_prompts([5, 9], 128, seed)
    expected = greedy(model, inputs, 6)
    runtime, model_runner = model.compiled, model.compiled.model_runner()
    kept = [model.generate(**inputs, max_new_tokens=3, return_dict_in_generate=True)]
    locks = [
        model_runner.pool.lock,
        runtime.loop_lock.taken(),
        runtime.loop_lock._condition._own,
        runtime.calls._changed._own,
        runtime.runner_lifecycle._allocation,
        runtime.counters._lock,
        runtime.events.generating._lock,
        runtime.facts.attention.original(),
        huggingface._readers_lock,
    ]

    def step(held: Held) -> None:
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            held.put(torch.zeros(1))

    def check() -> None:
        kept.clear()  # its pages go back
        check_child(model)

    with another_thread(lambda held: model_runner.thread.call(step, held)):
        forked(check)
    kept.clear()
    assert torch.equal(greedy(model, inputs, 6), expected)


class Forks(BaseStreamer):
    """Forks at a token; ``leaves`` ends the process there."""

    def __init__(self, leaves: bool) -> None:
        self.child: int | None = None
        self.leaves = leaves

    def put(self, value: Tensor) -> None:
        if value.dim() == 1 and self.child is None:
            self.child = os.fork()
            if self.child == 0:
                signal.alarm(PATIENCE)
                if self.leaves:
                    sys.exit(3)

    def end(self) -> None:
        pass


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python's, of threads that a fork loses
def test_a_callback_may_fork(model, seed, leaves):
    single = mixed_prompts([7], 128, seed)
    expected = greedy(model, single, 9)
    with another_thread(lambda held: greedy(model, mixed_prompts([5], 128, seed), 60, streamer=held)):
        forks, raised, text = Forks(leaves), None, torch.empty(0)
        try:
            text = greedy(model, single, 9, streamer=forks)
        except BaseException as error:
            raised = error
        if forks.child == 0:
            told = isinstance(raised, SystemExit) if leaves else ELSEWHERE in str(raised)
            os._exit(0 if told else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(forks.child or 0, 0)[1]) == 0
        assert torch.equal(text, expected)


def with_garbage(entries: list[int]) -> list[int]:
    gc.collect()
    return entries


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_workers_of_a_data_loader_begin_and_end(model, seed):
    with another_thread(lambda held: greedy(model, mixed_prompts([7], 128, seed), 60, streamer=held)):
        loader = DataLoader(
            range(4),  # type: ignore[arg-type]
            batch_size=2,
            num_workers=2,
            collate_fn=with_garbage,
            multiprocessing_context="fork",
            timeout=PATIENCE,
        )
        assert list(loader) == [[0, 1], [2, 3]]
    assert_account_is_empty(model)


def test_a_forked_process_that_has_lost_cuda_cannot_wrap(model, monkeypatch):
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    monkeypatch.setattr(checks, "cuda_is_lost", lambda: True)
    with pytest.raises(RuntimeError, match="start processes by multiprocessing"):
        checks.check_placement(model, model.compiled.config)


def test_ctrl_c_is_as_it_was_if_another_thread_forks_while_it_is_deferred():
    def press() -> None:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), deferred():
            signal.raise_signal(signal.SIGINT)

    with deferred():
        in_thread(lambda: forked(press))
