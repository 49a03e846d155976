"""Parts keep to what the rest asks of them: each module says so to type checkers, and mypy sees where it is not so.

With --whole, a wrong signature is planted in every part of a copy of the packages, and mypy finds each: one run, which
takes a minute or two.
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from compiled_llm.features import FEATURES, LATE_FEATURES
from support.imports import CHECKOUT, PACKAGES, is_for_types, sources

MOST_ANY = 424
"""Lines of the package with an annotation that is `Any` and nothing else; each that goes lowers it."""

ANY = re.compile(r"(:|->) Any\b")
"""What the lines have that count: most files have none, and to parse all of them takes seconds."""

MODULES = sorted({module for modules in (FEATURES | LATE_FEATURES).values() for module in modules})


class SeamOf(NamedTuple):
    """A protocol, and who has to keep to it: a feature's module in a room, or all there that have an entry."""

    protocol: str
    room: str
    name: str | None
    entry: str | None

    @property
    def modules(self) -> list[str]:
        if self.name is not None:
            named = (FEATURES | LATE_FEATURES)[self.name]
            return [module for module in named if module.split(".")[1] == self.room]
        return [module for module in MODULES if module.split(".")[1] == self.room and self.entry in names_in(module)]


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(sources()[module].read_text())


@functools.cache
def names_in(module: str) -> set[str]:
    """Return what a module has at its top."""
    found: set[str] = set()
    for node in tree_of(module).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.ImportFrom(names=names):
                found |= {alias.asname or alias.name for alias in names}
    return found


@functools.cache
def seams() -> list[SeamOf]:
    texts = {name: path.read_text() for name, path in sources().items()}
    return [seam for name, text in texts.items() if re.search(r"\bSeams?\[", text) for seam in seams_in(tree_of(name))]


def seams_in(tree: ast.Module) -> Iterator[SeamOf]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Subscript(value=ast.Name(id="Seam"), slice=ast.Name(id=protocol)),
                args=[ast.Constant(value=str(name)), ast.Constant(value=str(room))],
            ):
                yield SeamOf(protocol, room, name, None)
            case ast.Call(
                func=ast.Subscript(value=ast.Name(id="Seams"), slice=ast.Name(id=protocol)),
                args=[ast.Constant(value=str(room)), ast.Constant(value=str(entry))],
            ):
                yield SeamOf(protocol, room, None, entry)


def checked_in(module: str) -> set[str]:
    """Return the protocols that a module says it keeps to: `checked: Protocol = this`, for type checkers."""
    blocks = [node.body for node in tree_of(module).body if isinstance(node, ast.If) and is_for_types(node.test)]
    return {
        node.annotation.id
        for node in (inner for body in blocks for inner in body)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.annotation, ast.Name)
        and isinstance(node.value, ast.Name)
        and node.value.id == "this"
    }


@functools.cache
def protocols() -> dict[str, ast.ClassDef]:
    """Return the classes of the protocols of seams."""
    wanted = {seam.protocol for seam in seams()}
    return {
        node.name: node
        for module, path in sources().items()
        if any(f"class {name}(" in (text := path.read_text()) for name in wanted) and text
        for node in tree_of(module).body
        if isinstance(node, ast.ClassDef) and node.name in wanted
    }


def members(protocol: ast.ClassDef) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for node in protocol.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found[name] = node
            case ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = node
    return found


def asked_of(module: str) -> dict[str, ast.stmt]:
    """Return all that seams ask of a part, by its name."""
    known = protocols()
    return {name: node for protocol in checked_in(module) for name, node in members(known[protocol]).items()}


# ---- each part is checked


def test_each_part_says_which_protocols_it_keeps_to() -> None:
    assert len(seams()) > 15
    missing = [
        f"{module}: checked: {seam.protocol} = this"
        for seam in seams()
        for module in seam.modules
        if seam.protocol not in checked_in(module)
    ]
    assert not missing, "\n".join(missing)


def test_each_seam_has_a_part() -> None:
    assert [seam for seam in seams() if not seam.modules] == []


@pytest.mark.parametrize("module", MODULES)
def test_a_registered_module_is_asked_by_a_seam(module: str) -> None:
    assert asked_of(module).keys() <= names_in(module)
    assert asked_of(module), "nobody asks for it, or it does not say so"


# ---- a wrong signature is found


