from __future__ import annotations

import os

# Before transformers is imported: no test may wait for a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
# Nor may one depend on what others have traced before, or leave programs in the user's cache.
os.environ.setdefault("COMPILED_LLM_KEEP_PROGRAMS", "0")

import fcntl
import gc
import logging
import random
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaForCausalLM as Llama, PreTrainedModel, Qwen3ForCausalLM as Qwen3

from compiled_llm.compat.torch.inductor import inductor_cache
from compiled_llm.compilation import backend as inductor, programs as programs
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.model import layer_probe
from compiled_llm.model.probes.position_probe import DefaultPositions, default_positions
from compiled_llm.model.restore import restored
from compiled_llm_ops import backends
from support.compilation.fast_linker import link_fast
from support.compilation.first_worker import FirstWorker
from support.compilation.libraries_once import build_libraries_once
from support.compilation.quick_tracing import hasten_traces
from support.drawing import BY_READING
from support.execution.page_checks import checked_pages
from support.left_out import LeftOut
from support.ops.interpreting import (
    INTERPRETED,
    multiply_bfloat16_as_numbers,
    round_to_fp8_as_gpus_do,
    take_scalars_as_numbers,
)
from support.ops.quick_interpreter import hasten_the_interpreter
from support.tiny_models import tiny_llama, tiny_qwen3


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="seed of every test's random numbers")
    parser.addoption("--whole", action="store_true", help="with further cases, which take minutes")
    fuzz = parser.getgroup("fuzz", "random cases, in tests/fuzz")
    fuzz.addoption(
        "--fuzz-seed", type=int, default=None, help="the seed of the first case (default: 1000 times --seed)"
    )
    fuzz.addoption("--fuzz-cases", type=int, default=None, help="how many cases, one seed after the other")
    fuzz.addoption("--fuzz-seconds", type=float, default=0.0, help="go on with further cases for so long")
    fuzz.addoption("--fuzz-steps", type=int, default=6, help="steps of each case")
    fuzz.addoption("--fuzz-mode", default="eager", help="what models are wrapped with; the default compiles nothing")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.register_profile("few", max_examples=15, deadline=None, print_blob=True)
    hypothesis.settings.register_profile("whole", max_examples=300, deadline=None, print_blob=True)
    hypothesis.settings.load_profile("whole" if config.getoption("whole") else "few")
    # Tracing and compiling make hundreds of thousands of objects that stay: looking through them took an eighth of it.
    gc.set_threshold(20_000, 20, 50)
    _let_loggers_propagate()
    config.add_cleanup(link_fast())
    left_out = LeftOut(
        torch.cuda.is_available(), config.getoption("whole"), config.getoption("seed"), 1 if INTERPRETED else None
    )
    config.pluginmanager.register(left_out)
    config.pluginmanager.register(FirstWorker(config))
    # A shell starts what it puts into the background with Ctrl-C ignored; tests press it, and would wait for ever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _let_loggers_propagate() -> None:
    """Before and after each phase of each test, pytest turns to every logger that does not: torch has sixty.

    Torch also wrote each graph into its structured trace, since there was one who listened.
    """
    for logger in [*logging.root.manager.loggerDict.values()]:
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_report_header(config: pytest.Config) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    return f"seed {config.getoption('seed')}, torch {torch.__version__}, {device}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Divided among workers, what takes minutes must not come last.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


_lost = {"device": False}
"""Whether a kernel has ended this process's CUDA context."""
_checking = {"pages": False}
"""Whether models that are wrapped now check their pages."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before fixtures of modules: GPU tests check pages, except those that count what a step launches or compiles."""
    if _lost["device"] and hasattr(item.config, "workerinput"):
        os._exit(1)  # a new worker takes its place; here, each test would fail by the error of that one
    on_gpu = item.get_closest_marker("gpu") is not None
    _checking["pages"] = on_gpu and item.get_closest_marker("unchecked_pages") is None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _lost["device"] |= report.failed and "CUDA error: an illegal memory access" in report.longreprtext
    return report


