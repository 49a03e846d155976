"""Inductor's kernels wait, its tilings are timed by us, and it has what starts change or have it do early."""

from __future__ import annotations

import inspect
import logging
import os
import re
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends import inductor as torchs_backend
from torch._inductor import async_compile, codecache, cpu_vec_isa
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.codegen.triton_combo_kernel import ComboKernel
from torch._inductor.cpu_vec_isa import VecISA
from torch._inductor.exc import CppCompileError
from torch._inductor.ir import TensorBox
from torch._inductor.lowering import lowerings
from torch._inductor.runtime import compile_tasks
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.utils import IndentedBuffer
from torch.fx import symbolic_trace

from compiled_llm.compat.torch import autotuning, dynamo, inductor
from compiled_llm.compilation.programs import begin_during_tracing
from support.compile_once import compile_once, double

pytestmark = pytest.mark.core


@pytest.mark.parametrize("overlaps", [False, True])
def test_kernels_wait_before_anything_else(overlaps):
    """A GPU runs what comes of it in `test_replay_gpu.py`."""
    inductor.make_kernels_wait_first()
    code, wait, launch = IndentedBuffer(), TritonKernel.GDC_WAIT, TritonKernel.GDC_LAUNCH
    for line in ("a = 1", "b = load(a)", wait, launch, "c = load(b)", wait, launch, "store(c)"):
        code.writeline(line)
    kernel = SimpleNamespace(GDC_WAIT=wait, GDC_LAUNCH=launch, _enable_pdl_codegen=lambda: overlaps)
    TritonKernel._filter_pdl(cast(TritonKernel, kernel), code)
    lines = code.getvalue().splitlines()
    waits = ([wait], []) if overlaps else ([], [wait])
    assert lines == [*waits[0], "a = 1", "b = load(a)", *waits[1], "c = load(b)", launch, "store(c)"]


@pytest.mark.parametrize(("early", "waits"), [(True, True), (False, True), (False, False), (True, False)])
def test_a_kernel_that_may_begin_early_and_does_not_wait_is_refused(early, waits):
    count, source = [0], f"triton_meta={{'enable_fp_fusion': True, {inductor.MAY_BEGIN_EARLY if early else ''}}}"

    def codegen() -> str:
        count[0] += waits
        return source

    checked = inductor.refusing_races(codegen, count)
    if early and not waits:
        with pytest.raises(RuntimeError, match="cannot be made to wait for it"):
            checked()
    else:
        assert checked() == source


@torch.library.custom_op("compiled_llm_tests::never_lowered", mutates_args=())
def never_lowered(left: Tensor, right: Tensor) -> Tensor:
    return left + right


@never_lowered.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return torch.empty_like(left)


@pytest.mark.parametrize("reads", [False, True])
def test_inductor_describes_an_op_only_if_its_log_is_read(monkeypatch, caplog, reads):
    """Descriptions of what leads to the op would double at each of the ops before it."""
    described, describe = [], TensorBox.__str__
    monkeypatch.setattr(TensorBox, "__str__", lambda box: described.append(box) or describe(box))
    lowerings.pop(torch.ops.compiled_llm_tests.never_lowered.default, None)

    def backend(module, inputs):
        return inductor.compile_with_inductor(module, inputs, {"fx_graph_cache": False})

    def doubled(left: Tensor) -> Tensor:
        return never_lowered(left, left)

    with caplog.at_level(logging.INFO if reads else logging.WARNING, "torch._inductor.graph"):
        torch.compile(doubled, backend=backend, fullgraph=True)(torch.ones(4))
    dynamo.forget([doubled])
    assert bool(described) == reads
    assert ("Creating implicit fallback for" in caplog.text and "args[1]: TensorBox" in caplog.text) == reads


