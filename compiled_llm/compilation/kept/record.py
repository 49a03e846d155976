"""Writes down a program while it is compiled, and once it has run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path as File
from typing import Any

from torch import fx

from compiled_llm.compat.torch.inductor import compile_with_inductor
from compiled_llm.compat.torch.kept.region_code import RegionCode, noting_code
from compiled_llm.compat.torch.kept.traced_graph import (
    TracedSize,
    TracedTensor,
    size_guards,
    traced_arguments,
    traced_inputs,
    written_objects,
)
from compiled_llm.compilation.kept.alike import Alike
from compiled_llm.compilation.kept.fingerprint.fingerprint import Fingerprint
from compiled_llm.compilation.kept.kept_program import Call, KeptProgram
from compiled_llm.compilation.kept.layout import Sizes, form_of_model, memories_of, memory_shared
from compiled_llm.compilation.kept.packing import described
from compiled_llm.compilation.kept.paths import PER_CALL, Path, paths_of_tensors
from compiled_llm.compilation.regions import Region
from compiled_llm.model.version.model_version import ModelVersion

logger = logging.getLogger("compiled_llm.graphs")

Function = Callable[..., Any]

Keep = Callable[[KeptProgram, Mapping[str, File]], None]
"""Keeps a program, and the files with its code, by where they lie in a folder of Inductor's and Triton's caches."""


class NotKeptError(ValueError):
    """A program cannot be kept; the message says why."""


class Recorder:
    """A recorder of one model's programs.

    Attributes:
        refused: why programs were traced that are not kept, by their names.
    """

    def __init__(self, keep: Keep, version: ModelVersion) -> None:
        """``keep`` is called with each program that was traced and has run, refused or not; it raises nothing."""
        self.refused: dict[str, str] = {}
        self._keep = keep
        self._version = version
        self._codes: dict[int, RegionCode] = {}
        self._functions: list[Function] = []  # those of ``_codes``, whose identities stay theirs
        self._calling: tuple[str, Function, Mapping[str, Any]] | None = None
        self._pending: _Trace | None = None

    def watching(self, name: str, function: Function, program: Function, arguments: Mapping[str, Any]) -> Function:
        """Return ``program``, which writes itself down if a call makes it be traced; ``arguments`` are by name."""

        def call(*given: object) -> object:
            self._calling = (name, function, arguments)
            self._pending = None
            try:
                result = program(*given)
                self._finish(result)
            finally:
                self._calling = self._pending = None
            return result

        return call

    # ---- inside the backend

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> Function:
        """Compile a graph by Inductor, and note its code."""
        with noting_code() as found:
            function = compile_with_inductor(module, inputs, options)
        if any(module.graph.find_nodes(op="get_attr")):
            found = [RegionCode(File(), refused="its graph has tensors of its own")]
        code = found[0] if len(found) == 1 else RegionCode(File(), refused=f"it was compiled as {len(found)} graphs")
        self._functions.append(function)
        self._codes[id(function)] = code
        return function

    def keep(
        self, graph: fx.Graph, regions: Sequence[Region], functions: Sequence[Function], whole: Function
    ) -> Function:
        """Note a compiled graph, and return what runs it: ``whole`` calls ``functions``, one a region if it was cut."""
        codes = [self._codes[id(each)] for each in functions]
        self._codes.clear()
        self._functions.clear()
        if self._calling is None:
            return whole
        name, function, arguments = self._calling
        try:
            inputs, returned = graph.find_nodes(op="placeholder"), _returned(graph)
            cut = regions or [Region(graph, inputs, returned)]
            numbers = _numbered(cut, inputs)
            kept = _described(name, arguments, graph, cut, numbers, codes)
            kept = replace(kept, fingerprint=_fingerprint(function, arguments, graph, made_for_threads(codes)))
            trace = _Trace(kept, [numbers[node] for node in returned], _distinct(codes))
        except Exception as error:  # any: it reads what torch keeps to itself
            trace = _Trace(_refused(name, error))
        trace.form = self._version.form
        self._pending = trace
        return trace.watching(whole)

    def _finish(self, result: object) -> None:
        if (trace := self._pending) is not None:
            self._version.begin_check()
            self._write(*trace.finished(result, self._version.form == trace.form))

    def _write(self, kept: KeptProgram, files: Mapping[str, File]) -> None:
        self.refused.pop(kept.name, None)
        if kept.refused:
            self.refused[kept.name] = kept.refused
            logger.debug("%s is not kept: %s", kept.name, kept.refused)
        self._keep(kept, files)


class _Trace:
    """A traced program, until it has run."""

    def __init__(self, kept: KeptProgram, outputs: Sequence[int] = (), codes: Sequence[RegionCode] = ()) -> None:
        """``outputs`` has the value of each output of the graph; ``codes`` are those of the program, in order."""
        self.form = 0  # the number of the model's form before it has run
        self._kept = kept
        self._outputs = outputs
        self._codes = codes
        self._returned: Sequence[Any] | None = None
        self._watches = True

    def watching(self, function: Function) -> Function:
        def run(*values: object) -> object:
            returned = function(*values)
            if self._watches:
                self._returned = returned
            return returned

        return run

    def finished(self, result: object, same_model: bool) -> tuple[KeptProgram, Mapping[str, File]]:
        """Return the program, which has returned ``result`` for the first time, and its files."""
        returned = self._returned
        self._returned = None
        self._watches = False
        kept = self._kept  # what has run lives as long as its code
        self._kept = KeptProgram(self._kept.name)
        codes = self._codes
        self._codes = ()
        if kept.refused is not None or returned is None:
            return kept, {}
        try:
            if not same_model:
                raise NotKeptError("the model changes its attributes")
            numbers = {id(tensor): value for tensor, value in zip(returned, self._outputs, strict=True)}
            packed = described(result, numbers)
            files = {place: file for code in codes for place, file in code.files().items()}
            return replace(kept, result=packed, codes=[code.encoded() for code in codes]), files
        except Exception as error:  # any: as in ``keep``
            return _refused(kept.name, error), {}


def _refused(name: str, error: Exception) -> KeptProgram:
    """Return a program that is not kept, since that has raised an error."""
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return KeptProgram(name, refused=f"{kind}{error}")


def _described(
    name: str,
    arguments: Mapping[str, Any],
    graph: fx.Graph,
    regions: Sequence[Region],
    numbers: Mapping[fx.Node, int],
    codes: Sequence[RegionCode],
) -> KeptProgram:
    if refused := next(_refusals(codes), None):
        raise NotKeptError(refused)
    if written := written_objects():
        raise NotKeptError(f"it writes {written[0]}")
    paths = paths_of_tensors(arguments)
    traced = [*traced_inputs(graph)]
    inputs = [_place(entry, paths) for entry in traced]
    distinct = _distinct(codes)
    calls = [
        Call(distinct.index(code), [numbers[node] for node in region.inputs], len(region.outputs))
        for code, region in zip(codes, regions, strict=True)
    ]
    written_to = sorted(_written(calls, distinct, len(inputs)))
    looked_at = [entry for entry in traced if isinstance(entry, TracedTensor)]
    memory_by_tensor = dict(zip(map(id, looked_at), memories_of([entry.value for entry in looked_at]), strict=True))
    memories = [memory_by_tensor.get(id(entry)) for entry in traced]
    guards, ranges = size_guards()
    kept = KeptProgram(
        name,
        inputs=inputs,
        calls=calls,
        tensors=_sizes([*looked_at, *traced_arguments(arguments, PER_CALL)], paths),
        guards=guards,
        ranges=ranges,
        form=Alike(arguments).form,
        model=form_of_model(arguments["model"]),
        written=written_to,
        shared=memory_shared(memories, written_to),
    )
    _ = kept.shapes  # ValueError if they are none that can be compared
    return kept


def _fingerprint(
    function: Function, arguments: Mapping[str, Any], graph: fx.Graph, for_threads: bool
) -> dict[str, Any]:
    """Return that of the trace that the backend is called in; its code may be made ``for_threads`` of one number."""
    found = Fingerprint.of_trace(arguments["model"], function, arguments, graph)
    if found.refused is not None:
        raise NotKeptError(found.refused)
    return (found if for_threads else found.for_any_threads()).encoded()


def _refusals(codes: Sequence[RegionCode]) -> Iterator[str]:
    for number, code in enumerate(codes, 1):
        if code.refused is not None:
            yield code.refused if len(codes) == 1 else f"{code.refused}, in region {number} of {len(codes)}"


def made_for_threads(codes: Sequence[RegionCode]) -> bool:
    """Whether code is made for a number of threads: Inductor's C++ kernels are, and none on a GPU."""
    return any(code.kernels for code in codes)