@pytest.fixture(autouse=True, scope="session")
def _gpu_tests_check_pages() -> Iterator[None]:
    with checked_pages(lambda: _checking["pages"]):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """With `pytest -n`, a planted Ctrl-C that escapes its test would end the worker, and all tests after it be lost."""
    try:
        return (yield)
    except KeyboardInterrupt as interrupt:
        if not hasattr(item.config, "workerinput"):
            raise
        raise RuntimeError("KeyboardInterrupt escaped the test") from interrupt


@pytest.fixture(params=BY_READING)
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either way of reading tokens: the CPU's, or the one that keeps a GPU busy; both with ``--whole``."""
    late = request.param == "read a step late"
    monkeypatch.setattr(GenerateLoop, "asynchronous", property(lambda _: late))


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    chosen: int = request.config.getoption("seed")
    print(f"seed {chosen}")
    random.seed(chosen)
    np.random.seed(chosen)
    torch.manual_seed(chosen)
    return chosen


@pytest.fixture
def whole(request: pytest.FixtureRequest) -> bool:
    """Whether random tests go on for as long as with ``--whole``."""
    found: bool = request.config.getoption("whole")
    return found


_objects = gc.get_objects


def _objects_and_frozen_ones(generation: int | None = None) -> list[Any]:
    gc.unfreeze()
    found = _objects(generation)
    gc.freeze()  # or each later collection would look through all of them
    return found


@pytest.fixture(autouse=True, scope="module")
def _collections_pass_over_what_was_there_before() -> Iterator[None]:
    """Each took a second by the end, of everything imported and compiled so far; many tests ask for one."""
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_objects", _objects_and_frozen_ones)  # `explain` looks through all functions
        yield


@pytest.fixture(autouse=True, scope="session")
def _kernels_are_not_built_for_later_processes() -> Iterator[None]:
    """FlashInfer's for Hopper keep all cores busy for a minute, for each of many head sizes that tests have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compiled_llm_ops.flashinfer.workspace.build_for_later", lambda *_: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _compilers_are_not_asked_what_they_build_for() -> Iterator[None]:
    """Beside what tox says, Inductor builds and loads up to nine libraries to see: 4 s of a core for each cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._inductor.cpu_vec_isa.VecISA.check_build", lambda *_: True)
        yield


@pytest.fixture(autouse=True, scope="session")
def _libraries_are_built_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Artifacts have a cache of their own, and kernels that others have; with ``--whole``, they build all."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.config.getoption("whole") and not torch.cuda.is_available():
            build_libraries_once(patch, inductor_cache() / "libraries")
        yield


