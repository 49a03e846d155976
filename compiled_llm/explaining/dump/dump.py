"""Every stage between a model and its kernels, as files, with an index that links lines, nodes and kernels."""

from __future__ import annotations

import dis
import io
import json
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import CodeType
from typing import Any

from compiled_llm.compat.torch.dynamo import CompiledGraph, compiled_graphs
from compiled_llm.explaining.dump.links import links_of
from compiled_llm.explaining.dump.pages import GRAPH, INDUCTOR, DumpedProgram, DumpPages
from compiled_llm.explaining.page import page
from compiled_llm.explaining.report import Report
from compiled_llm.explaining.tracing import BrokenPrograms, Sandbox, Trace
from compiled_llm.model.checks import belongs_to_another

_PROVENANCE = "inductor_provenance_tracking_node_mappings.json"
_BYTECODE, _GUARDS, _ATEN = "1_bytecode.py", "2_guards.txt", "4_aten_graph.py"
_STAGES = {
    _BYTECODE: "what Dynamo runs in the function's place",
    _GUARDS: "what the graph relies on, checked at each call",
    GRAPH: "Dynamo's graph, with the line of each operation",
    _ATEN: "the same in operators, after Inductor's rewriting",
    INDUCTOR: "Inductor's code: the kernels, and their calls in order",
}
_INDUCTORS = {_ATEN: "fx_graph_transformed.py", INDUCTOR: "output_code.py"}


def new_folder(path: Path) -> Path:
    """Return the folder, made if it is not there; ValueError if it is a file, another user's, or not empty."""
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise ValueError(f"dump={str(path)!r}: there is something already; name a new or an empty folder")
    if belongs_to_another(path):  # who could make any of its files a link
        raise ValueError(f"dump={str(path)!r}: the folder belongs to another user; name a new one")
    path.mkdir(parents=True, exist_ok=True)
    return path.resolve()


class Dump:
    """A dump in a folder that is empty; ``notes`` say what could not be written, and why."""

    def __init__(self, root: Path) -> None:
        self.notes: list[str] = []
        self._root = root
        self._programs: list[DumpedProgram] = []

    def add_programs(self, traces: Sequence[Trace], sandbox: Sandbox) -> None:
        folders = {trace.name: self._folder(trace.name) / "inductor" for trace in traces}
        if traces and all(trace.error is None for trace in traces):
            self._attempt("Inductor's code is missing", lambda: sandbox.inductor(folders))
        else:
            self._note("Inductor's code is missing: it compiles programs that are one graph each.")
        for trace in traces:
            if trace.error is None and trace.graphs:
                self._attempt(f"the files of {trace.name} are not whole", partial(self._add, trace))

    def _add(self, trace: Trace) -> None:
        program = self._program(trace.name)
        self._write_compiled(program, compiled_graphs(trace.function)[:1])
        self._write(program, GRAPH, trace.graphs[0].print_readable(print_output=False))
        program.links = links_of(trace.graphs[0], self._take_inductors(program))

    def add_frames(self, programs: BrokenPrograms) -> None:
        """Write what Dynamo made of programs that are not one graph, frame by frame."""
        program = self._program("frames")
        for number, frame in enumerate(programs.frames(), 1):
            prefix = f"{number:03}_{re.sub(r'[^0-9A-Za-z]+', '_', frame.name).strip('_')}"
            self._write_compiled(program, frame.graphs, prefix, f" ({frame.place})")
        for number, graph in enumerate(programs.graphs, 1):
            text = graph.print_readable(print_output=False)
            self._write(program, f"graph_{number:03}.py", text, "a part of Dynamo's graph")

    def finish(self, report: Report) -> Path:
        """Write the report and the index; return the path of the index."""
        (self._root / "report.json").write_text(json.dumps(report.data, indent=1), encoding="utf-8")
        (self._root / "report.html").write_text(page(report.data, home="index.html"), encoding="utf-8")
        return DumpPages(self._root).write(self._programs, report)

    def _attempt(self, what: str, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # the rest is worth having
            self._note(f"{what}: {_first_line(error)}")

    def _note(self, text: str) -> None:
        if text and text not in self.notes:
            self.notes.append(text)

    def _folder(self, program: str) -> Path:
        return self._root / re.sub(r"\W+", "-", program)

    def _program(self, name: str) -> DumpedProgram:
        program = DumpedProgram(name, self._folder(name))
        program.folder.mkdir(exist_ok=True)
        self._programs.append(program)
        return program

    def _write_compiled(
        self, program: DumpedProgram, graphs: Sequence[CompiledGraph], prefix: str = "", place: str = ""
    ) -> None:
        for number, graph in enumerate(graphs, 1):
            start = f"{prefix}_{number}_" if prefix else ""
            text, note = readable(graph.code)
            self._note(note)
            name = _BYTECODE.replace(".py", ".txt") if note else _BYTECODE
            self._write(program, start + name, text, _STAGES[_BYTECODE] + place)
            self._write(program, start + _GUARDS, graph.guards, _STAGES[_GUARDS] + place)

    def _write(self, program: DumpedProgram, name: str, text: str, what: str = "") -> None:
        (program.folder / name).write_text(text, encoding="utf-8")
        program.files[name] = what or _STAGES[name]

    def _take_inductors(self, program: DumpedProgram) -> dict[str, Any]:
        traces = sorted((program.folder / "inductor").glob("torchinductor/*/"))
        if not traces:
            return {}
        for name, theirs in _INDUCTORS.items():
            if (traces[0] / theirs).exists():
                shutil.copy(traces[0] / theirs, program.folder / name)
                program.files[name] = _STAGES[name]
        mapping = traces[0] / _PROVENANCE
        if not mapping.exists():
            self._note("This torch does not say which kernels compute which nodes, so they are not linked.")
            return {}
        found: dict[str, Any] = json.loads(mapping.read_text())
        return found


def readable(code: CodeType) -> tuple[str, str]:
    """Return bytecode as Python and an empty note; if depyf cannot do that, disassembled, and a note that says why."""
    try:
        from depyf import decompile

        return decompile(code), ""
    except Exception as error:  # depyf reaches into torch, and knows the versions of its day
        if isinstance(error, ModuleNotFoundError) and error.name == "depyf":
            note = "depyf is not installed, so bytecode is shown as such: pip install depyf"
        else:
            said = f"depyf {version('depyf')} does not know this Python or torch ({_first_line(error)})"
            note = f"{said}, so bytecode is shown as such"
    text = io.StringIO()
    dis.dis(code, file=text)
    return f"# {note}\n\n{text.getvalue()}", note


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
