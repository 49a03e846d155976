"""Notices that Inductor compiles a graph, in place of taking its code from a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import fx

from compiled_llm.compat.torch.inductor import CustomGraphPass


class CompilingNotice(CustomGraphPass):
    """A pass that changes nothing: Inductor runs its passes on a graph only if its caches hold no code for it."""

    def __init__(self, always: Callable[[], object] | None = None) -> None:
        """``always`` is called each time; an error that it raises keeps the graph from being compiled."""
        self._always = always
        self._tell: Callable[[], object] | None = None

    @contextmanager
    def telling(self, tell: Callable[[], object]) -> Iterator[None]:
        """Call ``tell`` each time that a graph is compiled while the block runs."""
        self._tell = tell
        try:
            yield
        finally:
            self._tell = None

    def __call__(self, graph: fx.Graph) -> None:
        if self._always is not None:
            self._always()
        if self._tell is not None:
            self._tell()

    def uuid(self) -> str:
        """Return this pass's part of the keys of Inductor's caches: the code does not depend on it."""
        return "compiled_llm: notices"
