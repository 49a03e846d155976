"""Private parts of torch that we depend on, one function each.

| what | for | ends when |
| --- | --- | --- |
| ``cudagraph_trees._initialize_tls`` / ``local`` | cudagraph trees on a thread of ours | torch < 2.13 is dropped |
| ``eval_frame.remove_from_cache`` | freeing a dropped model's graphs | Dynamo forgets code that nobody holds |
| ``eval_frame._debug_get_cache_entry_list`` | counting a function's graphs | torch reports them per function |
| the entries' ``guard_manager.check`` | guards without a call | torch checks them for those who replay a graph |
| ``cudagraph_trees.get_container`` | counting recordings | torch reports them |
| the ``torch.__trace`` logger | collecting graph breaks | ``torch._dynamo.explain`` no longer resets Dynamo |
| the logger of ``cudagraph_utils`` | why CUDA graphs were skipped | torch reports it per function |
| ``torch._C._len_torch_function_stack``, ``…dispatch_stack`` | noticing modes | torch says it publicly |
| ``utils.get_compilation_metrics`` | why something recompiled | torch reports it per function |
| ``convert_frame._bytecode_hooks`` | explaining under depyf's hook | depyf's code always runs |
| Inductor's ``trace`` options, the logger of ``_inductor.debug`` | its code, kernels by node | an API gives them |
| ``custom_graph_pass`` of Inductor | a pass of ours in its graphs | torch documents it |
| ``torch._inductor.compile`` inside a backend | passes of ours, and pieces, before Inductor | torch documents it |
| ``TritonKernel._filter_pdl`` of Inductor | kernels that wait before they touch memory | Inductor's always do |
| ``torch._dispatch.python`` | running a graph on symbolic sizes | torch propagates a graph's sizes in public |
| ``example_value`` and ``FakeTensor.fake_mode`` | which parameter a graph input is; caching a piece | a graph says it |
| ``UntypedStorage._cdata`` | which fake tensors share memory | fake tensors have addresses |
| ``torch._C._storage_Use_Count`` | whether a weight's memory is nobody else's | storages say it |
| ``_subclasses.FakeTensorMode``, ``utils._pytree`` | running a model without computing | torch documents it |
| ``cpp_builder``, ``cache_dir_utils`` of Inductor | what ``doctor`` shows | torch reports it |
| ``_C._profiler._ExperimentalConfig`` | profiling all threads | ``torch.profiler.profile`` takes it by name |
"""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
from torch._inductor.custom_graph_pass import get_hash_for_files as get_hash_for_files
from torch._subclasses.fake_tensor import FakeTensor

F = TypeVar("F", bound=Callable[..., Any])


def adopt_cudagraph_trees() -> None:
    """Give the current thread cudagraph trees of its own.

    Before pytorch#184357 (torch 2.13) only the thread that first imported the module had them, and a call from any
    other failed an assertion.
    """
    from torch._inductor import cudagraph_trees

    local = cudagraph_trees.local
    if not hasattr(local, "tree_manager_containers"):
        local.tree_manager_containers = {}
        local.tree_manager_locks = defaultdict(Lock)


def prepare_cudagraph_trees() -> None:
    """Let the calling thread be the one that imports cudagraph trees, and so keep them for the user's own graphs.

    Before torch 2.13 only the importing thread has them; ours get theirs from ``adopt_cudagraph_trees``.
    """
    importlib.import_module("torch._inductor.cudagraph_trees")


def inside_torch_modes() -> bool:
    """Return whether this thread is inside modes that a graph would bake in, such as ``with torch.device(...)``."""
    inside: bool = torch._C._len_torch_function_stack() > 0 or torch._C._len_torch_dispatch_stack() > 0
    return inside


def own_copy(function: F) -> F:
    """Return the function with a code object of its own.

    Dynamo keeps what it compiled on the code object; without a copy, two models would share one cache, its limit, and
    each other's guards.
    """
    assert isinstance(function, FunctionType)
    code: CodeType = function.__code__.replace()
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy  # type: ignore[return-value]


def forget_when_gone(owner: object, functions: Sequence[Callable[..., Any]]) -> None:
    """Free the graphs of functions made by ``own_copy`` once ``owner`` is gone; Dynamo itself never forgets code."""
    weakref.finalize(owner, _forget, list(functions)).atexit = False


def _forget(functions: list[Callable[..., Any]]) -> None:
    from torch._dynamo.eval_frame import remove_from_cache

    for function in functions:
        remove_from_cache(function)


def graph_count(function: Callable[..., Any]) -> int:
    """Return how many graphs Dynamo holds for a function made by ``own_copy``."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    return len(_debug_get_cache_entry_list(function.__code__))


def cudagraph_skips() -> int:
    """Return how often Inductor has skipped cudagraphs so far in this process."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])


