"""What is known of torch: modes, tensors, captures, stages of compiling and the profiler."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from compiled_llm.compat.torch import capturing, cudagraph_trees, modes, profiler, stages, tensors
from support.compile_once import compile_once
from support.in_threads import in_thread

pytestmark = pytest.mark.core


# ---- modes, transforms, tracing and hooks of the caller are noticed and have names


def test_a_process_that_was_not_forked_has_not_lost_cuda():
    assert modes.cuda_is_lost() is False


def test_modes_that_a_graph_would_bake_in_are_noticed():
    assert not modes.inside_torch_modes()
    with torch.device("cpu"):
        assert modes.inside_torch_modes()
    with tensors.fake_tensors():
        assert modes.inside_torch_modes()
    assert not modes.inside_torch_modes()


class Mode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("context", "name"),
    [
        (Mode, "Mode"),
        (lambda: FlopCounterMode(display=False), "FlopCounterMode"),
        (tensors.fake_tensors, "FakeTensorMode"),
        (torch.autograd.forward_ad.dual_level, "torch.autograd.forward_ad"),
        (lambda: torch.device("meta"), None),
        (torch.no_grad, None),
    ],
)
def test_what_sees_each_operation_has_a_name(context, name):
    assert modes.observer_of_operations() is None
    with torch.device("cpu"), context():
        assert modes.observer_of_operations() == name
    assert modes.observer_of_operations() is None


def test_transforms_and_tracing_have_a_name():
    seen = []

    def note(x: Tensor) -> Tensor:
        seen.append(modes.observer_of_operations())
        return x * 2

    torch.func.vmap(note)(torch.zeros(2))
    torch.func.grad(lambda x: note(x).sum())(torch.zeros(2))
    torch.jit.trace(note, torch.zeros(2), check_trace=False)
    assert seen == ["torch.func", "torch.func", "torch.jit.trace"]


def test_each_hook_that_is_registered_is_counted():
    module, before = torch.nn.Linear(2, 2), modes.hooks_registered()
    for number, register in enumerate((module.register_full_backward_hook, module.register_full_backward_pre_hook), 1):
        register(lambda *_: None).remove()
        assert modes.hooks_registered() == before + number


def test_hooks_on_all_modules_are_noticed():
    assert not modes.hooks_on_all_modules()
    for register in (register_module_forward_hook, register_module_forward_pre_hook):
        handle = register(lambda *_: None)
        assert modes.hooks_on_all_modules()
        handle.remove()
        assert not modes.hooks_on_all_modules()


# ---- fake tensors take real parameters, and say what they share


class OwnParameter(torch.nn.Parameter):
    """A class of a library's own that is a plain tensor."""


def test_weights_of_a_subclass_of_parameter_run_among_fake_tensors():
    layer = torch.nn.Linear(3, 5)
    layer.weight = OwnParameter(layer.weight.detach())
    with tensors.fake_tensors(layer):
        assert layer(torch.zeros(2, 3)).shape == (2, 5)
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if version == (2, 12):
        pytest.skip("not seen")
    with tensors.fake_tensors(), pytest.raises(TypeError) if version < (2, 12) else nullcontext():
        layer(torch.zeros(2, 3))


def test_fake_tensors_take_parameters_that_are_real():
    weight = torch.nn.Parameter(torch.zeros(5, 3))
    with tensors.fake_tensors():
        out = torch.zeros(2, 3) @ weight.T
    assert out.shape == (2, 5)
    with pytest.raises(RuntimeError):
        out.tolist()


def test_sizes_that_only_data_decides_are_known_from_other_errors():
    with tensors.fake_tensors():
        with pytest.raises(RuntimeError) as unknown:
            torch.zeros(3).nonzero()
        with pytest.raises(RuntimeError) as other:
            torch.zeros(3) @ torch.zeros(4)
    assert tensors.has_unknown_sizes(unknown.value)
    assert not tensors.has_unknown_sizes(other.value)


@pytest.mark.parametrize("bias", [None, torch.zeros(3)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 5, 4)])
def test_a_fake_linear_layer_makes_what_torch_does(shape, transposed, bias):
    weight = torch.nn.Parameter(torch.zeros(3, 4), requires_grad=False)
    with tensors.fake_tensors() as fakes:
        input = fakes.of(
            torch.zeros(shape[::-1]).permute(*range(len(shape))[::-1]) if transposed else torch.zeros(shape)
        )
        made, expected = tensors.fake_linear(input, weight, bias), torch.nn.functional.linear(input, weight, bias)
    assert made is not None
    for what in (Tensor.size, Tensor.stride, Tensor.is_contiguous, type, lambda tensor: (tensor.dtype, tensor.device)):
        assert what(made) == what(expected)


def test_other_linear_layers_are_left_to_torch():
    class Quantised(Tensor):
        pass

    plain = torch.zeros(3, 4)
    with tensors.fake_tensors() as fakes:
        input = fakes.of(torch.zeros(2, 4))
        others = plain.half(), plain.to("meta"), torch.zeros(3, 5), torch.zeros(4)
        for weight in (plain.as_subclass(Quantised), *others):
            assert tensors.fake_linear(input, weight) is None
    assert tensors.fake_linear(torch.zeros(2, 4), plain) is None, "it has data"