def planted(module: str) -> str:
    """Return a part in which all that others ask of it is of another type."""
    tree, names = tree_of(module), asked_of(module)
    wrong = {
        name: f"{'async ' * isinstance(node, ast.AsyncFunctionDef)}def {name}(planted: bytes) -> bytes: return planted"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        else f"{name}: bytes = b'planted'"
        for name, node in names.items()
    }
    body = [left for node in tree.body if (left := without(node, set(names))) is not None]
    return f"{ast.unparse(ast.Module(body, []))}\n\n" + "\n".join(wrong.values()) + "\n"


def without(node: ast.stmt, names: set[str]) -> ast.stmt | None:
    """Return a statement without what it binds of some names; None if nothing is left."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name in names:
            return None
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)) if name in names:
            return None
        case ast.ImportFrom():
            left = [alias for alias in node.names if (alias.asname or alias.name) not in names]
            return ast.ImportFrom(node.module, left, node.level) if left else None
    return node


def errors_of_mypy(folder: Path) -> str:
    """Check packages in a folder as the checkout's are, with what mypy already knows of these."""
    known = CHECKOUT / ".mypy_cache"
    if known.is_dir():
        shutil.copytree(known, folder / ".mypy_cache")
    shutil.copy(CHECKOUT / "pyproject.toml", folder)
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-pretty", "--show-error-context"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, folder / "ops")))},
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout + run.stderr


def conflicts(errors: str, module: str, protocol: str) -> int:
    """Return how many members of a part mypy has found to be other than a protocol says."""
    path = str(sources()[module].relative_to(CHECKOUT))
    lines = [line.partition(": ")[2] for line in errors.splitlines() if line.startswith(f"{path}:")]
    begins = f'error: Incompatible types in assignment (expression has type Module, variable has type "{protocol}")'
    at = next((number for number, line in enumerate(lines) if line.startswith(begins)), None)
    if at is None:
        return 0
    notes = list(itertools.takewhile(lambda line: line.startswith("note: "), lines[at + 1 :]))
    more = [int(found[1]) for line in notes if (found := re.search(r"<(\d+) more conflict", line))]
    shown = [line for line in notes if re.match(r"note:     Expected:$|note:     \w+: expected ", line)]
    return len(shown) + sum(more)


def test_mypy_finds_a_wrong_signature_in_each_part(whole: bool, tmp_path: Path) -> None:
    if not whole:
        pytest.skip("--whole: mypy takes minutes")
    pytest.importorskip("mypy")
    for package in PACKAGES:
        target = tmp_path / package.relative_to(CHECKOUT)
        shutil.copytree(package, target, ignore=shutil.ignore_patterns("__pycache__"))
    for module in MODULES:
        (tmp_path / sources()[module].relative_to(CHECKOUT)).write_text(planted(module))
    errors, known = errors_of_mypy(tmp_path), protocols()
    found = {
        (module, protocol): (conflicts(errors, module, protocol), len(members(known[protocol])))
        for module in MODULES
        for protocol in checked_in(module)
    }
    print(len(found), "protocols of parts,", sum(planted for _, planted in found.values()), "planted")
    assert not {key: counts for key, counts in found.items() if counts[0] != counts[1]}, errors[-4000:]


# ---- `Any`


def lines_with_any(tree: ast.Module) -> set[int]:
    """Return the lines with an annotation that is `Any`: of an argument, of what is returned, of a variable."""
    nodes = [*ast.walk(tree)]
    given = [node.annotation for node in nodes if isinstance(node, ast.arg | ast.AnnAssign)]
    returned = [node.returns for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.lineno for node in (*given, *returned) if isinstance(node, ast.Name) and node.id == "Any"}


def test_the_package_has_no_more_any_than_it_had() -> None:
    own = {name: path for name, path in sources().items() if name.partition(".")[0] == "compiled_llm"}
    found = {name: len(lines_with_any(tree_of(name))) for name, path in own.items() if ANY.search(path.read_text())}
    assert sum(found.values()) <= MOST_ANY, sorted(found.items(), key=lambda each: -each[1])[:20]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("def f(a: Any, b: Any) -> Any: ...", {1}),
        ("def f(\n    a: int,\n    *b: Any,\n) -> Any: ...", {3, 4}),
        ("class C:\n    a: Any = None", {2}),
        ("def f(a: dict[str, Any]) -> list[Any]: ...", set()),
    ],
)
def test_lines_with_any_are_counted(source: str, lines: set[int]) -> None:
    assert lines_with_any(ast.parse(source)) == lines
