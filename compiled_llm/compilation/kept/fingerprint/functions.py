"""Functions: those that were traced with all that they read, others by what tells them apart."""

from __future__ import annotations

import builtins
import enum
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from compiled_llm.compat.torch.dynamo import before_tracing, is_taken_as_constant, marks_of
from compiled_llm.compilation.kept.fingerprint.code import (
    code_digest,
    codes_in,
    digest,
    imports,
    names_read_in,
)
from compiled_llm.compilation.kept.fingerprint.plain import BOOKKEEPING, is_dunder, is_plain, path_of
from compiled_llm.compilation.kept.fingerprint.visit import UnhashableError, Visit
from compiled_llm.model.version.functions import content_of, names_in

_OURS = ("compiled_llm", "compiled_llm_ops")  # what ours return, ``process_state`` has

_OF_PYTHON = frozenset({*dir(builtins), *dir(str), *dir(dict), *dir(list), *vars(enum.Enum), "name", "value"})
"""Names by which functions read nothing but their arguments."""


def describe_function(visit: Visit, function: FunctionType, where: str) -> str:
    """Return a function's path and code; what it reads, too, if it was traced."""
    function = before_tracing(function)
    path, code = path_of(function), code_digest(function.__code__)
    if is_taken_as_constant(function) and path.partition(".")[0] not in _OURS:
        raise UnhashableError(f"the result of {path} was taken as it was (torch.compiler.assume_constant_result)")
    if code in visit.traced:
        visit.reached |= codes_in(function.__code__)
        return visit.later(function, f"function {path}", partial(_parts, visit, function))
    if id(function) not in visit.outlines:
        visit.outlines[id(function)] = path  # one may hold itself
        # Functions of one decorator have the same code, and what it decorates in their closure.
        values = (*_given(function), *_closure(visit, function))
        held = ", ".join(_describe_held(visit, value, where) for value in values)
        visit.outlines[id(function)] = f"function {path} {code} ({held})"
    visit.see(function)
    return visit.outlines[id(function)]


def reads_more(function: FunctionType) -> bool:
    """Whether what a function does may depend on more than plain arguments and what it holds."""
    names = {name for name in names_in(function.__code__) if not is_dunder(name)}
    read = names - _OF_PYTHON or names & function.__globals__.keys()
    held = (*_given(function), *map(content_of, function.__closure__ or ()))
    return bool(read) or imports(function.__code__) or not all(map(is_plain, held))


def _describe_held(visit: Visit, value: object, where: str) -> str:
    """Describe what a function holds that was not traced: the objects of its decorators are nobody's input."""
    if is_plain(value) or isinstance(value, FunctionType):
        return visit.describe(value, where)
    return path_of(value if hasattr(value, "__qualname__") else type(value))


def _given(function: FunctionType) -> tuple[Any, ...]:
    return (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def _closure(visit: Visit, function: FunctionType) -> list[Any]:
    """Return what a function's closure holds, where a change is noticed from now on."""
    cells = function.__closure__ or ()
    for cell in cells:
        visit.watch(cell, ["cell_contents"])
    return [*map(content_of, cells)]


def _parts(visit: Visit, function: FunctionType, name: str) -> str:
    visit.watch(function, ("__code__", "__defaults__", "__kwdefaults__"))
    visit.watch_entries(vars(function))
    visit.named |= names_in(function.__code__)
    parts = [function.__defaults__, function.__kwdefaults__, vars(function), marks_of(function)]
    held = visit.describe_all(name, [*parts, *_closure(visit, function)])
    return "; ".join((code_digest(function.__code__), held, *_globals(visit, function, name)))


# ---- globals


def _globals(visit: Visit, function: FunctionType, name: str) -> Iterator[str]:
    names, found = names_read_in(function.__code__), function.__globals__
    module = sys.modules.get(str(found.get("__name__")))
    hidden = sorted(names & vars(builtins).keys())
    if module is None or vars(module) is not found:  # generated code has a dictionary of its own
        visit.open(found)
        visit.watch(found, names)
        yield from (f"{each}: {visit.describe(found[each], name)}" for each in sorted(names & found.keys()))
    else:
        visit.watch(module, hidden)  # a global of that name would hide it
        _attributes(visit, module, names)
    visit.watch(builtins, hidden)
    yield from (f"{each}: {visit.describe(vars(builtins)[each], name)}" for each in hidden)
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
            visit.watch(module, [name])
            if where not in BOOKKEEPING:
                visit.entries[where] = digest(visit.describe(value, where))
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