def cudagraph_recordings(device: torch.device) -> int:
    """Return how many CUDA graphs the current thread's trees have recorded; call it on the thread that replays."""
    if device.type != "cuda":
        return 0
    from torch._inductor import cudagraph_trees

    manager = cudagraph_trees.get_container(device.index or 0).tree_manager
    return 0 if manager is None else _nodes(manager)


def _nodes(manager: Any) -> int:
    """Count the recorded nodes of all trees."""
    pending = [node for roots in manager.roots.values() for node in roots]
    count = 0
    while pending:
        node = pending.pop()
        count += 1
        pending.extend(child for children in node.children.values() for child in children)
    return count


def forget_entries_of(backend: Callable[..., Any]) -> None:
    """Free what was compiled with ``backend`` and nothing else, wherever Dynamo keeps it.

    A graph break makes Dynamo compile the functions on the way to it one by one, and keep that on their code objects.
    A function that has been compiled with other backends too keeps everything: ours never serves their calls.
    """
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
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    for function in [entry for entry in gc.get_objects() if type(entry) is FunctionType]:
        if entries := _debug_get_cache_entry_list(function.__code__):
            yield function, entries


def _backend_of(entry: Any) -> Any:
    return getattr(entry.backend, "compiler_fn", entry.backend)


@contextmanager
def graph_breaks_logged() -> Iterator[list[str]]:
    """Collect what Dynamo says of each graph break while the block runs.

    It goes to the structured trace, which unlike the log of graph breaks repeats itself in a second run. Functions
    compiled one by one are as many as a model has layers, which the usual limits would cut short.
    """
    collector = _GraphBreaks()
    trace = logging.getLogger("torch.__trace")
    skipped_frames = logging.getLogger("torch._dynamo.convert_frame.__graph_breaks")
    before = trace.level, trace.propagate, skipped_frames.level
    trace.addHandler(collector)
    trace.setLevel(logging.DEBUG)
    trace.propagate = False
    skipped_frames.setLevel(logging.DEBUG)  # only then does it write to the trace
    skipped_frames.addFilter(_drop)
    try:
        with torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=8192):
            yield collector.messages
    finally:
        trace.removeHandler(collector)
        trace.setLevel(before[0])
        trace.propagate = before[1]
        skipped_frames.setLevel(before[2])
        skipped_frames.removeFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:
    return False