def test_inductor_says_which_kernels_may_begin_early():
    """By the words that we look for, in what it writes while the two methods that we replace run."""
    inductor.make_kernels_wait_first()
    for kernels in (TritonKernel, ComboKernel):
        codegen = inspect.unwrap(kernels.codegen_kernel)
        assert kernels.codegen_kernel is not codegen
        assert "._filter_pdl(" in inspect.getsource(sys.modules[kernels.__module__])
    name = inductor.MAY_BEGIN_EARLY.split("'")[1]
    assert f'"{name}": ' in inspect.getsource(sys.modules[TritonKernel.__module__])


@pytest.mark.parametrize(
    ("device", "custom", "spills"), [("cpu", False, 0), ("cuda", True, 0), ("cuda", False, 8), ("cuda", False, None)]
)
def test_tilings_that_inductor_may_refuse_are_timed_by_inductor(device, custom, spills):
    """The others run on a GPU; `test_autotuning_gpu.py` has them."""
    kernel = SimpleNamespace(device_props=SimpleNamespace(type=device), custom_kernel=custom)
    given = (kernel, SimpleNamespace(n_spills=spills), 1, 2)
    assert autotuning.timed_in_a_graph(lambda *args: args)(*given) == given


def test_inductor_times_tilings_by_the_method_that_is_replaced():
    autotuning.time_kernels_in_graphs()
    own = inspect.unwrap(CachingAutotuner.bench)
    assert CachingAutotuner.bench is not own
    assert list(inspect.signature(own).parameters)[:3] == ["self", "launcher", "args"]
    assert "self.bench(launcher, *args, **kwargs)" in inspect.getsource(CachingAutotuner)
    assert "stream=stream" in inspect.getsource(own)
    assert callable(CachingAutotuner.clone_args)
    for attribute in ("device_props", "custom_kernel"):
        assert f"self.{attribute}" in inspect.getsource(CachingAutotuner.__init__)


def test_compiler_and_cache_are_where_inductor_looks(monkeypatch, tmp_path: Path):
    assert "++" in inductor.cpp_compiler()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert inductor.inductor_cache() == tmp_path


def test_what_a_backend_calls_changes_how_kernels_wait_and_how_their_tilings_are_timed(monkeypatch):
    changed: list[str] = []
    for change in ("make_kernels_wait_first", "time_kernels_in_graphs", "keep_probes_from_current_folder"):
        monkeypatch.setattr(inductor, change, partial(changed.append, change))
    monkeypatch.setattr(torch._inductor, "compile", lambda module, inputs, options: len(set(changed)))
    assert inductor.compile_with_inductor(symbolic_trace(double), [torch.zeros(3)], {}) == 3


def test_inductor_tells_what_it_compiles_from_what_it_has_kept(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counts = [inductor.compiled_anew()]
    for _ in range(2):
        compile_once(dynamo.own_copy(double), "inductor")
        counts.append(inductor.compiled_anew())
    assert [count - counts[0] for count in counts] == [0, 1, 1]


def test_inductor_writes_what_it_makes_each_time_and_does_not_warn(tmp_path, monkeypatch):
    warned: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("torch._inductor.debug"), "callHandlers", warned.append)
    for name in ("first", "again"):
        with inductor.inductor_quiet():
            compile_once(dynamo.own_copy(double), "inductor", inductor.traced_by_inductor(str(tmp_path / name)))
        (folder,) = (tmp_path / name / "torchinductor").iterdir()
        written = {file.name for file in folder.iterdir()}
        assert {"output_code.py", "inductor_provenance_tracking_node_mappings.json"} <= written
    assert warned == []


