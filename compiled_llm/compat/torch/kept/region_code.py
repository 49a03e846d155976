"""The code of Inductor's for a graph, and a function made of it in a process that has no graph."""

# Inductor keeps code files without the graphs that they came of, and looks them up by these. A code file is Python that
# allocates, and calls kernels; its function takes the graph's inputs as a list, and empties it. What AOTAutograd does
# around it, at run time, is left out: so a graph of which it does anything is none of ours (``RegionCode.refused``).
# ``torch._inductor.standalone_compile`` keeps such functions, too; to load one takes an import of 1.3 s, and a pickle.
# This file ends once torch loads one without ``compile_fx`` and ``select_algorithm``.

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._dynamo import guards

from compiled_llm.compat.torch.inductor import inductor_cache_at
from compiled_llm.compat.torch.kept.triton_kernels import TritonKernel, load_kernel
from compiled_llm.compat.torch.triton import kernels_first_in

if TYPE_CHECKING:
    from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner


Function = Callable[[list[Any]], Sequence[Any]]

_EXTERN: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name) for name in ("mm", "bmm", "addmm", "baddbmm", "_int_mm", "_scaled_mm")
}
"""The ``extern_kernels`` that compiled code may call; to import Inductor's own brings its autotuning."""

_REPLACED = re.compile(
    r"^from torch\._inductor\.(?:select_algorithm import extern_kernels"
    r"|codegen\.memory_planning import _align as align"
    r"|async_compile import AsyncCompile)$",
    re.MULTILINE,
)
"""The imports of a code file in place of which it gets values of ours; what is left imports in 0.1 s."""

_CALLED = re.compile(r"\bextern_kernels\.(\w+)")
_KERNEL = re.compile(r"\basync_compile\.(\w+)\(")
_KINDS = {"cpp_pybinding", "triton", "wait"}
_ALIGNED = 16  # bytes
_ADDRESS = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
"""Where a C++ kernel looks for the function that reads a tensor's address; Inductor sets it, too, to the same."""


@dataclass
class RegionCode:
    """The code of one compiled graph."""

    file: Path
    kernels: list[Path] = field(default_factory=list)  # libraries of C++ kernels, in the order of the code file
    triton: list[TritonKernel] = field(default_factory=list)  # likewise
    aligned: list[int] = field(default_factory=list)  # the inputs whose addresses it takes to be multiples of 16
    written: list[int] = field(default_factory=list)  # the inputs that it writes to
    refused: str | None = None  # why it cannot be run without its graph

    def files(self) -> dict[str, Path]:
        """Return its files, once it has run, by where they lie in a folder of caches; ValueError if one is gone."""
        own = {f"inductor/{_place_of(file)}": file for file in (self.file, *self.kernels)}
        return {**own, **{place: file for kernel in self.triton for place, file in kernel.files().items()}}

    def encoded(self) -> dict[str, Any]:
        """Return it as values of JSON, once it has run; ValueError if a kernel has not."""
        return {
            "file": _place_of(self.file),
            "kernels": [*map(_place_of, self.kernels)],
            "triton": [kernel.encoded() for kernel in self.triton],
            "aligned": self.aligned,
            "written": self.written,
        }


def _place_of(file: Path) -> str:
    """Return the name of a file from the folder of Inductor's cache on, whichever that is: ``ab/cabcd.py``."""
    return f"{file.parent.name}/{file.name}"


@contextmanager
def noting_code() -> Iterator[list[RegionCode]]:
    """Collect the code of the graphs that Inductor compiles, or takes from its cache, while the block runs."""
    # Both ways end in the same two functions; nothing that the compiler returns tells which file it runs. Dynamo lets
    # one thread compile at a time.
    from torch._functorch._aot_autograd import runtime_wrappers
    from torch._inductor.output_code import CompiledFxGraph

    found: list[RegionCode] = []
    around: list[str] = []

    def note_graph(graph: CompiledFxGraph) -> None:
        try:
            found.append(_code_of(graph))
        except Exception as error:  # any: it reads what torch keeps to itself, and who compiles goes on
            found.append(RegionCode(Path(), refused=f"its code cannot be read: {type(error).__name__}: {error}"))

    def note_wrapper(wrapper: object, runtime_metadata: ViewAndMutationMeta) -> None:
        try:
            around.extend(_done_around(runtime_metadata))
        except Exception as error:  # any: as above
            around.append(f"what is around its code cannot be read: {type(error).__name__}: {error}")

    def note_bases(wrapper: object, runtime_metadata: object) -> None:
        if getattr(wrapper, "needs_post_compile", True):
            around.append("its inputs share memory, and some are written to")

    with (
        _calling_first(CompiledFxGraph, lambda graph, metadata: note_graph(graph)),
        _calling_first(runtime_wrappers.RuntimeWrapper, note_wrapper),
        _calling_first(runtime_wrappers.AOTSyntheticBaseWrapper, note_bases),
        _calling_first(runtime_wrappers.AOTDedupeWrapper, note_bases),
    ):
        yield found
    for code in found:
        code.refused = code.refused or next(iter(around), None)


