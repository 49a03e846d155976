"""What an engine has done so far."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_llm.engine.latencies import Latency
from compiled_llm.kvcache.pool import PageAccount


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of an engine.

    Attributes:
        running: requests that have pages.
        waiting: requests that wait for them.
        finished: how many requests have ended.
        steps: how many steps were launched.
        preemptions: how often a request lost its pages to others.
        prompt_tokens: tokens of the prompts that have begun to run.
        cached_tokens: how many of those came from the prefix cache.
        new_tokens: tokens generated.
        cold_starts: how often a step, or a call of ``generate``, waited for something to be compiled or recorded.
        queue_seconds: how long requests waited until they first ran; of the latest 1,000, or None if there were none.
        first_token_seconds: how long they waited for their first token (time to first token); likewise.
        inter_token_seconds: from one token of a request to its next (inter-token latency); of the latest 1,000 steps.
        pages: the page account, shared with ``generate`` and caches; None before the first request.
    """

    running: int = 0
    waiting: int = 0
    finished: int = 0
    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    cold_starts: int = 0
    queue_seconds: Latency | None = None
    first_token_seconds: Latency | None = None
    inter_token_seconds: Latency | None = None
    pages: PageAccount | None = None

    @property
    def prefix_cache_hit_rate(self) -> float | None:
        """``cached_tokens`` in each of ``prompt_tokens``, 0 to 1; None before the first."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None