def test_inductors_probe_of_vector_instructions_leaves_out_the_current_folder(tmp_path):
    inductor.keep_probes_from_current_folder()
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
        inductor.build_probes_early.__wrapped__()
        for thread in threading.enumerate():
            if thread.name == "compiled_llm vector instructions":
                thread.join()
        return [*built]

    names = set(cpu_vec_isa.x86_isa_checker())
    wanted = [isa for isa in cpu_vec_isa.supported_vec_isa_list if names.issuperset(str(isa).split())]
    for said, built_for in ((None, wanted), (True, []), (False, [])):  # TORCHINDUCTOR_VEC_ISA_OK
        with torch._inductor.config.patch({"cpp.vec_isa_ok": said}):
            assert [isa for isa, code in build() if code == VecISA._avx_code] == [str(isa) for isa in built_for]
    (tmp_path / "locks").mkdir()
    with torch._inductor.config.patch({"cpp.vec_isa_ok": None}):
        assert build() == []


def test_inductor_knows_every_option_that_is_passed_to_it():
    """Some are passed on CUDA alone, which this machine may not have."""
    triton = {"triton.cudagraphs", "triton.enable_pdl", "combo_kernels"}
    assert triton | {"coordinate_descent_tuning", "post_grad_custom_pre_pass", "shape_padding"} <= set(
        torch._inductor.list_options()
    )


# ---- what starts with artifacts change, or have Inductor do early


@pytest.fixture
def ptxas(tmp_path, monkeypatch):
    """A file where Inductor looks for the ptxas of torch."""
    place = re.search(r"parents\[(\d)\]", inspect.getsource(compile_tasks._set_triton_ptxas_path))
    assert place is not None
    folders = [tmp_path / "a" / "b" / "c" / "tasks.py", *(tmp_path / "a" / "b" / "c" / "tasks.py").parents]
    ptxas = folders[int(place[1]) + 1] / "bin" / "ptxas"
    ptxas.parent.mkdir(parents=True)
    ptxas.touch(mode=0o755)
    monkeypatch.setattr(compile_tasks, "__file__", str(folders[0]))
    compile_tasks._set_triton_ptxas_path.cache_clear()
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    yield str(ptxas)
    os.environ.pop("TRITON_PTXAS_PATH", None)
    compile_tasks._set_triton_ptxas_path.cache_clear()


def test_the_ptxas_of_torch_is_chosen_where_inductor_looks_for_it(ptxas):
    inductor.choose_ptxas()
    assert os.environ["TRITON_PTXAS_PATH"] == ptxas


def test_the_ptxas_is_chosen_before_any_kernel_is_built(ptxas, monkeypatch):
    """Else Triton builds kernels of ours under one key in a first process, and under another in a second one."""
    at_start: list[str | None] = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: at_start.append(os.environ.get("TRITON_PTXAS_PATH")))
    begin_during_tracing(torch.device("cpu"), None)
    assert at_start == []
    assert "TRITON_PTXAS_PATH" not in os.environ
    begin_during_tracing(torch.device("cuda"), None)
    assert at_start == [ptxas]


def test_the_processes_that_build_kernels_are_those_of_torch_compile():
    assert "maybe_warm_pool()" in inspect.getsource(torchs_backend)


def test_no_header_is_compiled_where_kernels_are_built():
    real = codecache._precompile_header
    assert "_precompile_header(" in inspect.getsource(codecache.CppCodeCache.load_async)
    with inductor.without_precompiled_headers():
        assert codecache._precompile_header("header", "command") == ""
    assert codecache._precompile_header is real
    assert inductor.cannot_compile(CppCompileError(["g++"], "no"))
    assert not inductor.cannot_compile(RuntimeError())


def test_sources_are_hashed_and_vector_instructions_tried_on_threads(tmp_path, monkeypatch):
    names: list[str] = []
    for owner, name in [(codecache, "torch_key"), (cpu_vec_isa, "pick_vec_isa")]:
        monkeypatch.setattr(owner, name, lambda: names.append(threading.current_thread().name))
    for early, thread in [
        (inductor.hash_sources_early.__wrapped__, "compiled_llm sources"),
        (partial(inductor.try_vector_instructions_early, tmp_path), "compiled_llm vector instructions"),
    ]:
        names.clear()
        early()
        for running in threading.enumerate():
            if running.name == thread:
                running.join()
        assert names == [thread]
