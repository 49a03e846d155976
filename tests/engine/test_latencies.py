"""The figures of ``Engine.stats()`` for waits, the prefix cache and pages."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest

import compiled_llm
from compiled_llm.engine.steps.request import Request
from compiled_llm.engine.steps.timing.latencies import WINDOW, Latencies, Latency, Waits
from compiled_llm.kvcache.pool import PageAccount
from compiled_llm.requests.histogram import BUCKETS, Histogram
from compiled_llm.requests.sampling_params import SamplingParams
from support.engine.tiny_engines import wrapped
from support.tiny_models import tiny_qwen3


def request(submitted: float, admitted: float | None = None) -> Request:
    once = {"submitted": submitted, "admitted": admitted}
    return Request(prompt=np.array([1]), sampling=None, max_tokens=9, stop_token_ids=frozenset(), **once)


def test_percentiles_count_each_wait(seed):
    draw, waits = random.Random(seed), Waits()
    steps = [{draw.random(): draw.randint(1, 9) for _ in range(draw.randint(1, 3))} for _ in range(50)]
    for counts in steps:
        waits.add(counts)
    seconds = sorted(wait for counts in steps for wait, count in counts.items() for _ in range(count))
    latency = waits.latency()
    assert latency is not None
    for share, value in zip((0.5, 0.99), latency, strict=True):
        assert sum(wait <= value for wait in seconds) >= share * len(seconds) > sum(wait < value for wait in seconds)


def test_the_latest_waits_count_alone():
    waits = Waits()
    assert waits.latency() is None
    waits.add({9.0: 10 * WINDOW})
    for _ in range(WINDOW):
        waits.add({1.0: 1})
    assert waits.latency() == Latency(1.0, 1.0)


def test_a_histogram_counts_all_waits_and_has_those_of_others_added(seed):
    draw, waits = random.Random(seed), Waits()
    seconds = [draw.choice([0.0, 0.001, 0.0011, 600.0, 600.1, 4000.0, draw.expovariate(1)]) for _ in range(2 * WINDOW)]
    for wait in seconds:
        waits.add({wait: 2})
    counts, total = waits.histogram()
    bounds = [-math.inf, *BUCKETS, math.inf]
    assert list(counts) == [2 * sum(low < wait <= high for wait in seconds) for low, high in pairwise(bounds)]
    assert total == pytest.approx(2 * sum(seconds))
    both = waits.histogram().plus(Histogram())
    assert both == waits.histogram()
    assert both.plus(both) == (tuple(2 * count for count in counts), 2 * total)


def test_a_request_waits_in_the_queue_for_its_first_token_and_between_tokens():
    latencies, first, second = Latencies(), request(submitted=1.0, admitted=1.5), request(submitted=2.0, admitted=4.0)
    latencies.read([first], now=3.0)
    latencies.read([first, second], now=5.0)
    latencies.read([second], now=6.0)
    latencies.read([first, second], now=9.0)  # the first was preempted meanwhile
    assert latencies.queue.latency() == Latency(0.5, 2.0)
    assert latencies.first_token.latency() == Latency(2.0, 3.0)
    assert list(latencies.inter_token._latest) == [{2.0: 1}, {1.0: 1}, {4.0: 1, 3.0: 1}]
    assert latencies.inter_token.latency() == Latency(2.0, 4.0)


def test_stats_of_an_engine():
    model = wrapped(400, tiny_qwen3(), page_size=16)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with compiled_llm.Engine(model, max_num_seqs=4) as engine:
        before = engine.stats()
        assert before.queue_seconds is before.first_token_seconds is before.inter_token_seconds is before.pages is None
        assert before.prefix_cache_hit_rate is None
        (output,) = engine.generate(list(range(3, 37)), params)
        once = engine.stats()
        engine.generate(list(range(3, 37)), params)
        stats = engine.stats()
    assert once.queue_seconds == (output.queue_seconds, output.queue_seconds)
    assert once.first_token_seconds == (output.first_token_seconds, output.first_token_seconds)
    assert once.inter_token_seconds is not None
    assert 0 < once.inter_token_seconds.p50 <= once.inter_token_seconds.p99 < output.seconds
    assert once.prefix_cache_hit_rate == 0
    assert stats.prefix_cache_hit_rate == stats.cached_tokens / stats.prompt_tokens == 32 / 68
    assert stats.cold_starts == len(model.compiled.model_runner().events.cold_starts) > 0
    assert stats.pages == PageAccount(total=25, used=0, free=23, cached=2)
    for histogram, count in (
        (stats.queue_histogram, 2),
        (stats.first_token_histogram, 2),
        (stats.inter_token_histogram, 14),
    ):
        assert sum(histogram.counts) == count
        assert histogram.seconds > 0


def test_histograms_go_on_after_sleep_and_pages_are_known_without_a_request():
    model = wrapped(400, tiny_qwen3(num_hidden_layers=1), page_size=16)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with compiled_llm.Engine(model, max_num_seqs=4) as engine:
        assert engine.stats().pages is None
        engine.describe()  # as a server does, before it is ready
        assert engine.stats().pages == PageAccount(total=25, used=0, free=25, cached=0)
        engine.generate([3, 4, 5], params)
        before = engine.stats()
        engine.sleep()
        assert engine.stats().first_token_histogram == before.first_token_histogram
        assert engine.stats().pages is None
        engine.wake()
        engine.generate([3, 4, 5], params)
        after = engine.stats()
    assert sum(after.first_token_histogram.counts) == 2
    assert sum(after.inter_token_histogram.counts) == 4


def test_a_description_says_how_many_requests_fit():
    model = wrapped(400, tiny_qwen3(max_position_embeddings=512), page_size=16)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with compiled_llm.Engine(model, max_num_seqs=4) as engine:
        room = engine.describe()
        assert [room.requests(tokens) for tokens in (1, 96, 97, 200, 208, 400)] == [4, 4, 3, 1, 1, 1]
        assert room.memory["pages"] > 0
        assert str(room).splitlines()[-1].split("  ")[-1].strip() == "0 at once, bound by pages"
        assert [room.bound(tokens) for tokens in (1, 96, 97)] == ["max_num_seqs", "max_num_seqs", "pages"]
        engine.generate([[5] * 40] * 6, params)  # 100 tokens each
        assert (engine.stats().preemptions, room.requests(100)) == (0, 3)
        for tokens in (0, 513):
            with pytest.raises(ValueError, match="1 to 512 tokens"):
                room.requests(tokens)
