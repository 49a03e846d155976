"""Dynamo's compiled code of a function, why it exists, and whether it is still valid."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, get_eval_frame_callback
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException

if TYPE_CHECKING:
    from torch._guards import Guard


RecompileLimitError = FailOnRecompileLimitHit
"""A function compiled with ``fullgraph=True`` was compiled as often as torch does it, and no graph fits."""

DynamoError = TorchDynamoException  # a function cannot be compiled

BackendError = BackendCompilerFailed
"""A ``DynamoError``: the function was traced, and what compiles its graph has failed."""

F = TypeVar("F", bound=Callable[..., Any])
E = TypeVar("E", bound=BaseException)
T = TypeVar("T")


def dynamo_watches() -> bool:
    """Return whether this thread's calls are compiled, though this frame is not: Dynamo may have given this one up."""
    return callable(get_eval_frame_callback())


def switched_off() -> str | None:
    """Return what keeps ``torch.compile`` from compiling for us in this process, as users write it, or None."""
    if torch._dynamo.config.disable:
        return "TORCH_COMPILE_DISABLE=1 (torch._dynamo.config.disable)"
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "TORCHDYNAMO_DISABLE=1"
    return off_by_stance()


def off_by_stance() -> str | None:
    """Return the stance (``torch.compiler.set_stance``) that runs functions uncompiled, or compiles them otherwise."""
    from torch._dynamo import eval_frame

    stance = eval_frame._stance
    if stance.backend is not None:
        return f"torch.compiler.set_stance(force_backend={stance.backend!r})"
    if stance.stance in ("default", "fail_on_recompile"):
        return None
    return f"torch.compiler.set_stance({stance.stance!r})"


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called, so that calls of the module run compiled code."""
    return vars(module).get("_compiled_call_impl") is not None


def own_copy(function: F) -> F:
    """Return the function with a code object of its own."""
    # Dynamo keeps what it compiled on the code object; without a copy, two models would share one cache, its limit, and
    # each other's guards.
    assert isinstance(function, FunctionType)
    code: CodeType = function.__code__.replace()
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy  # type: ignore[return-value]


def forget_when_gone(owner: object, functions: Sequence[Callable[..., Any]]) -> None:
    """Free the graphs of functions made by ``own_copy`` once ``owner`` is gone; Dynamo itself never forgets code."""
    weakref.finalize(owner, forget, list(functions)).atexit = False


def forget(functions: list[Callable[..., Any]]) -> None:
    """Free the graphs of functions made by ``own_copy``."""
    from torch._dynamo.eval_frame import remove_from_cache

    for function in functions:
        remove_from_cache(function)


def compile_whole(function: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.compile`` of a function that must be one graph, of which Dynamo keeps nothing once it is gone."""
    # Dynamo remembers each backend for as long as the process lives, only to call its ``reset``, and with ours all that
    # it refers to: a model's tensors and pages. Compiled code keeps its own backend alive.
    from torch._dynamo.eval_frame import cached_backends

    with _asked_of_own_thread():
        compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False, backend=backend)
    for key, remembered in list(cached_backends.items()):
        if getattr(remembered, "compiler_fn", None) is backend:
            del cached_backends[key]
    return compiled


@contextmanager
def _asked_of_own_thread() -> Iterator[None]:
    """Let what ``torch.compile`` returns in the block raise only if its own thread traces with ``torch.fx``."""
    # It asks a flag of the process, which AOTAutograd sets in each compilation of any thread: a call of another one
    # would be refused. It takes the function that answers along.
    from torch.fx import _symbolic_trace

    asked = _symbolic_trace.is_fx_symbolic_tracing

    def traces_here() -> bool:
        return asked() and torch._C._len_torch_dispatch_stack() > 0

    setattr(_symbolic_trace, "is_fx_symbolic_tracing", traces_here)  # noqa: B010
    try:
        yield
    finally:
        setattr(_symbolic_trace, "is_fx_symbolic_tracing", asked)  # noqa: B010


