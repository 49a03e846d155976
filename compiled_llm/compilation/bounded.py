"""A compiled function that goes on uncompiled once torch has compiled it as often as it will."""

# Dynamo compiles a function again for each new value that its graphs rely on, such as a number in a module's attribute,
# up to ``torch._dynamo.config.recompile_limit`` times. From then on it raises in every call that none of the graphs
# fits. It is not worth compiling for values that change that often.

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch

from compiled_llm.compat.torch.dynamo import (
    BackendError,
    DynamoError,
    RecompileLimitError,
    compile_whole,
    compiled_code,
    graph_count,
    reason_of,
)
from compiled_llm.compat.torch.gate import loading, tracing
from compiled_llm.compilation.artifacts.artifacts import NotInArtifactsError
from compiled_llm.compilation.backend import Inductor
from compiled_llm.compilation.torch_compile.compile_error import CompileError
from compiled_llm.compilation.torch_compile.compile_only import compiling_only, run_later

logger = logging.getLogger("compiled_llm.graphs")


class Bounded:
    """A program that is compiled until torch's limit is reached, and runs uncompiled from then on."""

    # A call checks the guards of what is compiled, and runs that code itself. What ``torch.compile`` returns is called
    # to compile, and to run nothing: it asks flags of the process, which another thread may have set.

    def __init__(
        self,
        function: Callable[..., Any],
        backend: Inductor,
        device: torch.device,
        falls_back: bool = True,
        name: str = "",
        ahead: str = "",
    ) -> None:
        """Compile at the first call; ``falls_back`` says whether the function, ``own_copy``'s, may run uncompiled."""
        # ``name`` and ``ahead`` are the program's, for the error if artifacts lack it.
        self._function, self._name, self._ahead = function, name, ahead
        self._backend, self._device, self._falls_back = backend, device, falls_back
        self._ran: dict[int, CodeType] = {}  # code whose kernels are loaded, by identity: to hash one takes long
        self.full = False  # whether torch's limit is reached
        self.uncompiled = 0  # how many calls have run uncompiled since

    def __call__(self, *arguments: Any) -> Any:
        """Run a graph that fits, or a new one, else the function itself, if it may, or raise CompileError."""
        if (code := self._code_for(arguments)) is None:
            self._check_falls_back()
            self.uncompiled += 1
            return self._function(*arguments)
        if self.has_run(code):
            return code(*arguments)
        with loading(self._device):
            result = code(*arguments)
        self._ran[id(code.__code__)] = code.__code__
        return result

    def has_run(self, code: Callable[..., Any]) -> bool:
        """Return whether compiled code has run here, so that its kernels are loaded and tuned."""
        return id(getattr(code, "__code__", None)) in self._ran

    def compile(self, *arguments: object) -> None:
        """Compile for these arguments, and run nothing; errors as those of a call."""
        if self._code_for(arguments) is None:
            self._check_falls_back()

    def _code_for(self, arguments: tuple[Any, ...]) -> FunctionType | None:
        """Return the code of a graph that fits, compiled now if there is none; None once torch compiles no more."""
        named = self._by_name(arguments)
        code = compiled_code(self._function, named)
        if code is not None or self.full:
            return code
        with tracing():
            if (code := compiled_code(self._function, named)) is None:  # no other thread has compiled it meanwhile
                self._compile(arguments)
                code = compiled_code(self._function, named)
        if code is None and not self.full:
            raise RuntimeError(f"torch.compile has left {self._function.__name__} uncompiled, and says no reason")
        return code

    def _compile(self, arguments: tuple[Any, ...]) -> None:
        try:
            with compiling_only():
                self._compiled(*arguments)
        except RecompileLimitError:
            self._note_limit()
        except BackendError as error:  # nothing in the model's forward
            if (missing := reason_of(error, NotInArtifactsError)) is not None:
                raise missing.of_program(self._name, self._ahead) from None
            raise
        except DynamoError as error:
            raise CompileError.of(self._function.__name__, error) from None

    def _check_falls_back(self) -> None:
        if not self._falls_back:
            raise RuntimeError(
                f"batch_invariant=True: {self._function.__name__} was compiled as often as torch does it "
                "(torch._dynamo.config.recompile_limit), because what it relies on keeps changing, and uncompiled it "
                "has other bits; keep what changes in a tensor, or call model.compiled.warmup() to compile for what "
                "holds now"
            )

    @functools.cached_property
    def _compiled(self) -> Callable[..., Any]:
        """The compiled function; to make it imports what traces, for which kept programs have no use."""
        return compile_whole(self._function, run_later(self._backend))

    def _by_name(self, arguments: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(self._function.__code__.co_varnames, arguments, strict=False))

    def _note_limit(self) -> None:
        self.full = True
        if not self._falls_back:  # an error says it
            return
        logger.warning(
            "compiled_llm: %s was compiled %d times, as often as torch does it (torch._dynamo.config.recompile_limit), "
            "because what it relies on keeps changing; it runs uncompiled whenever none of these graphs fits. Keep "
            "what changes in a tensor, or call model.compiled.warmup() to compile for what holds then; "
            "model.compiled.explain() says what has changed",
            self._function.__name__,
            graph_count(self._function),
        )
