"""Functions: those that were traced with all that they read, others by what tells them apart."""

from __future__ import annotations

import builtins
import enum
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, FunctionType, ModuleType
from typing import Any

from compiled_llm.compat.torch.dynamo import before_tracing, is_taken_as_constant, marks_of
from compiled_llm.compilation.kept.fingerprint.code import (
    code_digest,
    codes_in,
    digest,
    imports,
    names_in,
    names_read_in,
)
from compiled_llm.compilation.kept.fingerprint.plain import BOOKKEEPING, is_dunder, is_plain, path_of
from compiled_llm.compilation.kept.fingerprint.visit import UnhashableError, Visit

_OURS = ("compiled_llm", "compiled_llm_ops")  # what ours return, ``process_state`` has

_OF_PYTHON = frozenset({*dir(builtins), *dir(str), *dir(dict), *dir(list), *vars(enum.Enum), "name", "value"})
"""Names by which functions read nothing but their arguments."""


def describe_function(visit: Visit, function: FunctionType, where: str) -> str:
    """Return a function's path and code; what it reads, too, if it was traced."""
    function = before_tracing(function)
    path, code = path_of(function), code_digest(function.__code__)
    if is_taken_as_constant(function) and path.partition(".")[0] not in _OURS:
        raise UnhashableError(f"the result of {path} was taken as it was (torch.compiler.assume_constant_result)")
    if code not in visit.traced:
        # A library's decorator calls what it holds.
        held = (visit.said(inner, where) for inner in _traced_within(visit, function))
        return " ".join((f"function {path} {outlined(function)}", *held))
    visit.reached |= codes_in(function.__code__)
    return visit.later(function, f"function {path}", lambda name: _parts(visit, function, name))


def outlined(function: FunctionType) -> str:
    """Return an entry for a function whose callees are not hashed: its code, and what defaults and closures hold."""
    # Functions of one decorator have the same code, and what it decorates in their closure.
    return " ".join(_outline(function, set()))


def _outline(value: Any, seen: set[int]) -> Iterator[str]:
    if not isinstance(value, FunctionType):
        yield f"{type(value).__name__} {value!r}" if is_plain(value) else _path(value)
        return
    yield code_digest(value.__code__)
    if id(value) in seen:
        return
    seen.add(id(value))
    for held in _held(value):
        yield from _outline(held, seen)


def reads_more(function: FunctionType) -> bool:
    """Whether what a function does may depend on more than plain arguments and what ``outlined`` says."""
    names = {name for name in names_in(function.__code__) if not is_dunder(name)}
    read = names - _OF_PYTHON or names & function.__globals__.keys()
    return bool(read) or imports(function.__code__) or not all(map(is_plain, _held(function)))


def _traced_within(visit: Visit, function: FunctionType) -> Iterator[FunctionType]:
    """Yield the traced functions that one which was not traced holds, itself or by others like it."""
    seen, inside = {id(function)}, [function]
    while inside:
        holder = inside.pop()
        for cell in _cells(holder):
            visit.watch(cell, "cell_contents")
        for held in map(before_tracing, _held(holder)):
            if not isinstance(held, FunctionType) or id(held) in seen:
                continue
            seen.add(id(held))
            if code_digest(held.__code__) in visit.traced:
                yield held
            else:
                inside.append(held)


def _held(function: FunctionType) -> list[Any]:
    """Return what a function's defaults and closure hold."""
    given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return [*given, *map(_content, _cells(function))]


def _cells(function: FunctionType) -> tuple[CellType, ...]:
    return function.__closure__ or ()


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ...


def _path(value: Any) -> str:
    return path_of(value if hasattr(value, "__qualname__") else type(value))


def _parts(visit: Visit, function: FunctionType, name: str) -> str:
    visit.watch(function, "__code__", "__defaults__", "__kwdefaults__")
    visit.watch_entries(vars(function))
    visit.named |= names_in(function.__code__)
    held = [_cell(visit, cell, name) for cell in _cells(function)]
    given = visit.all(name, function.__defaults__, function.__kwdefaults__, vars(function), marks_of(function))
    return "; ".join((code_digest(function.__code__), given, *held, *_globals(visit, function, name)))


def _cell(visit: Visit, cell: CellType, where: str) -> str:
    visit.watch(cell, "cell_contents")
    try:
        value = cell.cell_contents
    except ValueError:
        return "empty"
    return visit.said(value, f"the closure of {where}")


# ---- globals


def _globals(visit: Visit, function: FunctionType, name: str) -> Iterator[str]:
    names, found = names_read_in(function.__code__), function.__globals__
    module = sys.modules.get(str(found.get("__name__")))
    hidden = sorted(names & vars(builtins).keys())
    if module is None or vars(module) is not found:  # generated code has a dictionary of its own
        visit.open(found)
        visit.watch(found, *names)
        yield from (f"{each}: {visit.said(found[each], name)}" for each in sorted(names & found.keys()))
    else:
        visit.watch(module, *hidden)  # a global of that name would hide it
        _attributes(visit, module, names)
    for each in hidden:
        visit.watch(builtins, each)
        yield f"{each}: {visit.said(vars(builtins)[each], name)}"
    if imports(function.__code__):
        for each in sorted(_imported(names, found)):
            _attributes(visit, sys.modules[each], names)
            _packages_of(visit, each)


def _attributes(visit: Visit, module: ModuleType, names: frozenset[str]) -> None:
    """Make entries of the attributes of a module that code names, and of those in a module that is one."""
    if not visit.first(module, names):
        return
    for name in sorted(names & vars(module).keys()):
        value, where = vars(module)[name], f"{module.__name__}.{name}"
        if visit.first(module, name):
            visit.watch(module, name)
            if where not in BOOKKEEPING:
                visit.entries[where] = digest(visit.said(value, where))
        if isinstance(value, ModuleType):
            _attributes(visit, value, names)


def _packages_of(visit: Visit, module: str) -> None:
    """Make entries of the attributes by which Dynamo finds an imported module, from its outermost package on."""
    while package := module.rpartition(".")[0]:
        if package in sys.modules:
            _attributes(visit, sys.modules[package], frozenset({module.rpartition(".")[2]}))
        module = package


def _imported(names: Iterable[str], found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of modules that code with these ``names`` may import, as globals ``found`` say from where."""
    package = str(found.get("__package__") or "")
    parents = [package.rsplit(".", up)[0] for up in range(package.count(".") + 1)] if package else []
    for name in names:
        for whole in (name, *(f"{parent}.{name}" for parent in parents)):
            if whole in sys.modules and whole.partition(".")[0] not in sys.stdlib_module_names:
                yield whole