def dynamo_alone() -> AbstractContextManager[object]:
    """Return a context in which no other thread compiles: Dynamo holds this lock while it does, ``torch.fx`` too."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


def is_traced() -> bool:
    """Return whether this call is traced, by Dynamo or by an export of this thread."""
    # ``torch.compiler.is_compiling`` says so of the process: from torch 2.13 on it is true in all threads while one of
    # them traces. Dynamo takes the first question for a constant.
    return torch.compiler.is_dynamo_compiling() or _exports_here()


def _exports_here() -> bool:
    from torch._guards import TracingContext

    return torch.compiler.is_exporting() and TracingContext.try_get() is not None


def leave_unguarded(attributes: Collection[str]) -> None:
    """Let the code that a backend is called for stay valid whatever becomes of these attributes, or if they appear.

    It also stays valid if a module without hooks gets some, as torch has it by ``skip_nnmodule_hook_guards``.
    """
    # ``torch.compile`` takes a filter of guards, and then builds all of them twice: a twelfth of what tracing takes.
    from torch._guards import TracingContext

    if (context := TracingContext.try_get()) is not None:
        guards = context.guards_context.dynamo_guards
        # From 2.15 on, torch guards them nevertheless where a module's own ``__call__`` calls that of ``nn.Module``.
        without_hooks = {guard.name for guard in guards if guard.create_fn_name() == "EMPTY_NN_MODULE_HOOKS_DICT"}
        guards.inner = type(guards.inner)(
            guard for guard in guards if guard.name not in without_hooks and _guarded_attribute(guard) not in attributes
        )


def _guarded_attribute(guard: Guard) -> str:
    """Return the name of the attribute whose value or absence a guard is about; any text for other guards."""
    absent = getattr(guard.create_fn, "keywords", {}).get("attr")
    return str(absent or guard.name.rpartition(".")[2])


def _entries(function: Callable[..., Any]) -> list[Any]:
    """Return what Dynamo has compiled for a function."""
    return list(_debug_get_cache_entry_list(function.__code__))


def graph_count(function: Callable[..., Any]) -> int:
    """Return how many graphs Dynamo holds for a function made by ``own_copy``."""
    return len(_entries(function))


def forget_entries_of(backend: Callable[..., Any]) -> None:
    """Free code that was compiled with ``backend`` and no other, wherever Dynamo keeps it."""
    # A graph break makes Dynamo compile the functions on the way to it one by one, and keep that on their code objects.
    # A function that has been compiled with other backends too keeps all of it: ours never serves their calls.
    from torch._dynamo.eval_frame import remove_from_cache

    for function, entries in _functions_with_entries():
        if all(_backend_of(entry) is backend for entry in entries):
            remove_from_cache(function)


def compiled_with(backend: Callable[..., Any]) -> list[FunctionType]:
    """Return the functions that have been compiled with ``backend``, those that Dynamo made itself included."""
    found = [
        function for function, entries in _functions_with_entries() if any(_backend_of(e) is backend for e in entries)
    ]
    return list({function.__code__: function for function in found}.values())


def _functions_with_entries() -> Iterator[tuple[FunctionType, list[Any]]]:
    for function in [entry for entry in gc.get_objects() if type(entry) is FunctionType]:
        if entries := _entries(function):
            yield function, entries


def _backend_of(entry: Any) -> object:
    return getattr(entry.backend, "compiler_fn", entry.backend)


@contextmanager
def graph_breaks_logged() -> Iterator[list[str]]:
    """Collect Dynamo's messages about each graph break while the block runs."""
    # It goes to the structured trace, which unlike the log of graph breaks repeats itself in a second run. Functions
    # compiled one by one are as many as a model has layers, which the usual limits would cut short.
    collector = _GraphBreaks()
    trace = logging.getLogger("torch.__trace")
    skipped_frames = logging.getLogger("torch._dynamo.convert_frame.__graph_breaks")
    before = trace.level, trace.propagate, skipped_frames.level
    trace.addHandler(collector)
    trace.setLevel(logging.DEBUG)
    trace.propagate = False
    skipped_frames.setLevel(logging.DEBUG)  # only then does it write to the trace
    skipped_frames.addFilter(drop)
    try:
        with torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=8192):
            yield collector.messages
    finally:
        trace.removeHandler(collector)
        trace.setLevel(before[0])
        trace.propagate = before[1]
        skipped_frames.setLevel(before[2])
        skipped_frames.removeFilter(drop)


def drop(record: logging.LogRecord) -> bool:
    """A filter that lets nothing through."""
    return False


class _GraphBreaks(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        artifact = getattr(record, "metadata", {}).get("artifact", {})
        if artifact.get("name") == "dynamo_graph_break_reason":
            self.messages.append(str(getattr(record, "payload", "")))


class CompiledGraph(NamedTuple):
    """One graph that Dynamo holds for a function."""

    number: str  # Dynamo's name for it, "frame/attempt"
    guards: str  # one a line, as Dynamo prints them
    code: CodeType  # the bytecode that runs in the function's place


def compiled_graphs(function: Callable[..., Any]) -> list[CompiledGraph]:
    """Return the graphs that Dynamo holds for a function made by ``own_copy``, oldest first."""
    graphs = [
        CompiledGraph(str(entry.compile_id), str(entry.guard_manager), entry.code) for entry in _entries(function)
    ]
    return sorted(graphs, key=lambda graph: [int(part) for part in graph.number.split("/")])


class NotCompiledError(RuntimeError):
    """A function has no code for arguments that it was compiled for before: something has changed meanwhile."""

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: dict[str, Any]) -> NotCompiledError:
        """Return the error, with the guards that do not hold."""
        failed = [entry.guard_manager.check_verbose(arguments).verbose_code_parts for entry in _entries(function)]
        return cls(
            f"{function.__name__} was not compiled for these arguments, or they have changed since; of its "
            f"{len(failed)} graphs these guards do not hold: {failed}"
        )


