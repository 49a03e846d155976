"""Inductor: called from a backend, its options, its compiler, and kernels that wait."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx
from torch._inductor.custom_graph_pass import (
    CustomGraphPass as CustomGraphPass,
    get_hash_for_files as get_hash_for_files,
)
from torch._logging._internal import LazyString

from compiled_llm.compat.forks import lock
from compiled_llm.compat.signals import interrupts_blocked
from compiled_llm.compat.torch.autotuning import let_inductor_time_alone, time_kernels_in_graphs
from compiled_llm.compat.torch.compilers import compile_to_the_end, compilers_uninterrupted
from compiled_llm.compat.torch.dynamo import drop
from compiled_llm.env import replaced

_NO_VARIABLES: Mapping[str, str] = {}


def traced_by_inductor(folder: str) -> dict[str, Any]:
    """Return options with which Inductor writes a graph's trace, in a new folder in ``folder/torchinductor``."""
    # Cached code is not written again, so Inductor is told to compile again.
    return {
        "trace.enabled": True,
        "trace.debug_dir": folder,
        "trace.provenance_tracking_level": 1,
        "fx_graph_cache": False,
    }


@contextmanager
def inductor_quiet() -> Iterator[None]:
    """Keep Inductor from warning of each folder that it writes a trace into."""
    logger = logging.getLogger("torch._inductor.debug")
    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


