"""Every stage between a model and its kernels, as files in a folder for each program."""

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

from compiled_llm.compat.torch.dynamo import CompiledGraph, compiled_graphs
from compiled_llm.explaining.report import Report
from compiled_llm.explaining.tracing import BrokenPrograms, Sandbox, Trace
from compiled_llm.model.checks import belongs_to_another

_BYTECODE, _GUARDS, _GRAPH = "1_bytecode.py", "2_guards.txt", "3_graph.py"
_INDUCTORS = {"4_aten_graph.py": "fx_graph_transformed.py", "5_inductor.py": "output_code.py"}


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

    def add_programs(self, traces: Sequence[Trace], sandbox: Sandbox) -> None:
        folders = {trace.name: self._folder(trace.name) for trace in traces}
        if traces and all(trace.error is None for trace in traces):
            inductors = {name: folder / "inductor" for name, folder in folders.items()}
            self._attempt("Inductor's code is missing", lambda: sandbox.inductor(inductors))
        else:
            self._note("Inductor's code is missing: it compiles programs that are one graph each.")
        for trace in traces:
            if trace.error is None and trace.graphs:
                add = partial(self._add, trace, folders[trace.name])
                self._attempt(f"the files of {trace.name} are not whole", add)

    def _add(self, trace: Trace, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._write_compiled(folder, compiled_graphs(trace.function)[:1])
        _write(folder / _GRAPH, trace.graphs[0].print_readable(print_output=False))
        for inductors in sorted((folder / "inductor").glob("torchinductor/*/"))[:1]:
            for name, theirs in _INDUCTORS.items():
                if (inductors / theirs).exists():
                    shutil.copy(inductors / theirs, folder / name)

    def add_frames(self, programs: BrokenPrograms) -> None:
        """Write what Dynamo made of programs that are not one graph, frame by frame."""
        folder = self._folder("frames")
        folder.mkdir(exist_ok=True)
        for number, frame in enumerate(programs.frames(), 1):
            prefix = f"{number:03}_{re.sub(r'[^0-9A-Za-z]+', '_', frame.name).strip('_')}"
            self._write_compiled(folder, frame.graphs, prefix, f"# {frame.place}\n")
        for number, graph in enumerate(programs.graphs, 1):
            _write(folder / f"graph_{number:03}.py", graph.print_readable(print_output=False))

    def finish(self, report: Report) -> None:
        _write(self._root / "report.json", json.dumps(report.data, indent=1))

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

    def _write_compiled(self, folder: Path, graphs: Sequence[CompiledGraph], prefix: str = "", head: str = "") -> None:
        for number, graph in enumerate(graphs, 1):
            start = f"{prefix}_{number}_" if prefix else ""
            text, note = readable(graph.code)
            self._note(note)
            name = _BYTECODE.replace(".py", ".txt") if note else _BYTECODE
            _write(folder / f"{start}{name}", head + text)
            _write(folder / f"{start}{_GUARDS}", graph.guards)


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")


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