def is_compiled_for(function: Callable[..., Any], arguments: dict[str, Any]) -> bool:
    """Return whether Dynamo has compiled code of a function made by ``own_copy`` for these arguments."""
    return compiled_code(function, arguments) is not None


def compiled_code(function: Callable[..., Any], arguments: dict[str, Any]) -> FunctionType | None:
    """Return the code of a function of ``own_copy``'s for arguments by name, which it takes in order; None if none."""
    # It checks no guards: those hold now. To call the function would check them again.
    for entry in _entries(function):
        if entry.guard_manager.check(arguments):
            whole = cast(FunctionType, function)
            return FunctionType(entry.code, whole.__globals__, whole.__name__, whole.__defaults__, whole.__closure__)
    return None


def guards_for(function: Callable[..., Any], arguments: dict[str, Any]) -> Callable[[dict[str, Any]], bool]:
    """Return Dynamo's check before it runs the code for ``arguments``, by name, of a function of ``own_copy``'s."""
    # The function was called with them before; NotCompiledError if Dynamo has no code for them.
    for entry in _entries(function):
        check: Callable[[dict[str, Any]], bool] = entry.guard_manager.check
        if check(arguments):
            return check
    raise NotCompiledError.of(function, arguments)


def traced_code() -> frozenset[CodeType]:
    """Return the code of all functions that Dynamo has inlined into the graph that a backend is called with."""
    from torch._dynamo.utils import get_traced_code

    return frozenset(get_traced_code() or ())


def before_tracing(value: T) -> T | FunctionType:
    """Return the method of ``nn.Module`` that torch has put a function in place of; any other value as it is.

    Dynamo's first trace in a process does so for good, and ``torch.fx`` in all threads while one of them traces, as
    AOTAutograd does in each compilation.
    """
    if not isinstance(value, FunctionType):
        return value
    if value.__globals__.get("__name__") == "torch.fx._symbolic_trace":
        of_module: FunctionType = vars(value).get("__wrapped__", value)
        return of_module
    if value.__module__ != "torch._dynamo.mutation_guard":
        return value
    held = (cell.cell_contents for cell in value.__closure__ or ())
    return next((content for content in held if isinstance(content, FunctionType)), value)


def is_taken_as_constant(function: FunctionType) -> bool:
    """Return whether Dynamo calls a function while it traces, and looks neither into it nor at it again."""
    return bool(vars(function).get("_dynamo_marked_constant"))


def marks_of(function: FunctionType) -> list[str]:
    """Return what Dynamo was told to do with a function: to trace another one, to call it, or not to trace it."""
    from torch._dynamo import trace_rules

    names = ("_polyfilled_function_ids", "_allowed_callable_ids", "_disallowed_callable_ids", "_leaf_function_ids")
    marks = {name: getattr(trace_rules, name, None) for name in (*names, "_nonstrict_trace_callable_ids")}
    return [name for name, marked in marks.items() if id(function) in (getattr(marked, "function_ids", None) or ())]


def recompile_reasons(function: Callable[..., Any]) -> dict[str, str]:
    """Return why a function made by ``own_copy`` was compiled again, by graph; Dynamo keeps the last 64 compiles."""
    from torch._dynamo.utils import get_compilation_metrics

    frames = {graph.number.partition("/")[0] for graph in compiled_graphs(function)}
    return {
        str(metric.compile_id): metric.recompile_reason
        for metric in get_compilation_metrics()
        if metric.recompile_reason and str(metric.compile_id).partition("/")[0] in frames
    }


def tracing_seconds(functions: Sequence[Callable[..., Any]]) -> float:
    """Return how long Dynamo took over functions of ``own_copy``'s, of its last 64 compiles, without their backend."""
    from torch._dynamo.utils import get_compilation_metrics

    ours = {str(entry.compile_id) for function in functions for entry in _entries(function)}
    metrics = [metric for metric in get_compilation_metrics() if str(metric.compile_id) in ours]
    whole = sum(metric.entire_frame_compile_time_s or 0.0 for metric in metrics)
    return whole - sum(metric.backend_compile_time_s or 0.0 for metric in metrics)


def reason_of(error: BaseException, kind: type[E]) -> E | None:
    """Return the error of a kind that made a backend fail, unwrapped from Dynamo's and Inductor's errors."""
    while isinstance(error, BackendCompilerFailed):
        error = error.inner_exception
    return error if isinstance(error, kind) else None


@contextmanager
def no_bytecode_hooks() -> Iterator[None]:
    """Keep hooks that rewrite Dynamo's bytecode, such as depyf's, from seeing the block's."""
    # The code of depyf 0.20 in place of a function that uses ``super()`` after a graph break does not run.
    from torch._dynamo import convert_frame

    hooks = convert_frame._bytecode_hooks
    before = dict(hooks)
    hooks.clear()
    try:
        yield
    finally:
        hooks.update(before)