class _GraphBreaks(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        artifact = getattr(record, "metadata", {}).get("artifact", {})
        if artifact.get("name") == "dynamo_graph_break_reason":
            self.messages.append(str(getattr(record, "payload", "")))


@contextmanager
def cudagraph_messages() -> Iterator[list[str]]:
    """Collect what Inductor says of CUDA graphs that it does not record, or records anew, while the block runs."""
    collector = _Messages(logging.WARNING)
    logger = logging.getLogger("torch._inductor.cudagraph_utils.__cudagraphs")
    logger.addHandler(collector)
    try:
        yield collector.messages
    finally:
        logger.removeHandler(collector)


class _Messages(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class CompiledGraph(NamedTuple):
    """One graph that Dynamo holds for a function.

    Attributes:
        number: Dynamo's name for it, ``frame/attempt``.
        guards: what it relies on, one guard a line, as Dynamo prints it.
        code: the bytecode that runs in the function's place.
    """

    number: str
    guards: str
    code: CodeType


def compiled_graphs(function: Callable[..., Any]) -> list[CompiledGraph]:
    """Return the graphs that Dynamo holds for a function made by ``own_copy``, oldest first."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    entries = _debug_get_cache_entry_list(function.__code__)
    graphs = [CompiledGraph(str(entry.compile_id), str(entry.guard_manager), entry.code) for entry in entries]
    return sorted(graphs, key=lambda graph: [int(part) for part in graph.number.split("/")])


def is_compiled_for(function: Callable[..., Any], arguments: dict[str, Any]) -> bool:
    """Return whether something that Dynamo has compiled of a function made by ``own_copy`` serves these arguments."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    return any(entry.guard_manager.check(arguments) for entry in _debug_get_cache_entry_list(function.__code__))


def guards_for(function: Callable[..., Any], arguments: dict[str, Any]) -> Callable[[dict[str, Any]], bool]:
    """Return the check that Dynamo makes before it runs what it compiled for ``arguments``.

    Args:
        function: made by ``own_copy``, and called with the arguments before.
        arguments: by name.

    Raises:
        RuntimeError: nothing that was compiled serves these arguments.
    """
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    for entry in _debug_get_cache_entry_list(function.__code__):
        check: Callable[[dict[str, Any]], bool] = entry.guard_manager.check
        if check(arguments):
            return check
    raise RuntimeError(f"{function.__name__} was not compiled for these arguments, or they have changed since")


def recompile_reasons(function: Callable[..., Any]) -> dict[str, str]:
    """Return why a function made by ``own_copy`` was compiled again, by graph; Dynamo keeps the last 64 compiles."""
    from torch._dynamo.utils import get_compilation_metrics

    frames = {graph.number.partition("/")[0] for graph in compiled_graphs(function)}
    return {
        str(metric.compile_id): metric.recompile_reason
        for metric in get_compilation_metrics()
        if metric.recompile_reason and str(metric.compile_id).partition("/")[0] in frames
    }


@contextmanager
def no_bytecode_hooks() -> Iterator[None]:
    """Keep hooks that rewrite what Dynamo makes, such as depyf's, from seeing what the block compiles.

    What depyf 0.20 puts in the place of a function that uses ``super()`` after a graph break does not run.
    """
    from torch._dynamo import convert_frame

    hooks = convert_frame._bytecode_hooks
    before = dict(hooks)
    hooks.clear()
    try:
        yield
    finally:
        hooks.update(before)


def traced_by_inductor(folder: str) -> dict[str, Any]:
    """Return options with which Inductor writes what it makes of a graph, in a new folder in ``folder/torchinductor``.

    What it has cached is not written again, so it is told to compile anew.
    """
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
    logger.addFilter(_drop)
    try:
        yield
    finally:
        logger.removeFilter(_drop)


@contextmanager
def fake_tensors() -> Iterator[Callable[[Any], Any]]:
    """Run the block on tensors without data, and without a word in the log of what goes wrong on them.

    What is done to tensors with data alone still reaches those.

    Yields:
        What puts tensors without data, the same ones each time, in place of others in nested containers.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_map_only

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:

            def fake(tensor: Tensor) -> Tensor:
                return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor, static_shapes=True)

            yield lambda values: tree_map_only(Tensor, fake, values)
    finally:
        logger.setLevel(level)


def inputs_by_tensor(graph: fx.Graph) -> Callable[[Tensor], fx.Node | None]:
    """Return what finds the input of a graph, as Dynamo has made it, that a real tensor is given as.

    Dynamo's fake tensors are made once for each real one, and remembered.
    """
    inputs = graph.find_nodes(op="placeholder")
    fakes = {id(fake): node for node in inputs if isinstance(fake := node.meta.get("example_value"), FakeTensor)}
    modes = [node.meta["example_value"].fake_mode for node in fakes.values()]
    return lambda tensor: fakes.get(id(modes[0].from_tensor(tensor, static_shapes=True))) if modes else None


def example_of(node: fx.Node) -> Any:
    """Return the fake tensor, or the symbolic size, that stands for a node of a graph as Dynamo has made it."""
    return node.meta["example_value"]


@contextmanager
def running_on(values: Iterable[Any]) -> Iterator[None]:
    """Let the block run a graph on the fake tensors among ``values``; their sizes stay symbolic."""
    from torch._dispatch.python import enable_python_dispatcher

    mode = next(tensor.fake_mode for tensor in values if isinstance(tensor, FakeTensor))
    with mode, enable_python_dispatcher():  # without the second, sizes became numbers before torch 2.13
        yield


def note_examples(graph: fx.Graph, examples: Sequence[Any]) -> None:
    """Let a graph that Dynamo did not make say what its inputs are, as Dynamo would: AOTAutograd's cache asks."""
    for node, example in zip(graph.find_nodes(op="placeholder"), examples, strict=True):
        node.meta["example_value"] = example


def compile_with_inductor(
    module: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return what Inductor makes of a graph, as ``torch.compile`` would call it from inside a backend."""
    _make_kernels_wait_first()
    return cast(Callable[..., Any], torch._inductor.compile(module, list(inputs), dict(options)))


@functools.cache
def _make_kernels_wait_first() -> None:
    """Let each kernel that Inductor launches before the one in front has ended wait for that before anything else.

    Inductor leaves waiting out where a kernel does not read what the one directly in front of it writes. That one may
    have been let go while others still ran, as kernels of ours are; it may even be writing what the new one overwrites.
    This holds for all that the process compiles with that option from then on; it can only add waiting.
    """
    from torch._inductor.codegen.triton import TritonKernel

    remove_repeated = TritonKernel._filter_pdl

    def wait_first(kernel: Any, code: Any) -> None:
        if kernel._enable_pdl_codegen():
            code._lines.insert(0, kernel.GDC_WAIT)
        remove_repeated(kernel, code)

    setattr(TritonKernel, "_filter_pdl", wait_first)  # noqa: B010


def storage_number(tensor: Tensor) -> int:
    """Return a number that tensors have in common while they share memory; fake ones have no address."""
    number: int = tensor.untyped_storage()._cdata
    return number


def storage_owners(storage: torch.UntypedStorage) -> int:
    """Return how many tensors hold a storage."""
    uses: int = torch._C._storage_Use_Count(storage._cdata)
    return uses - 1  # ``storage`` itself


def cpp_compiler() -> str:
    """Return the C++ compiler that Inductor calls."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


def inductor_cache() -> Path:
    """Return the folder in which Inductor keeps what it compiled."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def profiling_all_threads(wanted: bool) -> Any:
    """Return what makes ``torch.profiler.profile`` watch threads other than the one that started it."""
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(profile_all_threads=wanted)
