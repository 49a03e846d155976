"""Each private part of torch that we depend on still does what it is for."""

from __future__ import annotations

import ast
import gc
import inspect
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._inductor import cpu_vec_isa
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.codegen.triton_combo_kernel import ComboKernel
from torch._inductor.cpu_vec_isa import VecISA
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.utils import IndentedBuffer
from torch.fx import symbolic_trace
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

import compiled_llm
import compiled_llm_ops
from compiled_llm import compat
from compiled_llm.compat.torch import modes, stages

pytestmark = pytest.mark.core

# What torch documents in spite of the underscore; `compat` says so.
DOCUMENTED = {
    "torch._dynamo.config",
    "torch._dynamo.mark_dynamic",
    "torch._dynamo.mark_static_address",
    "torch._dynamo.reset",
    "torch._ops.OpOverload",
}


def double(x: Tensor) -> Tensor:
    return x * 2


def breaks(x: Tensor) -> Tensor:
    print("a graph break")
    return x * 2


def compile_once(function: Callable[[Tensor], Tensor], backend: str, options: dict[str, Any] | None = None) -> None:
    torch.compile(function, backend=backend, options=options)(torch.zeros(3))
    compat.forget([function])


class Warned(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.mark.parametrize("overlaps", [False, True])
def test_kernels_wait_before_anything_else(overlaps):
    """A GPU runs what comes of it in `test_replay_gpu.py`."""
    compat.make_kernels_wait_first()
    code, wait, launch = IndentedBuffer(), TritonKernel.GDC_WAIT, TritonKernel.GDC_LAUNCH
    for line in ("a = 1", "b = load(a)", wait, launch, "c = load(b)", wait, launch, "store(c)"):
        code.writeline(line)
    kernel = SimpleNamespace(GDC_WAIT=wait, GDC_LAUNCH=launch, _enable_pdl_codegen=lambda: overlaps)
    TritonKernel._filter_pdl(cast(TritonKernel, kernel), code)
    lines = code.getvalue().splitlines()
    waits = ([wait], []) if overlaps else ([], [wait])
    assert lines == [*waits[0], "a = 1", "b = load(a)", *waits[1], "c = load(b)", launch, "store(c)"]


def kernel_source(may_begin_early: bool) -> str:
    return f"triton_meta={{'enable_fp_fusion': True, {compat.MAY_BEGIN_EARLY if may_begin_early else ''}}}"


def test_a_kernel_that_may_begin_early_and_does_not_wait_is_refused():
    waits = [0]

    def codegen(may_begin_early: bool, made_to_wait: bool) -> str:
        waits[0] += made_to_wait
        return kernel_source(may_begin_early)

    checked = compat.refusing_races(codegen, waits)
    for early, made_to_wait in ((True, True), (False, True), (False, False)):
        assert checked(early, made_to_wait) == kernel_source(early)
    with pytest.raises(RuntimeError, match="cannot be made to wait for it"):
        checked(True, False)


def test_inductor_says_which_kernels_may_begin_early():
    """By the words that we look for, in what it writes while the two methods that we replace run."""
    compat.make_kernels_wait_first()
    for kernels in (TritonKernel, ComboKernel):
        codegen = inspect.unwrap(kernels.codegen_kernel)
        assert kernels.codegen_kernel is not codegen
        assert "._filter_pdl(" in inspect.getsource(sys.modules[kernels.__module__])
    name = compat.MAY_BEGIN_EARLY.split("'")[1]
    assert f'"{name}": ' in inspect.getsource(sys.modules[TritonKernel.__module__])


def test_tilings_that_inductor_may_refuse_are_timed_by_inductor():
    """The others run on a GPU; `test_autotuning_gpu.py` has them."""
    asked = []

    def bench(*given: object) -> float:
        asked.append(given)
        return 0.5

    timed = compat.timed_in_a_graph(bench)
    for device, custom, spills in (("cpu", False, 0), ("cuda", True, 0), ("cuda", False, 8), ("cuda", False, None)):
        kernel = SimpleNamespace(device_props=SimpleNamespace(type=device), custom_kernel=custom)
        launcher = SimpleNamespace(n_spills=spills)
        assert timed(kernel, launcher, 1, 2) == 0.5
        assert asked.pop() == (kernel, launcher, 1, 2)


def test_inductor_times_tilings_by_the_method_that_is_replaced():
    compat.compile_with_inductor(symbolic_trace(double), [torch.zeros(3)], {})
    own = inspect.unwrap(CachingAutotuner.bench)
    assert CachingAutotuner.bench is not own
    assert list(inspect.signature(own).parameters)[:3] == ["self", "launcher", "args"]
    assert "self.bench(launcher, *args, **kwargs)" in inspect.getsource(CachingAutotuner)
    assert "stream=stream" in inspect.getsource(own)
    assert callable(CachingAutotuner.clone_args)
    for attribute in ("device_props", "custom_kernel"):
        assert f"self.{attribute}" in inspect.getsource(CachingAutotuner.__init__)


@pytest.fixture
def function() -> Iterator[Callable[[Tensor], Tensor]]:
    copy = compat.own_copy(double)
    yield copy
    compat.forget([copy])


def test_graphs_and_why_there_is_more_than_one_are_told(function):
    assert compat.graph_count(function) == 0
    program = torch.compile(function, backend="eager", dynamic=False)
    program(torch.zeros(3))
    program(torch.zeros(3))
    assert compat.graph_count(function) == 1
    assert compat.recompile_reasons(function) == {}
    program(torch.zeros(4))
    first, second = compat.compiled_graphs(function)
    assert "size=[3]" in first.guards
    assert "size=[4]" in second.guards
    assert any(name.startswith("__compiled_fn") for name in second.code.co_names)
    (reason,) = compat.recompile_reasons(function).items()
    assert reason[0] == second.number
    assert "size mismatch" in reason[1]


def test_copies_share_no_graphs(function):
    other = compat.own_copy(double)
    torch.compile(function, backend="eager")(torch.zeros(3))
    assert (compat.graph_count(function), compat.graph_count(other), compat.graph_count(double)) == (1, 0, 0)


def test_graphs_go_with_their_owner(function):
    class Owner:
        pass

    owner = Owner()
    compat.forget_when_gone(owner, [function])
    torch.compile(function, backend="eager")(torch.zeros(3))
    assert compat.graph_count(function) == 1
    del owner
    gc.collect()
    assert compat.graph_count(function) == 0


def test_what_cannot_be_traced_and_what_cannot_be_compiled_raise_errors_of_their_own():
    def branch(x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    def fail(graph: Any, inputs: Any) -> Any:
        raise OSError("no space left")

    with pytest.raises(compat.DynamoError, match="from user code:") as caught:
        torch.compile(branch, fullgraph=True, backend="eager")(torch.ones(2))
    assert not isinstance(caught.value, compat.BackendError)
    with pytest.raises(compat.BackendError, match="no space left") as caught:
        torch.compile(lambda x: x + 1, fullgraph=True, backend=fail)(torch.ones(2))
    assert isinstance(caught.value, compat.DynamoError)


def test_what_one_backend_compiled_is_forgotten_and_no_more(function):
    def ours(module: torch.fx.GraphModule, _: Any) -> Any:
        return module

    other = compat.own_copy(double)
    torch.compile(function, backend=ours)(torch.zeros(3))
    torch.compile(other, backend="eager")(torch.zeros(3))
    assert [found.__code__ for found in compat.compiled_with(ours)] == [function.__code__]
    compat.forget_entries_of(ours)
    assert compat.compiled_with(ours) == []
    assert (compat.graph_count(function), compat.graph_count(other)) == (0, 1)
    compat.forget([other])


def test_graph_breaks_are_collected_each_time_and_only_inside():
    for _ in range(2):
        function = compat.own_copy(breaks)
        with compat.graph_breaks_logged() as messages:
            torch.compile(function, backend="eager")(torch.zeros(3))
        compat.forget([function])
        (message,) = messages
        assert "print" in message
        assert "test_compat.py" in message
    function = compat.own_copy(breaks)
    torch.compile(function, backend="eager")(torch.zeros(3))
    compat.forget([function])
    assert len(messages) == 1


def test_messages_about_cuda_graphs_are_collected():
    from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

    before = compat.cudagraph_skips()
    with compat.cudagraph_messages() as messages:
        log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to a test")
    assert messages == ["skipping cudagraphs due to a test"]
    assert compat.cudagraph_skips() == before + 1


def test_dynamo_watches_what_a_frame_calls_that_it_has_given_up_on():
    seen = []

    @torch.compile(backend="eager")
    def gives_up(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        seen.append(compat.dynamo_watches())
        return x

    assert not compat.dynamo_watches()
    gives_up(torch.zeros(3))
    assert seen == [True]
    assert not compat.dynamo_watches()


def test_a_module_says_whether_it_was_compiled_in_place():
    module = torch.nn.Linear(2, 2)
    assert not compat.is_compiled_in_place(module)
    module.compile(backend="eager")
    assert compat.is_compiled_in_place(module)


def test_a_process_that_was_not_forked_has_not_lost_cuda():
    assert modes.cuda_is_lost() is False


def test_modes_that_a_graph_would_bake_in_are_noticed():
    assert not compat.inside_torch_modes()
    with torch.device("cpu"):
        assert compat.inside_torch_modes()
    with compat.fake_tensors():
        assert compat.inside_torch_modes()
    assert not compat.inside_torch_modes()


class Mode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@contextmanager
def differentiated_forward() -> Iterator[None]:
    with torch.autograd.forward_ad.dual_level():
        yield


@pytest.mark.parametrize(
    ("context", "name"),
    [
        (Mode, "Mode"),
        (lambda: FlopCounterMode(display=False), "FlopCounterMode"),
        (compat.fake_tensors, "FakeTensorMode"),
        (differentiated_forward, "torch.autograd.forward_ad"),
        (lambda: torch.device("meta"), None),
        (torch.no_grad, None),
    ],
)
def test_what_sees_each_operation_has_a_name(context, name):
    assert compat.observer_of_operations() is None
    with torch.device("cpu"), context():
        assert compat.observer_of_operations() == name
    assert compat.observer_of_operations() is None


def test_transforms_and_tracing_have_a_name():
    seen = []

    def note(x: Tensor) -> Tensor:
        seen.append(compat.observer_of_operations())
        return x * 2

    torch.func.vmap(note)(torch.zeros(2))
    torch.func.grad(lambda x: note(x).sum())(torch.zeros(2))
    torch.jit.trace(note, torch.zeros(2), check_trace=False)
    assert seen == ["torch.func", "torch.func", "torch.jit.trace"]


def test_hooks_on_all_modules_are_noticed():
    assert not compat.hooks_on_all_modules()
    for register in (register_module_forward_hook, register_module_forward_pre_hook):
        handle = register(lambda *_: None)
        assert compat.hooks_on_all_modules()
        handle.remove()
        assert not compat.hooks_on_all_modules()


def test_fake_tensors_take_parameters_that_are_real():
    weight = torch.nn.Parameter(torch.zeros(5, 3))
    with compat.fake_tensors():
        out = torch.zeros(2, 3) @ weight.T
    assert out.shape == (2, 5)
    with pytest.raises(RuntimeError):
        out.tolist()


def test_fake_tensors_say_whether_they_share_memory():
    with compat.fake_tensors():
        whole, other = torch.empty(4), torch.empty(4)
        assert compat.storage_number(whole) == compat.storage_number(whole[2:]) != compat.storage_number(other)


def test_compiler_and_cache_are_where_inductor_looks(monkeypatch, tmp_path: Path):
    assert "++" in compat.cpp_compiler()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert compat.inductor_cache() == tmp_path


def test_inductor_tells_what_it_compiles_from_what_it_has_kept(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counts = [compat.compiled_anew()]
    for _ in range(2):
        compile_once(compat.own_copy(double), "inductor")
        counts.append(compat.compiled_anew())
    assert [count - counts[0] for count in counts] == [0, 1, 1]


def test_profiler_takes_what_makes_it_watch_all_threads():
    with profile(experimental_config=compat.profiling_all_threads(True)) as profiled:
        torch.zeros(3) + 1
    assert any("add" in event.name for event in profiled.events())


def test_hooks_that_rewrite_bytecode_see_nothing_of_the_block():
    seen = []
    handle = torch._dynamo.convert_frame.register_bytecode_hook(lambda old, new: seen.append(old.co_name))
    try:
        with compat.no_bytecode_hooks():
            compile_once(compat.own_copy(double), "eager")
        assert seen == []
        compile_once(compat.own_copy(double), "eager")
        assert seen == ["double"]
    finally:
        handle.remove()


def test_inductor_writes_what_it_makes_each_time_and_does_not_warn(tmp_path: Path):
    warned = Warned()
    logger = logging.getLogger("torch._inductor.debug")
    logger.addHandler(warned)
    try:
        for name in ("first", "again"):
            with compat.inductor_quiet():
                compile_once(compat.own_copy(double), "inductor", compat.traced_by_inductor(str(tmp_path / name)))
            (folder,) = (tmp_path / name / "torchinductor").iterdir()
            written = {file.name for file in folder.iterdir()}
            assert {"output_code.py", "inductor_provenance_tracking_node_mappings.json"} <= written
    finally:
        logger.removeHandler(warned)
    assert warned.records == []


def test_sizes_that_are_marked_dynamic_are_not_taken_for_one_another():
    """Equal ones at the first call, such as pages and rows, would be one symbol by the rule of duck shapes."""

    def sums(first: Tensor, second: Tensor, third: Tensor) -> list[Tensor]:
        return [double(tensor).sum() for tensor in (first, second, third)]

    copy = compat.own_copy(sums)
    program = torch.compile(copy, backend="eager", dynamic=False, fullgraph=True)
    for sizes in ((4, 4, 4), (4, 5, 4), (5, 4, 4), (7, 8, 9)):
        tensors = [torch.zeros(size) for size in sizes]
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, 0)
        program(*tensors)
    assert compat.graph_count(copy) == 1
    compat.forget([copy])


def test_stages_of_compiling_are_seen_from_another_thread():
    new = int.from_bytes(os.urandom(3), "big")  # no cache holds a kernel with this number

    def many(x: Tensor) -> Tensor:
        for number in range(40):
            x = torch.sin(x * number) + new
        return x

    seen: list[str] = []
    compiling, ended = threading.get_ident(), threading.Event()

    def watch() -> None:
        while not ended.wait(0.001):
            seen.append(compat.compiling_stage(compiling))

    watcher = threading.Thread(target=watch)
    watcher.start()
    compile_once(many, "inductor", {"fx_graph_cache": False})
    ended.set()
    watcher.join()
    found = list(dict.fromkeys(re.sub(r"\d+", "N", stage) for stage in seen if stage))
    known = ["decomposing operators", "rewriting the graph", "lowering operators", "writing kernels"]
    assert [stage for stage in found if stage in known[1:]] == known[1:]
    assert known[0] in found
    assert any(re.fullmatch(r"building kernels|kernel N of N", stage) for stage in found), found
    assert compat.compiling_stage(compiling) == compat.compiling_stage(0) == ""


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

    call = partial(compat.compiling_stage, threading.get_ident())
    for function in reversed(functions):
        call = calling(call, *function)
    assert call() == stage


def test_stages_are_named_by_functions_that_exist():
    """One that is renamed is no error: its stage is only not told any more."""
    for file, function in (*stages._STAGES, stages._CACHE):
        assert f"def {function}(" in (Path(stages._TORCH) / file).read_text(), file


# ---- nothing private is used anywhere else

# The dictionaries of `nn.Module`, and what Python names with an underscore.
NOT_PRIVATE = {"_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}
OF_PYTHON = {"_asdict", "_replace", "_fields", "_field_defaults", "_exit"}
# Other libraries' private parts, with tables and tests of their own.
ELSEWHERE = ("compat/huggingface.py", "wrapped_model.py", "flashinfer/")


def private_names(tree: ast.Module) -> set[str]:
    """`torch._x.y`, what is imported from there, and what is experimental, written out."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    names = {name for name in names if re.match(r"torch\.(.*\.)?(_[^_]|experimental)", name)}
    longest = {name for name in names if not any(other.startswith(f"{name}.") for other in names)}
    return {name for name in longest if not any(f"{name}.".startswith(f"{known}.") for known in DOCUMENTED)}


def private_attributes(tree: ast.Module, ours: set[str]) -> set[str]:
    """`x._y` for what is neither ours nor public."""
    found = {node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr)}
    return {ast.unparse(node) for node in found if node.attr not in ours | NOT_PRIVATE | OF_PYTHON} - {
        name for name in map(ast.unparse, found) if name.startswith("torch.")
    }


def our_attributes(trees: Iterable[ast.Module]) -> set[str]:
    """What our classes define: methods, fields, and what is set on `self`."""
    ours = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            ours |= {entry.name for entry in node.body if isinstance(entry, ast.FunctionDef)}
            ours |= {ast.unparse(entry.target) for entry in node.body if isinstance(entry, ast.AnnAssign)}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
            ours.add(node.attr)
    return ours


def sources() -> dict[str, ast.Module]:
    folders = [Path(str(package.__file__)).parent for package in (compiled_llm, compiled_llm_ops)]
    return {str(file): ast.parse(file.read_text()) for folder in folders for file in folder.rglob("*.py")}


def test_inductors_probe_of_vector_instructions_leaves_out_the_current_folder(tmp_path):
    compat.keep_probes_from_current_folder()
    (tmp_path / "ctypes.py").write_text("raise SystemExit('the current folder was imported from')")
    script = VecISA._avx_py_load
    assert "from ctypes import" in script
    assert "__lib_path__" in script
    command = [sys.executable, "-c", script.replace("__lib_path__", torch._C.__file__)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_inductor_tries_vector_instructions_with_is_built_once_in_a_new_cache(tmp_path, monkeypatch):
    built: list[tuple[str, str]] = []
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(VecISA, "check_build", lambda isa, code: built.append((str(isa), code)))

    def build() -> list[tuple[str, str]]:
        built.clear()
        compat.build_probes_early.__wrapped__()
        for thread in threading.enumerate():
            if thread.name == "compiled_llm vector instructions":
                thread.join()
        return [*built]

    names = set(cpu_vec_isa.x86_isa_checker())
    wanted = [isa for isa in cpu_vec_isa.supported_vec_isa_list if names.issuperset(str(isa).split())]
    assert [isa for isa, code in build() if code == VecISA._avx_code] == [str(isa) for isa in wanted]
    (tmp_path / "locks").mkdir()
    assert build() == []


def test_what_is_private_is_recognized():
    assert private_names(ast.parse("import torch\ntorch._C._len()")) == {"torch._C._len"}
    assert private_names(ast.parse("from torch.fx.experimental import _config")) == {"torch.fx.experimental._config"}
    assert private_names(ast.parse("from torch.nn import _x")) == {"torch.nn._x"}
    assert private_names(ast.parse("torch._dynamo.mark_dynamic(x, 0)\ntorch._dynamo.config.x = 1")) == set()
    assert private_names(ast.parse("torch._dynamo.mark_dynamically")) == {"torch._dynamo.mark_dynamically"}
    read = ast.parse("x._version + x._replace(a=1) + self._own + x._own + module._parameters")
    assert private_attributes(read, {"_own"}) == {"x._version"}


def test_private_parts_of_torch_are_used_in_one_room_only():
    found = sources()
    ours = our_attributes(found.values())
    used = {}
    for file, tree in found.items():
        private = private_names(tree)
        if not any(map(file.__contains__, ELSEWHERE)):
            private |= private_attributes(tree, ours)
        if private and "/compat/" not in file:
            used[file] = private
    assert used == {}


def test_inductor_knows_every_option_that_is_passed_to_it():
    """Some are passed on CUDA alone, which this machine may not have."""
    passed = {
        "triton.cudagraphs",
        "triton.enable_pdl",
        "combo_kernels",
        "coordinate_descent_tuning",
        "post_grad_custom_pre_pass",
    }
    assert passed <= set(torch._inductor.list_options())


def test_a_backend_learns_what_was_inlined():
    seen: list[frozenset[CodeType]] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(compat.traced_code())
        return module.forward

    torch.compile(lambda x: double(x) + 1, backend=backend)(torch.zeros(3))
    assert double.__code__ in seen[0]
    assert breaks.__code__ not in seen[0]
    assert compat.traced_code() == frozenset()