@contextmanager
def _calling_first(kind: type, note: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call ``note`` before ``post_compile`` of a class's objects while the block runs."""
    post_compile = kind.post_compile  # type: ignore[attr-defined]

    def noted(self: object, *args: object, **kwargs: object) -> object:
        note(self, kwargs.get("runtime_metadata"))
        return post_compile(self, *args, **kwargs)

    setattr(kind, "post_compile", noted)  # noqa: B010
    try:
        yield
    finally:
        setattr(kind, "post_compile", post_compile)  # noqa: B010


def _done_around(metadata: ViewAndMutationMeta) -> Iterator[str]:
    """Say what AOTAutograd would do around the code at run time."""
    for number, info in enumerate(metadata.output_info):
        if info.output_type.name not in ("non_alias", "unsafe_view_alias"):
            yield f"output {number} is a view of input {info.base_idx}"
    if metadata.mutated_inp_runtime_indices:
        yield "inputs are written to after it"
    if metadata.tokens or metadata.num_intermediate_bases or metadata.is_rng_op_functionalized:
        yield "it has effects that are put in order, or draws numbers"
    if any(type(meta).__name__ != "PlainTensorMeta" for meta in metadata.subclass_inp_meta):
        yield "an input is a tensor made of others, as of a library of packed weights"


def _code_of(graph: CompiledFxGraph) -> RegionCode:
    from torch._inductor.codecache import PyCodeCache, get_path

    path = Path(get_path(graph.cache_key, "py")[2])
    module = next((module for module in reversed(PyCodeCache.modules) if module.__file__ == str(path)), None)
    code = RegionCode(
        path,
        aligned=[int(number) for number in graph.inputs_to_check],
        written=sorted(map(int, graph.mutated_input_idxs)),
    )
    if module is None or not path.exists():
        code.refused = "its code file was not found"
    elif graph.constants:
        code.refused = "it has constant tensors"
    else:
        code.refused = _why_not(path.read_text()) or _note_kernels(code, module, path)
    return code


def _why_not(source: str) -> str | None:
    """Say what code needs that it would not get."""
    from torch._inductor.select_algorithm import extern_kernels

    called = set(_CALLED.findall(source))
    if strange := sorted(name for name in called if getattr(extern_kernels, name, None) is not _EXTERN.get(name)):
        return f"it calls {strange[0]} of Inductor's"
    if strange := sorted(set(_KERNEL.findall(source)) - _KINDS):
        return f"it has kernels of another kind, {strange[0]}"
    return None


def _note_kernels(code: RegionCode, module: ModuleType, path: Path) -> str | None:
    """Find the libraries of a code file's C++ kernels, and Triton's kernels."""
    places: list[tuple[str, str]] = []

    def place(kind: str) -> Callable[..., object]:
        def note(_: object, source: str, **kwargs: object) -> object:
            places.append((kind, source))
            return places[-1]

        return note

    names = _run(path, SimpleNamespace(cpp_pybinding=place("C++"), triton=place("Triton"), wait=lambda all: None))
    by_place = {id(value): name for name, value in names.items()}
    for found in places:
        kernel, (kind, source) = getattr(module, by_place[id(found)]), found
        if kind == "Triton":
            code.triton.append(TritonKernel(kernel, source))
            continue
        library = getattr(getattr(kernel, "__self__", None), "__file__", None)
        if library is None:
            return "a library of a C++ kernel was not found"
        code.kernels.append(Path(library))  # in another cache, if this process had it already
    return None


def load_code(folder: Path, encoded: Mapping[str, Any]) -> Function:
    """Return the function of ``RegionCode.encoded``, whose files lie in a folder of Inductor's and Triton's caches."""
    kernels, launched, libraries = encoded["triton"], iter(encoded["triton"]), iter(encoded["kernels"])

    def cpp(*args: object, **kwargs: object) -> Callable[..., object]:
        return _library(folder / "inductor" / next(libraries))

    def triton(name: str, source: str, **kwargs: object) -> CachingAutotuner:
        return load_kernel(name, source, next(launched))

    found = SimpleNamespace(cpp_pybinding=cpp, triton=triton, wait=lambda all: None)
    with inductor_cache_at(folder) as own, kernels_first_in(folder / "triton", own) if kernels else nullcontext():
        function: Function = _run(folder / "inductor" / encoded["file"], found)["call"]
    return _aligning(function, encoded["aligned"], encoded["written"]) if encoded["aligned"] else function


def _run(path: Path, async_compile: SimpleNamespace) -> dict[str, Any]:
    """Run a code file, with values of ours in place of some that it would import, and return its names."""
    given = {
        "extern_kernels": SimpleNamespace(**_EXTERN),
        "align": _align,
        "AsyncCompile": lambda: async_compile,
    }
    names: dict[str, Any] = {"__name__": f"compiled_llm_kept_{path.stem}", "__file__": str(path), **given}
    exec(compile(_REPLACED.sub("", path.read_text()), str(path), "exec"), names)
    return names


def _align(nbytes: int) -> int:
    return (nbytes + 63) & -64


def _library(path: Path) -> Callable[..., object]:
    """Return a C++ kernel, under the name by which Inductor would find it loaded."""
    address = getattr(guards, "_torchinductor_pyobject_tensor_data_ptr")  # noqa: B009
    os.environ[_ADDRESS] = str(address)
    name = f"{path.name.partition('.')[0]}.kernel"
    module = sys.modules.get(name)
    if module is None or module.__file__ != str(path):
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    kernel: Callable[..., object] = module.kernel
    return kernel


def _aligning(function: Function, checked: Sequence[int], written: Sequence[int]) -> Function:
    """Return a function that gets copies of inputs whose addresses are no multiples of 16, as Inductor gives it."""

    def aligned(values: list[Any]) -> Sequence[Any]:
        copied = []
        for place in checked:
            tensor = values[place]
            if isinstance(tensor, Tensor) and tensor.data_ptr() % _ALIGNED:
                values[place] = _copy(tensor)
                if place in written:
                    copied.append((tensor, values[place]))
        outputs = function(values)
        for tensor, copy in copied:
            tensor.copy_(copy)
        return outputs

    return aligned


def _copy(tensor: Tensor) -> Tensor:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    memory = tensor.as_strided((reach if tensor.numel() else 0,), (1,)).clone()
    return memory.as_strided(tensor.shape, tensor.stride(), 0)
