"""A forked process is told that a wrapped model works elsewhere, waits for no other thread, and may wrap its own."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import GenerationConfig, PreTrainedModel

import compiled_llm
from compiled_llm.compat import huggingface
from compiled_llm.execution.threads import calling_thread, device_thread
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.model import checks
from support.execution.callbacks import Callback
from support.execution.forking import ELSEWHERE, PATIENCE, another_thread, forked, told_elsewhere
from support.in_threads import in_thread
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


def generate(model: PreTrainedModel, stay: Callable[[], None]) -> None:
    greedy(model, mixed_prompts([7], 128, 0), 20, streamer=Callback(stay))


def hold_every_lock_inside_a_step(model: PreTrainedModel, stay: Callable[[], None]) -> None:
    runtime, model_runner = model.compiled, model.compiled.model_runner()
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

    def step() -> None:
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            stay()

    model_runner.thread.call(step)


@pytest.mark.drawn(most=1)
@pytest.mark.core
@pytest.mark.parametrize("work", [generate, hold_every_lock_inside_a_step])
def test_a_forked_process_is_told_and_wraps_its_own_whatever_another_thread_does(work, model, seed):
    inputs = mixed_prompts([5, 9], 128, seed)
    with torch.device("cpu"):  # on a thread that is not there any more
        expected = greedy(model, inputs, 6)
    kept = [model.generate(**inputs, max_new_tokens=3, return_dict_in_generate=True)]

    def check() -> None:
        kept.clear()  # its pages go back
        check_child(model)

    with another_thread(lambda stay: work(model, stay)):
        forked(check)
    kept.clear()
    assert torch.equal(greedy(model, inputs, 6), expected)
    assert_account_is_empty(model)


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python's, of threads that a fork loses
def test_a_callback_may_fork(model, seed, leaves):
    single, children = mixed_prompts([7], 128, seed), []

    def fork_once() -> None:
        if not children:
            children.append(os.fork())
            if children == [0]:
                signal.alarm(PATIENCE)
                if leaves:
                    sys.exit(3)

    expected = greedy(model, single, 9)
    with another_thread(lambda stay: generate(model, stay)):
        raised, text = None, torch.empty(0)
        try:
            text = greedy(model, single, 9, streamer=Callback(fork_once))
        except BaseException as error:
            raised = error
        if children == [0]:
            told = isinstance(raised, SystemExit) if leaves else ELSEWHERE in str(raised)
            os._exit(0 if told else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
        assert torch.equal(text, expected)


def with_garbage(entries: list[int]) -> list[int]:
    gc.collect()
    return entries


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_workers_of_a_data_loader_begin_and_end(model, seed):
    with another_thread(lambda stay: generate(model, stay)):
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
