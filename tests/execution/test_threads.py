"""Any thread may call, callbacks may call back, and the end of the process leaves nothing behind."""

from __future__ import annotations

import contextvars
import gc
import json
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, StoppingCriteriaList

import compiled_llm
from compiled_llm.compilation import backend as inductor
from compiled_llm.execution.steps.launch import Launch
from compiled_llm.execution.threads.device_thread import DeviceThread
from compiled_llm.execution.threads.loop_lock import LoopLock
from support.execution.callbacks import Callback
from support.execution.inside_steps import Calling
from support.in_threads import PATIENCE, in_thread, start
from support.parity import assert_account_is_empty, greedy, mixed_prompts, next_turn
from support.tiny_models import TINY, tiny_qwen3

pytestmark = pytest.mark.usefixtures("executor")

OPTIONS: dict[str, Any] = {"page_size": 4, "kv_memory": "4000 tokens", "max_batch_size": 8, "progress": False}


@pytest.fixture
def model() -> PreTrainedModel:
    return compiled_llm.wrap(tiny_qwen3(eos_token_id=None), mode="eager", **OPTIONS)


@pytest.fixture(scope="module")
def compiled(executor: type) -> Iterator[PreTrainedModel]:
    """Without Inductor, whose code no test here depends on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor, "compile_with_inductor", lambda module, inputs, options: module.forward)
        model = compiled_llm.wrap(tiny_qwen3(eos_token_id=None, num_hidden_layers=1), mode="compile", **OPTIONS)
        model.compiled.warmup([1, 2])
        yield model
        compiled_llm.unwrap(model)


def with_callback(kind: str, callback: Callback) -> dict[str, Any]:
    return {"streamer": callback} if kind == "streamer" else {"stopping_criteria": StoppingCriteriaList([callback])}


by_kind = pytest.mark.parametrize("kind", ["streamer", "stopping criterion"])


# ---- threads


@pytest.mark.core
def test_twenty_fresh_threads_get_equal_tokens_and_compile_nothing(compiled, seed):
    one, many = mixed_prompts([5], 128, seed), mixed_prompts([3, 8], 128, seed)
    expected = [greedy(compiled, inputs, 8) for inputs in (one, many)]
    before = compiled.compiled.graphs
    assert before == {"prefill": 1, "decode, batch 1": 1, "decode, larger batches": 1}
    with torch.compiler.set_stance("fail_on_recompile"):
        for number in range(20):
            inputs = (one, many)[number % 2]
            torch.testing.assert_close(
                in_thread(lambda inputs=inputs: greedy(compiled, inputs, 8)), expected[number % 2]
            )
    assert compiled.compiled.graphs == before
    assert_account_is_empty(compiled)


@pytest.mark.core
def test_the_callers_modes_compile_nothing(compiled, seed):
    inputs = mixed_prompts([5], 128, seed)
    expected = greedy(compiled, inputs, 8)
    with torch.compiler.set_stance("fail_on_recompile"):
        for world in (torch.no_grad(), torch.inference_mode(), torch.device("cpu"), torch.set_grad_enabled(True)):
            with world:
                torch.testing.assert_close(greedy(compiled, inputs, 8).clone(), expected)
    before = compiled.compiled.graphs
    with torch.device("cpu"):
        assert compiled.compiled.model_runner().thread.call(lambda: len(torch.zeros(3))) == 3
        assert compiled.compiled.model_runner().thread.call(torch._C._len_torch_function_stack) == 0
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        world = compiled.compiled.model_runner().thread.call(
            lambda: (torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled(), torch.is_grad_enabled())
        )
        assert torch.is_autocast_enabled("cpu")
    assert world == (False, False, False)
    assert compiled.compiled.graphs == before


def chat(model: PreTrainedModel, seed: int) -> Any:
    inputs = mixed_prompts([5], 128, seed)
    out = greedy(model, inputs, 6, return_dict_in_generate=True)
    return greedy(model, next_turn(inputs, out, torch.tensor([[7, 8]])), 6)


@torch.no_grad()
def score(model: PreTrainedModel, seed: int) -> Any:
    inputs = mixed_prompts([5, 9], 128, seed)
    return model(**inputs, use_cache=False).logits[inputs["attention_mask"] != 0]


MODES: list[Callable[[PreTrainedModel, int], Any]] = [
    lambda model, seed: greedy(model, mixed_prompts([5, 3], 128, seed), 12),
    lambda model, seed: greedy(model, mixed_prompts([5], 128, seed), 9, num_beams=3),
    lambda model, seed: greedy(model, mixed_prompts([20], 128, seed), 12, prompt_lookup_num_tokens=3),
    lambda model, seed: greedy(model, mixed_prompts([5, 4], 128, seed), 8, no_repeat_ngram_size=2),
    lambda model, seed: greedy(model, mixed_prompts([4], 128, seed), 8, num_beams=2, use_cache=False),
    chat,
    score,
]


@pytest.mark.whole
@pytest.mark.core
def test_all_modes_at_once_from_several_threads(model):
    plain = tiny_qwen3(eos_token_id=None)
    jobs = [(mode, seed) for seed in range(3) for mode in MODES]
    expected = [mode(plain, seed) for mode, seed in jobs]
    with ThreadPoolExecutor(6) as pool:
        for actual, wanted in zip(pool.map(lambda job: job[0](model, job[1]), jobs), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
    gc.collect()
    assert_account_is_empty(model)


@pytest.mark.core
def test_concurrent_first_calls_allocate_once(seed):
    model = compiled_llm.wrap(tiny_qwen3(eos_token_id=None), mode="eager", **OPTIONS)
    futures = [start(model.compiled.model_runner) for _ in range(8)]
    assert len({id(future.result(timeout=PATIENCE)) for future in futures}) == 1


# ---- callbacks


@pytest.mark.core
@by_kind
@pytest.mark.parametrize("runs", [lambda call: call(), in_thread], ids=["itself", "in a thread that it joins"])
def test_a_callback_may_call_the_model(runs, kind, model, seed):
    inputs, others = mixed_prompts([5], 128, seed), mixed_prompts([2, 7, 3], 128, seed + 1)
    expected, inner = greedy(model, inputs, 6), greedy(model, others, 4)
    callback = Callback(lambda: runs(lambda: greedy(model, others, 4)))
    tokens = in_thread(lambda: greedy(model, inputs, 6, **with_callback(kind, callback)))
    torch.testing.assert_close(tokens, expected)
    assert len(callback.results) == 6
    for result in callback.results:
        torch.testing.assert_close(result, inner)
    assert_account_is_empty(model)


@by_kind
def test_a_callback_may_look_at_stats_and_sample(kind, model, seed):
    inputs = mixed_prompts([5], 128, seed)

    def look() -> Any:
        model.generate(**inputs, max_new_tokens=3, do_sample=True)
        return model.compiled.stats()

    callback = Callback(look)
    in_thread(lambda: greedy(model, inputs, 3, **with_callback(kind, callback)))
    assert [stats.generate_calls["fast loop"] for stats in callback.results] == [2, 3, 4]
    assert_account_is_empty(model)


@by_kind
def test_callbacks_run_in_the_callers_thread_and_context(kind, model, seed):
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="lost")
    variable.set("seen")
    callback = Callback(lambda: (variable.get(), threading.get_ident()))
    greedy(model, mixed_prompts([5], 128, seed), 4, **with_callback(kind, callback))
    assert callback.results == [("seen", threading.get_ident())] * 4


def raising(place: str, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Raise an error at the third token in one place; returns the options of the call that goes there."""
    steps = iter(range(100))

    def fails_at_the_third_token(*_: Any) -> None:
        if next(steps) == 2:
            raise LookupError("at the third token")

    if place in ("streamer", "stopping criterion"):
        return with_callback(place, Callback(fails_at_the_third_token))
    if place == "layer":  # whose hooks would send the call along HuggingFace's own path
        layer: Any = model.model.layers[1]
        monkeypatch.setattr(layer, "mlp", Calling(layer.mlp, fails_at_the_third_token))
    else:
        own = Launch.__call__
        monkeypatch.setattr(Launch, "__call__", lambda launch: (fails_at_the_third_token(), own(launch))[1])
    return {}


