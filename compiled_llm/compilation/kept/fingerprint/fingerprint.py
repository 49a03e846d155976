"""The fingerprint of a traced program: whether it may be taken in another process, and if not, what differs."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, cast

import torch
from torch import fx, nn

import compiled_llm_ops
from compiled_llm.compat.torch.dynamo import traced_code
from compiled_llm.compat.torch.kept.guards import Guarded, guards_now
from compiled_llm.compat.torch.modes import hooks_on_all_modules
from compiled_llm.compilation.kept.fingerprint.code import code_digest, words_in
from compiled_llm.compilation.kept.fingerprint.coverage import functions_read, uncovered
from compiled_llm.compilation.kept.fingerprint.functions import reads_more
from compiled_llm.compilation.kept.fingerprint.plain import path_of
from compiled_llm.compilation.kept.fingerprint.surroundings import THREADS, process_state, versions
from compiled_llm.compilation.kept.fingerprint.visit import UnhashableError
from compiled_llm.compilation.kept.fingerprint.walk import Walk
from compiled_llm.compilation.kept.paths import PER_CALL
from compiled_llm.model.version.code import Place

_LIBRARIES = tuple(
    str(Path(folder).resolve())
    for folder in (
        *(Path(torch.__file__).parent, Path(compiled_llm_ops.__file__).parent, Path(__file__).parents[3]),
        sysconfig.get_path("stdlib"),
    )
)
_OPS = frozenset({"aten", "prims", "prim", "compiled_llm", "inductor", "higher_order"})


@dataclass(frozen=True)
class Fingerprint:
    """The hashes of all that a trace has read, or why there are none.

    Attributes:
        entries: hashes by readable names; all of them are the same where the program may be taken.
        refused: what the program depends on that cannot be hashed; None if there is nothing.
        traced: the hashes of traced code: functions with such code are looked into.
        looked_up: the names of attributes that hold objects and were looked into.
        places: where a change in this process is to be noticed, for ``ModelVersion.watch_code``; not kept.
    """

    entries: Mapping[str, str]
    refused: str | None = None
    traced: frozenset[str] = frozenset()
    looked_up: frozenset[str] = frozenset()
    places: Sequence[Place] = field(default=(), compare=False)

    @classmethod
    def of_trace(
        cls,
        model: nn.Module,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        graph: fx.Graph | None = None,
    ) -> Fingerprint:
        """Return that of the trace of ``function`` that a backend is called in, within ``AttentionSwitch.paged``.

        ``model`` is what the program stands for, no outline of it; ``arguments`` are all of the program's, by name.
        """
        try:
            codes = traced_code() | _called_in(graph)
            read = {**arguments, "model": model}
            guards = [*guards_now(read, cast(FunctionType, function).__globals__)]
            traced = {*map(code_digest, codes), *(code_digest(each.__code__) for each in functions_read(guards))}
            walk = Walk(model, traced, {word for code in codes for word in words_in(code)})
            refused = _walk(walk, function, read) or _why_not(walk, codes, guards, graph)
            return cls(_entries_of(walk), refused, walk.traced, frozenset(walk.looked_up), _places(walk))
        except Exception as error:  # any: what is read may be anything, and not every torch has what is asked for
            return cls({}, f"its trace cannot be read: {type(error).__name__}: {error}")

    def now(self, model: nn.Module, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Fingerprint:
        """Return what the same hashes are of these objects, within ``AttentionSwitch.paged``; arguments as above."""
        try:
            walk = Walk(model, self.traced, self.looked_up)
            refused = _walk(walk, function, {**arguments, "model": model})
            return Fingerprint(_entries_of(walk), refused, places=_places(walk))
        except Exception as error:  # any: as above
            return Fingerprint({}, f"it cannot be compared: {type(error).__name__}: {error}")

    def compared(self, now: Fingerprint) -> list[str]:
        """Return in words how what there is now differs; nothing if the program may be taken."""
        if refused := self.refused or now.refused:
            return [refused]
        return compare(self.entries, now.entries)

    def process_differences(self) -> list[str]:
        """Return in words how this process and its settings differ."""
        now = process_state()
        return compare({name: entry for name, entry in self.entries.items() if name in now}, now)

    def for_any_threads(self) -> Fingerprint:
        """Return that of something which is the same whatever the number of torch's threads is."""
        return replace(self, entries={name: entry for name, entry in self.entries.items() if name != THREADS})

    def encoded(self) -> dict[str, Any]:
        """Return it as values of JSON."""
        lists = {"traced": sorted(self.traced), "looked_up": sorted(self.looked_up)}
        return {"entries": dict(self.entries), "refused": self.refused, **lists}

    @classmethod
    def decoded(cls, encoded: Any) -> Fingerprint:
        """Read what ``encoded`` returns; ValueError if it is something else."""
        try:
            entries, refused = encoded["entries"], encoded["refused"]
            words = [*entries, *entries.values(), *encoded["traced"], *encoded["looked_up"]]
            if not all(isinstance(word, str) for word in words) or not isinstance(refused, (str, type(None))):
                raise ValueError("a fingerprint consists of texts")
            return cls(entries, refused, frozenset(encoded["traced"]), frozenset(encoded["looked_up"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no fingerprint: {type(error).__name__}: {error}") from None


def compare(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return in words how entries differ."""
    new = [f"{name} is new" for name in here if name not in there and name != THREADS]
    gone = [f"{name} is gone" for name in there if name not in here]
    return [f"{name} differs" for name in there if name in here and there[name] != here[name]] + gone + new


def _walk(walk: Walk, function: Callable[..., Any], arguments: Mapping[str, Any]) -> str | None:
    """Walk over all that a program with these arguments may read; return what cannot be hashed, None if all can."""
    if hooks_on_all_modules():
        return "there are hooks on all modules of the process"
    roots = {name: value for name, value in arguments.items() if name not in PER_CALL}
    kinds = {f"kinds of {name}": [*_kinds_in(arguments[name])] for name in PER_CALL if name in arguments}
    try:
        walk.over({"program": function, **roots, **kinds})
    except UnhashableError as error:
        return str(error)
    return None


def _kinds_in(value: object) -> Iterator[type]:
    """Yield the classes of a value and of those inside it, each once; of tensors and plain values none."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        yield type(value)
    elif type(value).__module__.partition(".")[0] in ("compiled_llm", "compiled_llm_ops"):
        yield type(value)
        value = tuple(vars(value).values()) if hasattr(value, "__dict__") else ()
    if isinstance(value, (tuple, list)):
        yield from dict.fromkeys(kind for entry in value for kind in _kinds_in(entry))


def _entries_of(walk: Walk) -> dict[str, str]:
    return {**versions(), **process_state(), **walk.entries}


def _places(walk: Walk) -> list[Place]:
    return list({(id(owner), name): (owner, name) for owner, name in walk.places}.values())


def _why_not(walk: Walk, codes: frozenset[CodeType], guards: list[Guarded], graph: fx.Graph | None) -> str | None:
    """Return why a trace cannot be kept, although all that was found was hashed; None if it can."""
    for code in codes:
        if code_digest(code) not in walk.reached and not _is_of_library(code):
            return f"the traced function {code.co_name} ({code.co_filename}) is nowhere that is looked into"
    if hidden := _unseen(walk.hidden, walk):
        return hidden
    if missing := uncovered(guards, walk, PER_CALL):
        return f"it depends on {missing[0]}, which is not hashed"
    for node in () if graph is None else graph.nodes:
        if node.op == "call_function" and (call := _unknown_call(node.target)) is not None:
            return f"it calls {call}, whose code is not looked into"
    return None


def _unseen(called: Iterable[object], walk: Walk) -> str | None:
    """Return which of the functions that may have been ``called`` unseen reads what is not hashed; None if none."""
    for function in called:
        if not isinstance(function, FunctionType) or _is_of_library(code := function.__code__):
            continue
        if code_digest(code) not in walk.reached and reads_more(function):
            return f"what {path_of(function)} ({code.co_filename}) reads is not looked into, and it may have run"
    return None


def _called_in(graph: fx.Graph | None) -> frozenset[CodeType]:
    """Return the code of functions that a graph calls, which the compiler looks into."""
    called = () if graph is None else (node.target for node in graph.nodes if node.op == "call_function")
    return frozenset(target.__code__ for target in called if isinstance(target, FunctionType))


def _is_of_library(code: CodeType) -> bool:
    """Whether code is torch's, Python's or ours, which versions and files stand for."""
    return code.co_filename.startswith(("<frozen", *_LIBRARIES))


def _unknown_call(target: object) -> str | None:
    """Return the name of a function that a graph calls, unless it is an operation of torch's or of ours."""
    if isinstance(target, torch._ops.OpOverload):
        return None if target.namespace in _OPS else str(target)
    if isinstance(target, FunctionType):
        return None if _is_of_library(target.__code__) else f"{target.__module__}.{target.__qualname__}"
    return None
