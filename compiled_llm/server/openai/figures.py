"""An engine process's figures as Prometheus knows them: fields of its ``Stats``, and their meanings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from compiled_llm.requests.histogram import BUCKETS

GAUGES = {
    "running": "Requests that run",
    "waiting": "Requests that wait",
    "connections": "Clients of the engine process",
    "cuda_graphs": "CUDA graphs that steps are replayed from",
}
COUNTERS = {
    "finished": "Requests that have ended",
    "steps": "Steps of the engine",
    "mixed_steps": "Steps that ran prompts and running requests in one launch",
    "preemptions": "Requests that gave their pages to others",
    "prompt_tokens": "Tokens of prompts",
    "cached_tokens": "Tokens of prompts that the prefix cache had",
    "new_tokens": "Tokens of answers",
    "cold_starts": "Steps that compiled or captured something",
}
HISTOGRAMS = {
    "request_queue_time_seconds": ("queue_histogram", "Until a request first runs"),
    "time_to_first_token_seconds": ("first_token_histogram", "Until its first token"),
    "inter_token_latency_seconds": ("inter_token_histogram", "Between two tokens of a request"),
}
"""With the names of vLLM's, and our fields."""
FEATURES = {
    "drafts": {
        "drafts": ("spec_decode_num_drafts", "Times that tokens were guessed for a request in a step"),
        "draft_tokens": ("spec_decode_num_draft_tokens", "Tokens that were guessed"),
        "accepted_tokens": ("spec_decode_num_accepted_tokens", "Guessed tokens that were right"),
        "accepted_per_position": (
            "spec_decode_num_accepted_tokens_per_pos",
            "Guessed tokens that were right, by their place among the guesses",
        ),
    },
    "encoder_cache": {
        "queries": ("mm_cache_queries", "Images that were looked up among those the encoder has seen"),
        "hits": ("mm_cache_hits", "Images that were not encoded again"),
    },
}
"""Counters of features, which are there once one is in use: vLLM's names, by our fields; of a list, by position."""
UNCOMPILED = "1 while answers run uncompiled: until they are compiled in the background, or if that has failed"
PAGES = "Pages of the key-value cache"
STATES = ("used", "free", "cached")


def cumulative(counts: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield the label ``le`` of each bucket of a histogram, and how many waits were at most so long."""
    yield from zip([*map(str, BUCKETS), "+Inf"], accumulate(counts), strict=True)
