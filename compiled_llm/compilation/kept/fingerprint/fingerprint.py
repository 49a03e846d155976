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
            return cls._of_trace(model, function, arguments, graph)
        except Exception as error:  # any: what is read may be anything, and not every torch has what is asked for
            return cls({}, f"its trace cannot be read: {type(error).__name__}: {error}")

    @classmethod
    def _of_trace(
        cls,
        model: nn.Module,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        graph: fx.Graph | None,
    ) -> Fingerprint:
        codes = traced_code() | _called_in(graph)
        read = {**arguments, "model": model}
        guards = [*guards_now(read, cast(FunctionType, function).__globals__)]
        looked_into = {code_digest(each.__code__) for each in functions_read(guards)}
        traced = frozenset(map(code_digest, codes)) | looked_into
        words = frozenset(word for code in codes for word in words_in(code))
        walk, refused = _walked(model, function, read, traced, words)
        refused = refused or _why_not(walk, codes, guards, graph)
        return cls(_entries_of(walk), refused, traced, frozenset(walk.looked_up), _places(walk))

    def now(
        self,
        model: nn.Module,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
    ) -> Fingerprint:
        """Return what the same hashes are of these objects, within ``AttentionSwitch.paged``; arguments as above."""
        read = {**arguments, "model": model}
        try:
            walk, refused = _walked(model, function, read, self.traced, self.looked_up)
            return Fingerprint(_entries_of(walk), refused, self.traced, self.looked_up, _places(walk))
        except Exception as error:  # any: as above
            return Fingerprint({}, f"it cannot be compared: {type(error).__name__}: {error}")

    def differences(
        self,
        model: nn.Module,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
    ) -> list[str]:
        """Return in words how these objects, this process and its settings differ from what was traced."""
        return self.compared(self.now(model, function, arguments))

    def compared(self, now: Fingerprint) -> list[str]:
        """Return in words how what there is now differs; nothing if the program may be taken."""
        if refused := self.refused or now.refused:
            return [refused]
        return compare(self.entries, now.entries)

    def for_any_threads(self) -> Fingerprint:
        """Return that of something which is the same whatever the number of torch's threads is."""
        return replace(self, entries={name: entry for name, entry in self.entries.items() if name != THREADS})

    def encoded(self) -> dict[str, Any]:
        """Return it as values of JSON."""
        return {
            "entries": dict(self.entries),
            "refused": self.refused,
            "traced": sorted(self.traced),
            "looked_up": sorted(self.looked_up),
        }

    @classmethod
    def decoded(cls, said: Any) -> Fingerprint:
        """Read what ``encoded`` returns; ValueError if it is something else."""
        try:
            entries, refused = said["entries"], said["refused"]
            words = [*entries, *entries.values(), *said["traced"], *said["looked_up"]]
            if not all(isinstance(word, str) for word in words) or not isinstance(refused, (str, type(None))):
                raise ValueError("a fingerprint consists of texts")
            return cls(entries, refused, frozenset(said["traced"]), frozenset(said["looked_up"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no fingerprint: {type(error).__name__}: {error}") from None


def compare(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return in words how entries differ; the process's are compared by this, too, whenever a step is made."""
    names = [*there, *(name for name in here if name not in there and name != THREADS)]
    return [_in_words(name, there, here) for name in names if there.get(name) != here.get(name)]


def _in_words(name: str, there: Mapping[str, str], here: Mapping[str, str]) -> str:
    if name not in there:
        return f"{name} is new"
    return f"{name} differs" if name in here else f"{name} is gone"


def _walked(
    model: nn.Module,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    traced: frozenset[str],
    words: frozenset[str],
) -> tuple[Walk, str | None]:
    walk = Walk(model, traced, words)
    roots = {name: value for name, value in arguments.items() if name not in PER_CALL}
    kinds = {f"kinds of {name}": [*_kinds_in(arguments[name])] for name in PER_CALL if name in arguments}
    if hooks_on_all_modules():
        return walk, "there are hooks on all modules of the process"
    try:
        walk.over({"program": function, **roots, **kinds})
    except UnhashableError as error:
        return walk, str(error)
    return walk, None


def _kinds_in(value: Any) -> Iterator[type]:
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


def _unknown_call(target: Any) -> str | None:
    """Return the name of a function that a graph calls, unless it is an operation of torch's or of ours."""
    if isinstance(target, torch._ops.OpOverload):
        return None if target.namespace in _OPS else str(target)
    if isinstance(target, FunctionType):
        return None if _is_of_library(target.__code__) else f"{target.__module__}.{target.__qualname__}"
    return None
