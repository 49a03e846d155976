"""Inductor with no C++ compiler: for tests of what it writes and keeps, not of what its kernels compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import fx
from torch._inductor.async_compile import AsyncCompile

from compiled_llm.compilation import backend


def leave_kernels_unbuilt(patch: pytest.MonkeyPatch) -> None:
    """Let Inductor write its code for each graph, and keep it, and run the graph itself: building takes most time."""
    compile_with_inductor = backend.compile_with_inductor

    def written(module: fx.GraphModule, inputs: Any, options: Any) -> Callable[..., Any]:
        compile_with_inductor(module, inputs, options)
        return module.forward

    patch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: None)
    patch.setattr(backend, "compile_with_inductor", written)
