"""The files of a dump: one folder a program, one file a stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from compiled_llm.explaining.dump.links import SourceLink

BYTECODE, GUARDS, GRAPH, ATEN, INDUCTOR = (
    "1_bytecode.py",
    "2_guards.txt",
    "3_graph.py",
    "4_aten_graph.py",
    "5_inductor.py",
)
STAGES = {
    BYTECODE: "what Dynamo runs in the function's place",
    GUARDS: "what the graph relies on, checked at each call",
    GRAPH: "Dynamo's graph, with the line of each operation",
    ATEN: "the same in operators, after Inductor's rewriting",
    INDUCTOR: "Inductor's code: the kernels, and their calls in order",
}


@dataclass
class DumpedProgram:
    """One program's files.

    Attributes:
        name: the program.
        folder: where they lie.
        files: name and what it is, in order.
        links: lines, nodes and kernels; empty if there is not one graph.
    """

    name: str
    folder: Path
    files: dict[str, str] = field(default_factory=dict)
    links: list[SourceLink] = field(default_factory=list)