@pytest.mark.core
@pytest.mark.parametrize("place", ["streamer", "stopping criterion", "layer", "step"])
def test_an_exception_keeps_its_frame_and_gives_everything_back(place, model, monkeypatch, seed):
    inputs = mixed_prompts([5, 8], 128, seed)
    expected = greedy(model, inputs, 6)
    options = raising(place, model, monkeypatch)
    with pytest.raises(LookupError, match="at the third token") as caught:
        greedy(model, inputs, 6, **options)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fails_at_the_third_token"
    assert_account_is_empty(model)
    torch.testing.assert_close(greedy(model, inputs, 6), expected)


# ---- the lock and the thread


def test_the_loop_lock_says_whether_others_wait_for_it():
    lock = LoopLock()

    def take() -> None:
        with lock.taken(fits=lambda: True):
            pass

    with lock.taken(fits=lambda: True):
        assert not lock.waiters
        other = start(take)
        until = time.monotonic() + PATIENCE
        while not lock.waiters and time.monotonic() < until:
            time.sleep(0.01)
        assert lock.waiters
        with lock.yielded():  # as a loop does then
            other.result(timeout=PATIENCE)
    assert not lock.waiters


def test_a_device_thread_is_used_again_once_its_owner_is_gone():
    thread = DeviceThread(torch.device("cpu"))
    worker = thread.call(threading.current_thread)
    del thread
    assert DeviceThread(torch.device("cpu")).call(threading.current_thread) is worker


