"""Recompiles: which guard failed, the old value and the new one, and the line that relies on it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from torch import nn

from compiled_llm.compat.torch.dynamo import CompiledGraph, compiled_graphs, recompile_reasons
from compiled_llm.explaining.advice import advise_change
from compiled_llm.explaining.findings import Finding
from compiled_llm.model.places import NOWHERE, Place, blame, commented_place, is_users, stack_in

_MISMATCH = re.compile(r"tensor '(?P<what>.+)' (?P<how>.+?) mismatch.*?expected (?P<old>.+?), actual (?P<new>[^\s,]+)")
_TYPE = re.compile(r"___check_(?:type|obj)_id\((?P<what>.+), \d+\)(?:, type=<class '(?P<old>[^']+)'>)?")
_EQUAL = re.compile(r"(?P<what>.+?) == (?P<old>.+)")
_LOCAL = re.compile(r"\b[LG]\['(\w+)'\]")
_FORGOTTEN = "what failed is no longer known (Dynamo remembers the last 64 compiles); set TORCH_LOGS=recompiles"


def recompiles_of(function: Callable[..., Any], program: str, model: nn.Module) -> list[Finding]:
    """Return a finding for each time that a program was compiled again."""
    graphs = compiled_graphs(function)
    reasons = recompile_reasons(function)
    found = [_finding(reason, number, graphs, program, model) for number, reason in reasons.items()]
    if not found and len(graphs) > 1:
        reason, advice = advise_change("")
        found.append(Finding("recompile", NOWHERE, reason, advice, (program,), detail=_FORGOTTEN))
    return found


def environment_in(function: Callable[..., Any], program: str) -> list[Finding]:
    """Return findings on environment variables that the user's code reads, which end up in the graph."""
    guards = [line for graph in compiled_graphs(function) for line in graph.guards.splitlines()]
    places = [commented_place(line) for line in guards if re.search(r"\benviron\b", line)]
    reason, advice = advise_change("environment")
    return [
        Finding("pinned", place, reason, advice, (program,))
        for place in places
        if place is not None and is_users(place)
    ]


def _finding(reason: str, number: str, graphs: list[CompiledGraph], program: str, model: nn.Module) -> Finding:
    said, _, trace = reason.partition("User stack trace:")
    guard = re.sub(r"^\d+/\d+: ", "", said.splitlines()[0] if said else "").split("  #")[0].strip()
    newer = next((graph.guards for graph in graphs if graph.number == number), "")
    place = blame(stack_in(trace)) if trace else commented_place(said) or NOWHERE
    old = new = ""
    what = _readable(guard)
    if match := _MISMATCH.search(guard):
        what = f"{match['how']} of {_readable(match['what'])}"
        old = match["old"]
        new = match["new"]
        place = _used_at(match["what"], graphs) or place
    elif match := _TYPE.search(guard):
        what = _readable(match["what"])
        old = (match["old"] or "").rpartition(".")[2]
        exchanged = _module_at(what, model)
        if exchanged is not None:
            new = type(exchanged).__name__
            place = _home(exchanged) or place
            said = "module was exchanged"
    elif guard.startswith("not "):
        what = _readable(guard.removeprefix("not "))
        old = "empty"
        new = "filled"
    elif match := _EQUAL.fullmatch(guard):
        what = _readable(match["what"])
        old = match["old"]
        new = _value_in(match["what"], newer)
    sentence, advice = advise_change(said)
    return Finding("recompile", place, sentence, advice, (program,), reason.strip(), what, old, new)


def _readable(source: str) -> str:
    """Write ``model._modules['a']._modules['0'].b`` as ``model.a.0.b``."""
    return re.sub(r"\._(?:modules|buffers|parameters)\['(\w+)'\]", r".\1", _LOCAL.sub(r"\1", source))


def _value_in(what: str, guards: str) -> str:
    match = re.search(rf": {re.escape(what)} == (.+?)(?:\s+#|$)", _LOCAL.sub(r"\1", guards), re.MULTILINE)
    return match[1] if match else ""


def _used_at(what: str, graphs: list[CompiledGraph]) -> Place | None:
    """Return where a tensor is first used, which the guard on its shape says in a comment."""
    for line in (line for graph in graphs for line in graph.guards.splitlines()):
        if f"check_tensor({what}," in _LOCAL.sub(r"\1", line):
            return commented_place(line)
    return None


def _module_at(path: str, model: nn.Module) -> nn.Module | None:
    try:
        return model.get_submodule(path.removeprefix("model."))
    except AttributeError:
        return None


def _home(module: nn.Module) -> Place | None:
    cls = type(module)
    try:
        return Place(inspect.getfile(cls), inspect.getsourcelines(cls)[1], cls.__qualname__)
    except (OSError, TypeError):
        return None