@pytest.fixture(autouse=True, scope="session")
def _absent_devices_are_given_no_seeds() -> Iterator[None]:
    """Torch keeps each for them with the text of the stack that gave it: 2 ms of each test, and of most models."""
    with pytest.MonkeyPatch.context() as patch:
        for device in (torch.cuda, torch.mtia, torch.xpu):
            if not device.is_available():
                patch.setattr(device, "manual_seed_all", lambda _: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _guards_are_not_timed() -> Iterator[None]:
    """Dynamo times the guards of each graph, for its own developers, and flushes the processor's caches to do so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0, raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def _guards_on_sizes_have_no_common_parts() -> Iterator[None]:
    """To find them, Dynamo reads and writes its own code: a twentieth of a trace. It goes on without if that fails."""

    def fail(*_: Any) -> None:
        raise RecursionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._dynamo.guards.PyExprCSEPass.count", fail, raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def _traces_are_quick(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where tox has torch keep nothing of its ops' results; ``--whole`` and the matrix trace as users do."""
    keeps_nothing = os.environ.get("TORCH_FAKE_TENSOR_DISPATCH_CACHE") == "0"
    with pytest.MonkeyPatch.context() as patch:
        if keeps_nothing and not request.config.getoption("whole"):
            hasten_traces(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def _trial_forwards_keep_what_ops_do() -> Iterator[None]:
    """Also where tracing does not (tox.ini): many tests wrap models that are alike, which is half of most of them."""
    make = FakeTensorMode.__init__

    def made(mode: FakeTensorMode, *args: Any, **options: Any) -> None:
        make(mode, *args, **options)
        mode.cache_enabled |= mode.shape_env is None  # Dynamo's has one

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeTensorMode, "__init__", made)
        yield


WRAPPING_IS_NOT_THE_POINT = ("client", "engine", "execution", "fuzz", "huggingface", "kinds", "kvcache", "server")
"""Folders whose tests wrap models of families that others wrap, too."""
WRAPPING_IS_THE_POINT = (
    *("experts", "recurrent/test_recurrent_generate.py", "test_bad_input.py", "test_default_positions.py"),
    "test_families.py",
    *("test_led_to_explain.py", "test_quantized.py", "test_vision_language.py", "test_wrap_options.py", "variants"),
)
"""Of these in huggingface: each family is tried on fake tensors, as users' models are, and so is what is refused."""


@pytest.fixture(autouse=True, scope="module")
def _trial_forwards_compute(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where wrapping is not the point, `wrap` tries models on their own tensors: tiny ones take a tenth of it."""
    with pytest.MonkeyPatch.context() as patch:
        tests, path = Path(__file__).parent, request.path
        wraps_on_purpose = any(path.is_relative_to(tests / "huggingface" / own) for own in WRAPPING_IS_THE_POINT)
        if path.relative_to(tests).parts[0] in WRAPPING_IS_NOT_THE_POINT and not wraps_on_purpose:
            patch.setattr(layer_probe, "_on_fakes", restored)
            patch.setattr("compiled_llm.huggingface.wrap.default_positions", _default_positions_of_its_kind)
        yield


def _default_positions_of_its_kind(model: PreTrainedModel) -> DefaultPositions:
    """What was found of the first model with this class and this configuration: two or three forwards for each."""
    key = type(model), model.config.to_json_string(use_diff=False)
    if key not in _default_positions:
        _default_positions[key] = default_positions(model)
    return _default_positions[key]


_default_positions: dict[tuple[type[PreTrainedModel], str], DefaultPositions] = {}


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tiny models: where the machine has other work, waiting for a second thread is most of their time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs run as Dynamo and our passes leave them: enough where nothing depends on what Inductor makes of them."""
    monkeypatch.setattr(inductor, "compile_with_inductor", lambda module, inputs, options: module.forward)


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run as Python: enough for what is said and prepared of them, whatever is in their graphs."""
    monkeypatch.setattr(programs, "compiled", lambda program, function, *more: function)


@pytest.fixture(scope="session")
def demo_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the demo model, fetched and unpacked as a user's would be, by one worker of all."""
    from compiled_llm.demo_model.folder import folder

    try:
        with (tmp_path_factory.getbasetemp().parent / "demo_model.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return folder()
    except RuntimeError as error:
        pytest.skip(f"the demo model cannot be fetched here: {error}")


@pytest.fixture(scope="session", name="tiny_qwen3")
def _tiny_qwen3() -> Callable[..., Qwen3]:
    return tiny_qwen3


@pytest.fixture(scope="session", name="tiny_llama")
def _tiny_llama() -> Callable[..., Llama]:
    return tiny_llama


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter, mended."""
    if INTERPRETED:
        take_scalars_as_numbers(monkeypatch)
        round_to_fp8_as_gpus_do(monkeypatch)
        multiply_bfloat16_as_numbers(monkeypatch)
        hasten_the_interpreter(monkeypatch)


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[str]]]:
    """What the installations of backends lack, by name, once their kernels have to be built: nothing yet."""
    found: dict[str, list[str]] = {}
    for name in ("flashinfer", "triton", "flash-attn", "torch"):
        installation = type(backends.backend_named(name).installation)
        monkeypatch.setattr(
            installation, "problems", lambda self, builds=True, name=name: found.get(name, []) if builds else []
        )
    backends._fastest_that_runs.cache_clear()
    yield found
    backends._fastest_that_runs.cache_clear()
