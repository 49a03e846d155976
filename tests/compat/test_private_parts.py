"""Private parts of torch are used in one room only."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

import compiled_llm
import compiled_llm_flashinfer
import compiled_llm_ops

pytestmark = pytest.mark.core

# What torch documents in spite of the underscore; `compat` says so.
DOCUMENTED = {
    "torch._dynamo.config",
    "torch._dynamo.mark_dynamic",
    "torch._dynamo.mark_static_address",
    "torch._dynamo.reset",
    "torch._ops.OpOverload",
}


# The dictionaries of `nn.Module`, and what Python names with an underscore.
NOT_PRIVATE = {"_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}
OF_PYTHON = {"_asdict", "_replace", "_fields", "_field_defaults", "_exit"}
OF_THE_OPS = (
    "compiled_llm_ops/linear/onednn.py",
    "compiled_llm_ops/attention/segments.py",
)
"""The ops cannot import `compat`, so the private parts that they use stand there, and their tests in `tests/ops`."""
# Other libraries' private parts, with tables and tests of their own.
ELSEWHERE = ("compat/huggingface.py", "wrapped_model.py", "flashinfer/")


Nodes = list[ast.AST]
"""Of the code of one file."""


def nodes_of(source: str) -> Nodes:
    return [*ast.walk(ast.parse(source))]


def root_of(node: ast.expr) -> str | None:
    """`x` for `x.y.z`; writing all of them out takes seconds."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def private_names(nodes: Nodes) -> set[str]:
    """`torch._x.y`, what is imported from there, and what is experimental, written out."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and root_of(node) == "torch":
            names.add(ast.unparse(node))
    names = {name for name in names if re.match(r"torch\.(.*\.)?(_[^_]|experimental)", name)}
    longest = {name for name in names if not any(other.startswith(f"{name}.") for other in names)}
    return {name for name in longest if not any(f"{name}.".startswith(f"{known}.") for known in DOCUMENTED)}


def private_attributes(nodes: Nodes, ours: set[str]) -> set[str]:
    """`x._y` for what is neither ours nor public."""
    found = {node for node in nodes if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr)}
    return {ast.unparse(node) for node in found if node.attr not in ours | NOT_PRIVATE | OF_PYTHON} - {
        name for name in map(ast.unparse, found) if name.startswith("torch.")
    }


def our_attributes(files: Iterable[Nodes]) -> set[str]:
    """What our classes define: methods, fields, and what is set on `self`."""
    ours = set()
    for node in itertools.chain.from_iterable(files):
        if isinstance(node, ast.ClassDef):
            ours |= {entry.name for entry in node.body if isinstance(entry, ast.FunctionDef)}
            ours |= {ast.unparse(entry.target) for entry in node.body if isinstance(entry, ast.AnnAssign)}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            ours.add(node.attr)
    return ours


def sources() -> dict[str, Nodes]:
    folders = [
        Path(str(package.__file__)).parent for package in (compiled_llm, compiled_llm_flashinfer, compiled_llm_ops)
    ]
    return {str(file): nodes_of(file.read_text()) for folder in folders for file in folder.rglob("*.py")}


def test_what_is_private_is_recognized():
    for source, private in {
        "import torch\ntorch._C._len()": {"torch._C._len"},
        "from torch.fx.experimental import _config": {"torch.fx.experimental._config"},
        "from torch.nn import _x": {"torch.nn._x"},
        "torch._dynamo.mark_dynamic(x, 0)\ntorch._dynamo.config.x = 1": set(),
        "torch._dynamo.mark_dynamically": {"torch._dynamo.mark_dynamically"},
    }.items():
        assert private_names(nodes_of(source)) == private
    read = nodes_of("x._version + x._replace(a=1) + self._own + x._own + module._parameters")
    assert private_attributes(read, {"_own"}) == {"x._version"}


def test_private_parts_of_torch_are_used_in_one_room_only():
    found = sources()
    ours = our_attributes(found.values())
    used = {}
    for file, nodes in found.items():
        private = private_names(nodes)
        if not any(map(file.__contains__, ELSEWHERE)):
            private |= private_attributes(nodes, ours)
        if private and "/compat/" not in file and not file.endswith(OF_THE_OPS):
            used[file] = private
    assert used == {}
