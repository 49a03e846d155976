"""The call of ``generate`` that this thread is inside: the paths it has taken and the inputs it has read."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from compiled_llm.compat.contexts import of_one_call
from compiled_llm.execution.reporting.slow_paths import Reason
from compiled_llm.execution.reporting.stats import Path
from compiled_llm.huggingface.cache.paged_cache import PagedCache
from compiled_llm.huggingface.handle import CompiledModel
from compiled_llm.huggingface.inspection.host_copies import HostCopies

C = TypeVar("C", bound=PagedCache)


@dataclass(frozen=True)
class GenerateCall:
    """A call of ``generate`` in progress; ``custom`` if the loop is that of ``custom_generate``."""

    paths: list[Path]  # of this call and the calls inside it
    copies: HostCopies = field(default_factory=HostCopies)
    caches: list[PagedCache] = field(default_factory=list)  # that the call has made; the user has not seen them
    original: list[Reason] = field(default_factory=list)  # why its forwards are HuggingFace's own
    custom: bool = False

    @classmethod
    def inside(cls, outer: GenerateCall | None, custom: bool = False) -> GenerateCall:
        """Return a new call, made by ``outer`` if there is one: an assistant's drafts, for example."""
        return cls([] if outer is None else outer.paths, custom=custom)


current_call: ContextVar[GenerateCall | None] = of_one_call(ContextVar("current_call", default=None), None)
"""None outside ``generate``; forwards inside it are not counted one by one."""


def copies() -> HostCopies:
    """Return the current call's host copies; empty if a decoding method is called by itself."""
    call = current_call.get()
    return HostCopies() if call is None else call.copies


def made(cache: C) -> C:
    """Note a cache as one that the current call has made, and return it."""
    if (call := current_call.get()) is not None:
        call.caches.append(cache)
    return cache


def goes_original(runtime: CompiledModel, reason: Reason) -> None:
    """Count a call of ``generate`` on the original path, and let its forwards be HuggingFace's own."""
    if (call := current_call.get()) is not None:
        call.original.append(reason)
    took(runtime, "original", reason)


def original_reason() -> Reason | None:
    """Return why forwards of the current call are HuggingFace's own, or None."""
    call = current_call.get()
    return call.original[0] if call is not None and call.original else None


def took(runtime: CompiledModel, path: Path, reason: Reason | None = None) -> None:
    """Count a call's path, with the reason if it is not the fast loop."""
    if (call := current_call.get()) is not None:
        call.paths.append(path)
    runtime.counters.took(path, reason)
