"""The table of `/stats`: the last answer, and the engine that has written it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table

from compiled_llm.execution.reporting.plain_text import plain_text

if TYPE_CHECKING:
    from compiled_llm.engine.metrics import EngineStats
    from compiled_llm.protocol.messages import StatsReply
    from compiled_llm.requests.outputs import RequestOutput


def figures_of(stats: EngineStats | StatsReply, last: RequestOutput | None) -> str:
    """Return the figures of the engine, or of the engine process with all of its clients, and of the last answer."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in (*_of_answer(last), *_of_engine(stats)):
        table.add_row(name, value)
    return plain_text(table)


def _of_answer(output: RequestOutput | None) -> Iterator[tuple[str, str]]:
    if output is None:
        yield "last answer", "none yet"
        return
    tokens, first = len(output.token_ids), output.first_token_seconds
    parts = [f"{tokens} tokens in {output.seconds:.2f} s"]
    if first is not None:
        parts.append(f"the first after {first:.3f} s")
        if tokens > 1 and output.seconds > first:
            parts.append(f"then {(tokens - 1) / (output.seconds - first):.1f} tokens/s")
    yield "last answer", f"{', '.join(parts)} ({output.finish_reason})"
    yield "its prompt", f"{len(output.prompt_token_ids)} tokens, {output.cached_tokens} of them cached"


def _of_engine(stats: EngineStats | StatsReply) -> Iterator[tuple[str, str]]:
    yield "requests", f"{stats.running} running, {stats.waiting} waiting, {stats.finished} finished"
    share = f", {100 * stats.cached_tokens / stats.prompt_tokens:.0f}% cached" if stats.prompt_tokens else ""
    yield "tokens", f"{stats.new_tokens} new, {stats.prompt_tokens} of prompts{share}"
    for name, wait in (("first token", stats.first_token_seconds), ("between tokens", stats.inter_token_seconds)):
        if wait is not None:
            yield name, f"p50 {1000 * wait.p50:.1f} ms, p99 {1000 * wait.p99:.1f} ms"
    if (pages := stats.pages) is not None:
        yield "pages", f"{pages.used} used, {pages.cached} cached, {pages.free} free, of {pages.total}"
    yield "CUDA graphs", f"{stats.cuda_graphs}, after {stats.cold_starts} cold starts"
