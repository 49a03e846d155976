"""Counts of an engine: its work so far, and its room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from compiled_llm.engine.draft_stats import DraftStats
from compiled_llm.engine.encoder_cache_stats import EncoderCacheStats
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.engine.steps.timing.latencies import Latency, Waits
from compiled_llm.execution.model_runner import ModelRunner, Uncompiled
from compiled_llm.kvcache.pool import ENTRIES_OF_A_ROW, PageAccount, StateAccount
from compiled_llm.requests.histogram import NO_WAITS, Histogram


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of an engine.

    Attributes:
        running: requests that have pages.
        waiting: requests that wait for them.
        finished: requests that have ended.
        steps: how many were launched.
        mixed_steps: how many of them ran prompts and running requests in one launch.
        preemptions: how often a request lost its pages to others.
        prompt_tokens: tokens of the prompts that have begun to run.
        cached_tokens: how many of those came from the prefix cache.
        new_tokens: tokens generated.
        cold_starts: how often a step, or a call of ``generate``, waited for something to be compiled or captured.
        cuda_graphs: those that steps are replayed from, those of prefills among them; 0 on a CPU.
        queue_seconds: how long requests waited until they first ran; of the latest 1,000, or None if there were none.
        first_token_seconds: how long they waited for their first token (time to first token); likewise.
        inter_token_seconds: from one token of a request to its next (inter-token latency); of the latest 1,000 steps.
        queue_histogram: all that are counted in ``queue_seconds``, not only the latest, by their length.
        first_token_histogram: likewise.
        inter_token_histogram: likewise.
        uncompiled: why answers run uncompiled: ``"compiling"`` until what was asked for is compiled in the background,
            or ``"failed"``, which the log has a reason of; None if they do not, or ``mode`` says so.
        pages: the page account, shared with ``generate`` and caches; None before memory is allocated, and asleep.
        states: the same of the states of recurrent layers; None also without such layers.
        drafts: the tokens that were guessed, and those that were right; None without ``speculative_config``.
        encoder_cache: the use of what encoders have made of images, of all engines of the model; None before the
            first image.
    """

    running: int = 0
    waiting: int = 0
    finished: int = 0
    steps: int = 0
    mixed_steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    cold_starts: int = 0
    cuda_graphs: int = 0
    queue_seconds: Latency | None = None
    first_token_seconds: Latency | None = None
    inter_token_seconds: Latency | None = None
    queue_histogram: Histogram = NO_WAITS
    first_token_histogram: Histogram = NO_WAITS
    inter_token_histogram: Histogram = NO_WAITS
    uncompiled: Uncompiled | None = None
    pages: PageAccount | None = None
    states: StateAccount | None = None
    drafts: DraftStats | None = None
    encoder_cache: EncoderCacheStats | None = None

    @property
    def prefix_cache_hit_rate(self) -> float | None:
        """``cached_tokens`` in each of ``prompt_tokens``, 0 to 1; None before the first."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


_OF_SCHEDULER = ("finished", "preemptions", "prompt_tokens", "cached_tokens", "new_tokens")


def stats_of(loop: Loop | None, waiting: int, before: EngineStats, present: ModelRunner | None = None) -> EngineStats:
    """Return the statistics of a loop, None for none, added to those of ``before``."""
    if loop is None:
        room = {"pages": None, "states": None} if present is None else _stats_of_runner(present)
        return replace(before, running=0, waiting=waiting, **room)
    counts: dict[str, Any] = {name: getattr(before, name) + getattr(loop, name) for name in ("steps", "mixed_steps")}
    counts |= {name: getattr(before, name) + getattr(loop.scheduler, name) for name in _OF_SCHEDULER}
    for name in ("queue", "first_token", "inter_token"):
        waits: Waits = getattr(loop.scheduler.latencies, name)
        counts[f"{name}_seconds"] = waits.latency() or getattr(before, f"{name}_seconds")
        counts[f"{name}_histogram"] = getattr(before, f"{name}_histogram").plus(waits.histogram())
    if loop.drafts is not None:
        counts["drafts"] = loop.drafts.counts.plus(before.drafts or DraftStats())
    running = len(loop.scheduler.running)
    return EngineStats(running=running, waiting=waiting, **counts, **_stats_of_runner(loop.model_runner))


def _stats_of_runner(model_runner: ModelRunner) -> dict[str, Any]:
    return {
        "cold_starts": len(model_runner.events.cold_starts),
        "cuda_graphs": model_runner.graph_manager.captured,
        "uncompiled": model_runner.uncompiled,
        "pages": model_runner.pool.account(),
        "states": None if model_runner.pool.states is None else model_runner.pool.states.account(),
        "encoder_cache": getattr(model_runner.parts.get("encoder_cache"), "stats", None),
    }


_LENGTHS = (256, 1_024, 4_096, 16_384, 65_536)
"""Of requests that a description names, as far as the model has so many positions."""

Bound = Literal["max_num_seqs", "pages", "states"]
"""The limit on how many requests run at once."""


@dataclass(frozen=True)
class EngineDescription:
    """The use of an engine's device memory, and how many requests fit.

    Attributes:
        memory: bytes by what they are for: weights, pages, workspace, buffers and captured graphs.
        pages: the page account, shared with ``generate`` and caches.
        page_size: tokens in a page.
        kv_dtype: the dtype of keys and values in pages, as ``"bfloat16"``.
        kv_numbers_per_token: how many numbers of it a token takes in pages, over all layers.
        max_num_seqs: how many requests run at once, at most.
        max_tokens: how many tokens a request may have, prompt and answer together.
        states: how many states of recurrent layers rows and the prefix cache may have; 0 without such layers.
        bytes_of_a_state: over all layers.
    """

    memory: dict[str, int]
    pages: PageAccount
    page_size: int
    kv_dtype: str
    kv_numbers_per_token: int
    max_num_seqs: int
    max_tokens: int
    states: int = 0
    bytes_of_a_state: int = 0

    def requests(self, tokens: int) -> int:
        """Return how many requests of ``tokens``, prompt and answer together, run at once; ValueError if none can."""
        return self._at_once(tokens)[0]

    def bound(self, tokens: int) -> Bound:
        """Return what limits how many requests of ``tokens`` run at once: the first of equal limits."""
        return self._at_once(tokens)[1]

    def _at_once(self, tokens: int) -> tuple[int, Bound]:
        if not 1 <= tokens <= self.max_tokens:
            raise ValueError(
                f"tokens={tokens}: a request has 1 to {self.max_tokens} tokens, prompt and answer together"
            )
        of_pages = self.pages.total // -(-tokens // self.page_size)
        bounds: list[tuple[int, Bound]] = [(self.max_num_seqs, "max_num_seqs"), (of_pages, "pages")]
        if self.states:
            bounds.append((self.states // ENTRIES_OF_A_ROW, "states"))
        return min(bounds, key=lambda bound: bound[0])

    @property
    def prefix_cache_states(self) -> tuple[int, int]:
        """The bytes that states in the prefix cache may take: while all requests run, and while none does."""
        running = min(self.states, ENTRIES_OF_A_ROW * self.max_num_seqs)
        return (self.states - running) * self.bytes_of_a_state, self.states * self.bytes_of_a_state

    def __str__(self) -> str:
        """A line for each kind of memory, then one for each length."""
        return "\n".join(f"{name:<28}{text}" for name, text in self._lines())

    def _lines(self) -> Iterator[tuple[str, str]]:
        for name, nbytes in self.memory.items():
            yield name, f"{nbytes / 2**20:,.1f} MiB"
        tokens = self.pages.total * self.page_size
        yield "tokens in pages", f"{tokens:,} ({self.pages.total:,} pages of {self.page_size}, {self.kv_dtype})"
        yield "a token in pages", f"{self.kv_numbers_per_token:,} numbers"
        if self.states:
            yield from self._state_lines()
        lengths = sorted({*(length for length in _LENGTHS if length < self.max_tokens), self.max_tokens})
        for length in lengths:
            count, bound = self._at_once(length)
            yield f"requests of {length:,} tokens", f"{count:,} at once, bound by {bound}"

    def _state_lines(self) -> Iterator[tuple[str, str]]:
        """Of memory for pages and states, which ``kv_memory`` in bytes bounds, the prefix cache has a share."""
        one, memory = self.bytes_of_a_state / 2**20, self.memory["pages"] + self.memory["states"]
        yield "states of recurrent layers", f"{self.states:,} of {one:,.1f} MiB, {ENTRIES_OF_A_ROW} a request"
        least, most = self.prefix_cache_states
        shares = f"{least / memory:.0%} to {most / memory:.0%} of pages and states"
        yield "states in the prefix cache", f"up to {least / 2**20:,.1f} to {most / 2**20:,.1f} MiB, {shares}"
