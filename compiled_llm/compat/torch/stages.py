"""The stage of compilation in a thread, read off its stack: torch reports no progress while it compiles."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_TORCH = f"{Path(torch.__file__).parent}/"
_STAGES = {
    ("_inductor/codecache.py", "_precompile_header"): "compiling headers",
    ("_inductor/async_compile.py", "_wait_futures"): "building kernels",
    ("_inductor/async_compile.py", "cpp_pybinding"): "building kernels",
    ("_inductor/runtime/triton_heuristics.py", "coordinate_descent_tuning"): "tuning a kernel",
    ("_inductor/graph.py", "codegen"): "writing kernels",
    ("_inductor/graph.py", "codegen_with_cpp_wrapper"): "writing kernels",
    ("_inductor/graph.py", "run"): "lowering operators",
    ("_functorch/_aot_autograd/graph_compile.py", "aot_stage1_graph_capture"): "decomposing operators",
    ("_inductor/compile_fx.py", "compile_fx"): "rewriting the graph",
}
"""Functions of torch, by file and name, and what it does in them; the innermost one counts."""

_CACHE = ("_inductor/codecache.py", "load_with_key")
"""The function that looks for code in the cache, and loads what it finds."""


def compiling_stage(thread: int) -> str:
    """Return a running thread's stage of compilation, for example "writing kernels"; empty if it compiles nothing."""
    # Kernels are not counted: each region has its own, and how many follow is unknown.
    stage, frame = "", sys._current_frames().get(thread)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_TORCH):
            function = (code.co_filename.removeprefix(_TORCH), code.co_name)
            if function == _CACHE:
                return "reading the cache"
            stage = stage or _STAGES.get(function, "")
        frame = frame.f_back
    return stage