def compile_with_inductor(
    module: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile a graph by Inductor, as ``torch.compile`` would call it from inside a backend."""
    make_kernels_wait_first()
    describe_ops_for_readers_only()
    time_kernels_in_graphs()
    let_inductor_time_alone()
    keep_probes_from_current_folder()
    compile_to_the_end()
    with compilers_uninterrupted():
        return cast(Callable[..., Any], torch._inductor.compile(module, list(inputs), dict(options)))


@functools.cache
def make_kernels_wait_first() -> None:
    """Make each Inductor kernel that may begin before the previous one has ended wait for that one at once."""
    # Inductor leaves waiting out if a kernel does not read what the previous one writes. But that one may have begun
    # while earlier ones still ran, as kernels of ours do; it may even be writing memory that the next one overwrites.
    # This holds for all that the process compiles with that option from then on; it can only add waiting.
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.codegen.triton_combo_kernel import ComboKernel

    waits = [0]
    for kernels in (TritonKernel, ComboKernel):
        setattr(kernels, "codegen_kernel", refusing_races(kernels.codegen_kernel, waits))  # noqa: B010
    remove_repeated = TritonKernel._filter_pdl

    def wait_first(kernel: Any, code: Any) -> None:
        waits[0] += 1
        if kernel._enable_pdl_codegen():
            code._lines.insert(0, kernel.GDC_WAIT)
        remove_repeated(kernel, code)

    setattr(TritonKernel, "_filter_pdl", wait_first)  # noqa: B010


@functools.cache
def describe_ops_for_readers_only() -> None:
    """Let Inductor describe an op that it has no lowering for when its log is read, as torch 2.13 does."""
    # A description has those of the op's arguments in it, each with those of what led to it. Where ops follow each
    # other, as in decode steps, that grows exponentially: a decode step of four layers was lowered for three minutes,
    # and with 28 layers ``mode="reduce-overhead"``, which compiles all of them as one graph, had not begun after nine.
    from torch._inductor.exc import MissingOperatorWithDecomp, MissingOperatorWithoutDecomp

    if torch.__version__ >= (2, 13):  # type: ignore[operator]
        return
    for issue in (MissingOperatorWithDecomp, MissingOperatorWithoutDecomp):
        setattr(issue, "operator_str", _read_later(issue.operator_str))  # noqa: B010


def _read_later(describe: Callable[..., str]) -> Callable[..., object]:
    return lambda *op: LazyString(describe, *op)


def refusing_races(codegen: Callable[..., str], waits: list[int]) -> Callable[..., str]:
    """Return Inductor's ``codegen`` of a kernel, which raises if that may begin early and was not made to wait."""
    # A torch that no longer calls ``_filter_pdl`` would leave kernels to race, now and then and without a message. The
    # first entry of ``waits`` counts the kernels that were made to wait.

    @functools.wraps(codegen)
    def checked(*args: object, **kwargs: object) -> str:
        before = waits[0]
        source = codegen(*args, **kwargs)
        if MAY_BEGIN_EARLY in source and waits[0] == before:
            raise RuntimeError(
                f"kernels that torch {torch.__version__} compiles may begin before the previous one has ended, and "
                "cannot be made to wait for it; install a torch that compiled_llm was tested with"
            )
        return source

    return checked


MAY_BEGIN_EARLY = "'launch_pdl': True"
"""The words in the source of a kernel that CUDA may launch before the previous one has ended."""


@functools.cache
def keep_probes_from_current_folder() -> None:
    """Let the Python that Inductor starts to try vector instructions import nothing from the current folder."""
    # ``python -c`` looks there first: a ``ctypes.py`` in it would run, and vector instructions would count as missing.
    from torch._inductor.cpu_vec_isa import VecISA

    script = getattr(VecISA, "_avx_py_load", "")
    setattr(VecISA, "_avx_py_load", f"import sys\nsys.path[:] = filter(None, sys.path)\n{script}")  # noqa: B010


@functools.cache
def build_probes_early() -> None:
    """Begin to build, on a thread, Inductor's test programs for vector instructions, if its cache is new."""
    # Inductor builds these programs one after the other, while nothing else runs, in the midst of compiling. The thread
    # only puts them where Inductor looks for them; its own findings are ignored. It can end once Inductor ships these
    # programs, or builds them in parallel with other work.
    if (inductor_cache() / "locks").exists():
        return
    from torch._inductor import codecache, config, cpp_builder, cpu_vec_isa  # noqa: F401 (imports in two threads may cross)

    keep_probes_from_current_folder()
    common = ["_avx_code"] if config.cpp.vec_isa_ok is None else []  # else it is said: TORCHINDUCTOR_VEC_ISA_OK

    def build() -> None:
        # No thread waits for it, and Inductor says what is wrong when it needs them.
        with suppress(Exception), compilers_uninterrupted():
            names = set(cpu_vec_isa.x86_isa_checker())
            for isa in cpu_vec_isa.supported_vec_isa_list:
                if names.issuperset(str(isa).split()):
                    for name in (*common, *(name for name in vars(type(isa)) if name.endswith("_code"))):
                        isa.check_build(getattr(isa, name))

    threading.Thread(target=build, name="compiled_llm vector instructions", daemon=True).start()


@functools.cache
def hash_sources_early() -> None:
    """Begin to hash, on two threads, the sources of torch, and those of Triton with its library."""
    # They are part of the key of each graph in Inductor's cache, which takes a second for them once a graph is traced.
    # The threads let tracing begin meanwhile. They can end once Inductor goes by versions.
    from torch._inductor import codecache  # on this thread: imports in two may cross
    from torch._inductor.runtime import triton_compat

    def hash_sources(of: Callable[[], object]) -> None:
        with suppress(Exception):  # no thread waits for it, and Inductor says what is wrong when it hashes them itself
            of()

    for key in (codecache.torch_key, triton_compat.triton_key):
        threading.Thread(target=hash_sources, args=(key,), name="compiled_llm sources", daemon=True).start()


def choose_ptxas() -> None:
    """Make Triton assemble with torch's own ptxas from now on, if torch brings one (TRITON_PTXAS_PATH)."""
    # Inductor sets that once it loads a kernel of Triton's in this process, and does not as long as it has processes of
    # its own that do so. The version of ptxas is part of each kernel's key; so without this it would depend on the
    # speed of those processes under which keys our own kernels are kept, and looked for.
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

    _set_triton_ptxas_path()


def start_processes_early() -> None:
    """Start Inductor's processes that build Triton's kernels, as ``torch.compile`` does for its own backend."""
    # A backend of one's own gets them with the first graph, whose kernels Inductor then builds one after the other in
    # this process, until they are ready. TORCH_WARM_POOL=0 leaves them to that, TORCHINDUCTOR_COMPILE_THREADS=1 out.
    from torch._inductor.async_compile import maybe_warm_pool

    with interrupts_blocked():  # until they ignore Ctrl-C themselves, which would leave Inductor a pool that is closed
        maybe_warm_pool()


def try_vector_instructions_early(folder: Path, variables: Mapping[str, str] = _NO_VARIABLES) -> None:
    """Begin to try vector instructions, on a thread, with programs that were built in a folder of artifacts."""
    # Inductor starts a Python for them that imports torch, and waits for it, before it loads the first C++ kernel. A
    # caller that takes a graph from the folder waits for the thread.
    from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # noqa: F401 (imports in two threads may cross)

    keep_probes_from_current_folder()

    def try_them() -> None:
        with suppress(Exception), compilers_uninterrupted(), inductor_cache_at(folder, variables):  # as above
            cpu_vec_isa.pick_vec_isa()

    threading.Thread(target=try_them, name="compiled_llm vector instructions", daemon=True).start()


def cpp_compilers() -> list[str]:
    """Return the names of the C++ compilers that Inductor looks for."""
    from torch._inductor import config

    candidates = config.cpp.cxx if isinstance(config.cpp.cxx, (list, tuple)) else (config.cpp.cxx,)
    return list(dict.fromkeys(name for name in (*candidates, "g++", "clang++") if name))


def cpp_compiler() -> str:
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


def default_inductor_cache() -> Path | None:
    """Return the folder of Inductor's cache if the environment names none; None if it names one."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = default_cache_dir()
    return Path(folder) if os.environ.get("TORCHINDUCTOR_CACHE_DIR", folder) == folder else None


def inductor_cache() -> Path:
    """Return the folder of Inductor's cache."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def cache_variables(folder: Path) -> dict[str, str]:
    """Return the environment in which Inductor, and Triton for it, keep all their files in a folder."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}


@contextmanager
def inductor_cache_at(folder: Path, variables: Mapping[str, str] = _NO_VARIABLES) -> Iterator[str]:
    """Let Inductor look for code in this folder alone while the block runs; one thread after the other.

    Yields where the environment says at other times that Triton's cache is; an empty text if it does not.
    """
    # Inductor reads the place from the environment each time, here and in the processes that it starts, and from
    # nowhere else. Code that another thread compiles meanwhile, outside such a block, lands in the folder as well.
    # ``variables`` are set meanwhile, too.
    import torch._dynamo.package  # noqa: F401 (remembers the place that it finds when it is imported)

    with _one_cache:
        own = os.environ.get("TRITON_CACHE_DIR", "")
        with replaced({**cache_variables(folder), **variables}):
            yield own


_one_cache = lock()


@contextmanager
def without_precompiled_headers() -> Iterator[None]:
    """Keep Inductor from compiling a header while the block looks for C++ kernels that are built."""
    # It has the compiler preprocess that header first, each time and for seconds, to see whether it has changed.
    # Neither the kernels' keys nor their code depend on it.
    from torch._inductor import codecache

    precompile = codecache._precompile_header
    setattr(codecache, "_precompile_header", lambda *args, **kwargs: "")  # noqa: B010
    try:
        yield
    finally:
        setattr(codecache, "_precompile_header", precompile)  # noqa: B010


def cannot_compile(error: BaseException) -> bool:
    """Return whether Inductor raised this error because a C++ compiler has failed."""
    from torch._inductor.exc import CppCompileError

    return isinstance(error, CppCompileError)


def uncached_graphs() -> int:
    """Return how many graphs of this process Inductor has compiled and cannot keep."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["fxgraph_cache_bypass"] + counters["aot_autograd"]["autograd_cache_bypass"])


def compiled_anew() -> int:
    """Return how many graphs Inductor has compiled so far in this process, without those from its cache."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"])