# ---- the end of the process

ENDINGS = {
    "falls off the end": "",
    "exits in a callback": "import sys; sys.exit(0)",
    "with a cache alive": "kept = model.generate(ids, max_new_tokens=3, return_dict_in_generate=True)",
    "with a thread that waits": "threading.Thread(target=time.sleep, args=(0.2,)).start()",
    "with a daemon that generates": "threading.Thread(target=lambda: model.generate(ids, max_new_tokens=900), "
    "daemon=True).start(); time.sleep(0.1)",
    "interrupted": "threading.Timer(0.2, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()\n"
    "try:\n    model.generate(ids, max_new_tokens=900)\nexcept KeyboardInterrupt:\n    pass\n"
    "assert model.compiled.stats().pages.used == 0",
}
COMPILED = ("CallingThread", "compile", "falls off the end")
EXECUTORS = ("CallingThread", "DeviceThread")
PROCESSES = [*((executor, "eager", end) for executor in EXECUTORS for end in ENDINGS), COMPILED]
IN_EACH_RUN = [(EXECUTORS[number % 2], "eager", end) for number, end in enumerate(ENDINGS)]
"""Each ending, with both executors in turn; the others, one of which traces, run with `--whole`."""

# Imports once, which is what takes long, and becomes each of the processes in turn. Graphs run as Dynamo leaves them;
# that processes with Inductor's code end with 0, those show that start with artifacts.
PROCESS = """
import gc, json, os, signal, sys, threading, time
import torch, transformers, compiled_llm
from compiled_llm.compilation import backend
from compiled_llm.execution.threads.calling_thread import CallingThread
from compiled_llm.execution.threads.device_thread import DeviceThread
from compiled_llm.execution.lifecycle import runner_lifecycle
folder, processes, config = sys.argv[1], *map(json.loads, sys.argv[2:])
options = {"kv_memory": "2000 tokens", "page_size": 4, "max_batch_size": 8, "progress": False}
def tiny():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config)).eval()
compiled_llm.unwrap(compiled_llm.wrap(tiny(), mode="eager", **options))  # what the first one imports
codes = []
gc.freeze()  # collections of imported objects would take most of the time; the first that falls off the end has them
for number, (executor, mode, ending) in enumerate(processes):
    child = os.fork()
    if child == 0:
        break
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    print(json.dumps(codes))
    sys.exit()
signal.alarm(200)
if mode == "eager" and not ending:
    gc.unfreeze()
os.dup2(os.open(f"{folder}/{number}", os.O_CREAT | os.O_WRONLY), 2)
runner_lifecycle.executor_for = lambda device, config: globals()[executor](device)
backend.compile_with_inductor = lambda module, inputs, options: module.forward
model = compiled_llm.wrap(tiny(), mode=mode, **options)
ids = torch.tensor([[3, 4, 5]])
assert model.generate(ids, max_new_tokens=5, do_sample=False).shape == (1, 8)
exec(ending)
"""


@pytest.fixture(scope="module")
def ended(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[tuple[str, str, str], tuple[int, str]]:
    """The exit code of each process, and what it said."""
    folder = tmp_path_factory.mktemp("processes")
    chosen = PROCESSES if request.config.getoption("whole") else IN_EACH_RUN
    processes = json.dumps([(executor, mode, ENDINGS[ending]) for executor, mode, ending in chosen])
    config = json.dumps({**TINY, "num_hidden_layers": 1, "eos_token_id": None})
    command = [sys.executable, "-c", PROCESS, str(folder), processes, config]
    codes = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=500).stdout)
    said = [(folder / str(number)).read_text() for number in range(len(chosen))]
    return dict(zip(chosen, zip(codes, said, strict=True), strict=True))


@pytest.mark.parametrize(
    "process", [pytest.param(own, marks=[] if own in IN_EACH_RUN else pytest.mark.whole) for own in PROCESSES], ids=str
)
def test_the_process_ends_cleanly_with_a_wrapped_model_alive(process, ended):
    code, said = ended[process]
    assert code == 0, said
    assert "terminate called" not in said
    assert "Traceback" not in said
    assert "Error" not in said
