"""Every import of the packages, read from their source: lazy ones, ones for types, `import_module("literal")`."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

CHECKOUT = Path(__file__).parents[2]
PACKAGES = (
    CHECKOUT / "compiled_llm",
    CHECKOUT / "ops" / "compiled_llm_flashinfer",
    CHECKOUT / "ops" / "compiled_llm_ops",
)


IMPORTING = (ast.Import, ast.ImportFrom, ast.Call)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True, order=True)
class Import:
    """One module imports another; ``lazily`` if importing the first does not run it: in a function, or for types."""

    importer: str
    imported: str
    lazily: bool = False

    def __str__(self) -> str:
        return f"{self.importer} -> {self.imported}"


def sources() -> dict[str, Path]:
    """The file of each module of the packages."""
    return {name_of(path, package.parent): path for package in PACKAGES for path in sorted(package.rglob("*.py"))}


def name_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports() -> set[Import]:
    """Every import of one module of the packages by another."""
    files = sources()
    return {
        found
        for name, path in files.items()
        for found in imports_of(path.read_text(), name, path.name == "__init__.py", set(files))
        if found.imported != name
    }


def imports_of(source: str, name: str, is_package: bool, modules: set[str]) -> Iterator[Import]:
    """The imports that ``source``, the module ``name``, makes of ``modules``."""
    for node, lazily in importing_nodes(ast.parse(source)):
        for target in targets(node, name if is_package else name.rpartition(".")[0], modules):
            if target in modules:
                yield Import(name, target, lazily)


def importing_nodes(tree: ast.Module) -> Iterator[tuple[ast.AST, bool]]:
    """What may import a module, and whether it does not run with the file: in a function, or for types."""
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    while waiting:
        node, lazily = waiting.pop()
        if isinstance(node, IMPORTING):
            yield node, lazily
        lazily |= isinstance(node, FUNCTIONS)
        for_types = node.body if isinstance(node, ast.If) and is_for_types(node.test) else ()
        waiting += [(inner, lazily or inner in for_types) for inner in ast.iter_child_nodes(node)]


def is_for_types(test: ast.expr) -> bool:
    match test:
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
            return True
    return False


def targets(node: ast.AST, package: str, modules: set[str]) -> list[str]:
    """The modules that a node imports, by their full names."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
            source = ".".join([*above, *([module] if module else [])])
            # `from package import module` imports the module, `from module import name` the module before the name.
            return [inner if (inner := f"{source}.{alias.name}") in modules else source for alias in names]
        case ast.Call(
            func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
            args=[ast.Constant(value=str(module)), *_],
        ):
            return [module]
    return []


def circles(arrows: set[Import]) -> list[set[str]]:
    """The sets of modules that import one another in a circle, directly or by way of others."""
    following: dict[str, set[str]] = {}
    for arrow in arrows:
        following.setdefault(arrow.importer, set()).add(arrow.imported)
    reached = {name: reachable(name, following) for name in following}
    together = {name: {other for other in seen if name in reached.get(other, set())} for name, seen in reached.items()}
    return [set(circle) for circle in sorted({tuple(sorted(circle)) for circle in together.values() if circle})]


def reachable(name: str, following: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        new = following.get(waiting.pop(), set()) - seen
        seen |= new
        waiting.extend(new)
    return seen


@cache
def module_at(path: Path) -> ModuleType:
    """Import a file that stands in no package."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