def _distinct(codes: Sequence[RegionCode]) -> list[RegionCode]:
    return list({id(code): code for code in codes}.values())


def _place(entry: object, paths: Mapping[int, Path]) -> Path | int | str:
    if isinstance(entry, TracedSize):
        return entry.symbol
    if isinstance(entry, TracedTensor) and (path := paths.get(id(entry.value))) is not None:
        return path
    what = entry if isinstance(entry, str) else "a tensor"
    raise NotKeptError(f"it reads {what}, which is neither an argument nor a tensor of the model")


def _sizes(traced: Sequence[TracedTensor], paths: Mapping[int, Path]) -> list[Sizes]:
    """Return the sizes of those that differ from call to call; the model's tensors are compared as a whole."""
    found = {paths[id(entry.value)]: entry for entry in traced if id(entry.value) in paths}
    return [Sizes(path, entry.sizes, entry.strides) for path, entry in found.items() if path[0] in PER_CALL]


def _numbered(regions: Sequence[Region], inputs: Sequence[fx.Node]) -> dict[fx.Node, int]:
    numbers: dict[fx.Node, int] = {}
    for number, node in enumerate([*inputs, *(node for region in regions for node in region.outputs)]):
        numbers.setdefault(node, number)
    return numbers


def _returned(graph: fx.Graph) -> list[fx.Node]:
    (end,) = graph.find_nodes(op="output")
    (returned,) = end.args
    if not (isinstance(returned, (tuple, list)) and all(isinstance(node, fx.Node) for node in returned)):
        raise NotKeptError("its graph returns more than tensors")
    return [*returned]


def _written(calls: Sequence[Call], codes: Sequence[RegionCode], inputs: int) -> set[int]:
    return {call.values[place] for call in calls for place in codes[call.code].written if call.values[place] < inputs}
