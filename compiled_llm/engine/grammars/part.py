"""The functions by which the rest of the package uses structured outputs."""

# Clients import this module without torch, so what needs torch is imported once an engine is made.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from compiled_llm.engine.grammars.ends import ends_of as ends_of
from compiled_llm.engine.grammars.forms.given import check_params as check_params, source_of as source_of
from compiled_llm.engine.grammars.forms.grammar_source import is_installed

if TYPE_CHECKING:
    from compiled_llm.engine.grammars import part as this
    from compiled_llm.engine.grammars.compiling import Grammars
    from compiled_llm.engine.grammars.worker_process import WorkerProcess
    from compiled_llm.engine.parts import GrammarsPart
    from compiled_llm.requests.structured_outputs import FormsPart

    checked: GrammarsPart = this
    checked_for_requests: FormsPart = this


def start_worker() -> WorkerProcess | None:
    """Start the process that compiles grammars; None if nothing can compile them."""
    if not is_installed():
        return None
    from compiled_llm.engine.grammars.worker_process import WorkerProcess  # imports msgspec, which only a server needs

    return WorkerProcess()


def grammars_of(
    tokenizer: Any,
    worker: WorkerProcess | None,
    timeout: float,
    arrive: Callable[..., None],
    end: Callable[..., None],
) -> Grammars:
    """Return the grammars of an engine: compiled in the worker process, or without one in this process."""
    from compiled_llm.engine.grammars.compilers import Compilers
    from compiled_llm.engine.grammars.compiling import Grammars

    compilers = Compilers(tokenizer)
    if worker is not None:
        from compiled_llm.engine.grammars.compilers_apart import CompilersApart  # imports msgspec

        compilers = CompilersApart(tokenizer, worker, timeout)
    return Grammars(tokenizer, compilers, timeout, arrive, end)