def test_fake_tensors_say_whether_they_share_memory():
    with tensors.fake_tensors():
        whole, other = torch.empty(4), torch.empty(4)
        assert tensors.storage_number(whole) == tensors.storage_number(whole[2:]) != tensors.storage_number(other)


# ---- what a capture needs of torch: it can be ended when it has failed, and the allocator can be told of it


def test_a_capture_that_fails_is_ended(monkeypatch):
    class Graph:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def capture_begin(self, pool, capture_error_mode):
            self.calls.append(f"begin {capture_error_mode}")

        def capture_end(self):
            self.calls.append("end")
            if broken:
                raise RuntimeError("invalidated")

        def reset(self):
            self.calls.append("reset")

    def fail():
        raise ValueError("no launch")

    told: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *given: told.append("ended"))
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *given: told.append("released"))
    device, broken = torch.device("cuda", 0), False
    graph = Graph()
    assert capturing.captured_into(graph, (0, 1), device, lambda: 5) == 5
    assert graph.calls == ["begin thread_local", "end"]
    with pytest.raises(ValueError, match="no launch"):
        capturing.captured_into(graph := Graph(), (0, 1), device, fail)
    assert (graph.calls, told) == (["begin thread_local", "end", "reset"], [])
    broken = True
    for launch in (fail, lambda: 5):
        with pytest.raises((ValueError, RuntimeError)):
            capturing.captured_into(graph := Graph(), (0, 1), device, launch)
        assert graph.calls[-1] == "reset"
        assert capturing._ended_badly.pop() is graph, "it may be asked for as long as the process lives"
    assert (told, capturing._ended_badly) == (["ended", "released"] * 2, [])


def test_graphs_without_generators_can_tell_the_allocator():
    """Needed before torch 2.12, whose ``CUDAGraph`` no longer keeps other threads from drawing random numbers."""
    assert all(hasattr(torch._C, f"_cuda_{name}") for name in ("beginAllocateCurrentThreadToPool", "releasePool"))


def test_a_thread_that_never_had_cudagraph_trees_has_recorded_none():
    """Before torch 2.13 only the thread that imports them first has any, and to ask for them fails in all others."""
    cudagraph_trees.prepare_cudagraph_trees()
    assert in_thread(lambda: cudagraph_trees.cudagraph_tree_graphs(torch.device("cuda:0"))) == 0


def test_messages_about_cuda_graphs_are_collected():
    from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

    before = cudagraph_trees.cudagraph_skips()
    with cudagraph_trees.cudagraph_messages() as messages:
        log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to a test")
    assert messages == ["skipping cudagraphs due to a test"]
    assert cudagraph_trees.cudagraph_skips() == before + 1


# ---- the stage that torch is at while it compiles is seen from another thread


def test_stages_of_compiling_are_seen_from_another_thread():
    new = int.from_bytes(os.urandom(3), "big")  # no cache holds a kernel with this number

    def many(x: Tensor) -> Tensor:
        for number in range(40):
            x = torch.sin(x * number) + new
        return x

    seen: list[str] = []
    compiling, ended = threading.get_ident(), threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            seen.append(stages.compiling_stage(compiling))

    watcher = threading.Thread(target=watch)
    watcher.start()
    compile_once(many, "inductor", {"fx_graph_cache": False})
    ended.set()
    watcher.join()
    found = list(dict.fromkeys(re.sub(r"\d+", "N", stage) for stage in seen if stage))
    known = ["decomposing operators", "rewriting the graph", "lowering operators", "writing kernels"]
    assert [stage for stage in found if stage in known[1:]] == known[1:]
    assert known[0] in found
    assert "building kernels" in found, found
    assert stages.compiling_stage(compiling) == stages.compiling_stage(0) == ""


@pytest.mark.parametrize(
    ("functions", "stage"),
    [
        ([("compile_fx.py", "compile_fx")], "rewriting the graph"),
        ([("compile_fx.py", "compile_fx"), ("async_compile.py", "cpp_pybinding")], "building kernels"),
        ([("codecache.py", "load_with_key"), ("async_compile.py", "cpp_pybinding")], "reading the cache"),
    ],
)
def test_kernels_out_of_a_cache_are_not_built(functions: list[tuple[str, str]], stage: str) -> None:
    """Of functions that call each other, by torch's files and names."""

    def calling(inner: Callable[[], str], file: str, name: str) -> Callable[[], str]:
        made: dict[str, Any] = {"inner": inner}
        exec(compile(f"def {name}(): return inner()", f"{stages._TORCH}_inductor/{file}", "exec"), made)
        return made[name]

    call = partial(stages.compiling_stage, threading.get_ident())
    for function in reversed(functions):
        call = calling(call, *function)
    assert call() == stage


def test_stages_are_named_by_functions_that_exist():
    """One that is renamed is no error: its stage is only not told any more."""
    for file, function in (*stages._STAGES, stages._CACHE):
        assert f"def {function}(" in (Path(stages._TORCH) / file).read_text(), file


# ---- the profiler takes what makes it watch all threads


def test_profiler_takes_what_makes_it_watch_all_threads():
    with profile(experimental_config=profiler.profiling_all_threads(True)) as profiled:
        torch.zeros(3) + 1
        assert profiler.is_profiling()
    assert not profiler.is_profiling()
    assert any("add" in event.name for event in profiled.events())
