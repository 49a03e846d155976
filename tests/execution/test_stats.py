"""What `stats()` and the repr of `model.compiled` say, and how speed is counted."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

import compiled_llm
from compiled_llm import Stats
from compiled_llm.commands.bench.contenders import ALL, choose
from compiled_llm.config import Mode
from compiled_llm.execution.reporting import stopwatch
from compiled_llm.execution.reporting.stopwatch import Stopwatch
from compiled_llm.execution.steps.launch import BoundProgram
from compiled_llm.kvcache.pool import PageAccount
from support.parity import greedy, mixed_prompts
from support.tiny_models import tiny_qwen3


@pytest.fixture
def model() -> Any:
    return compiled_llm.wrap(
        tiny_qwen3(eos_token_id=None), mode="eager", page_size=4, max_batch_size=4, kv_memory="400 tokens"
    )


def test_the_repr_says_what_is_ready(model, seed):
    assert repr(model.compiled) == "<CompiledModel mode='eager': nothing is compiled or allocated yet>"
    model.compiled.warmup([1, 4])
    assert repr(model.compiled) == "<CompiledModel mode='eager': batch sizes 1, 4 ready; 0 of 100 pages used>"
    output = greedy(model, mixed_prompts([4], 128, seed), 5, return_dict_in_generate=True)
    assert "2 of 100 pages used" in repr(model.compiled)
    assert output.past_key_values is not None


@pytest.mark.parametrize("mode", get_args(Mode))
def test_a_cpus_mode_has_one_name(mode: Mode) -> None:
    """That of the `bench`, whose contender for the default is the same."""
    model: Any = compiled_llm.wrap(tiny_qwen3(), mode=mode)
    (ours,) = choose("ours", "cpu", ALL)
    name = "eager" if mode == "eager" else ours.name.removeprefix("compiled-llm:")
    assert model.compiled.stats().mode == name
    assert repr(model.compiled).startswith(f"<CompiledModel mode={name!r}: ")
    assert model.compiled.config.mode == mode  # as it was given


@pytest.mark.parametrize(("given", "buckets"), [(3, [4]), (1, [1]), ((1, 2), [1, 2]), (None, [1, 2, 4])])
def test_warmup_takes_one_batch_size_or_several(given, buckets, model):
    model.compiled.warmup(given)
    assert model.compiled.stats().buckets == buckets


@pytest.mark.parametrize("given", [0, 5, 2.5, [2.5], ["3"], [-1, 2]])
def test_warmup_takes_nothing_else(given, model):
    with pytest.raises(ValueError, match=r"batch_sizes: .* is not a whole number between 1 and max_batch_size=4"):
        model.compiled.warmup(given)
    assert model.compiled.stats().pages is None


def test_tokens_are_counted_up_to_the_end_of_each_row(model, seed):
    inputs = mixed_prompts([4, 6], 128, seed)
    first = greedy(model, inputs, 8)[:, 6:]
    assert model.compiled.stats().new_tokens == 16
    eos = int(first[0, 3])
    ends = [row.tolist().index(eos) + 1 if eos in row.tolist() else 8 for row in first]
    greedy(model, inputs, 8, eos_token_id=eos, pad_token_id=0)
    greedy(model, inputs, 8, eos_token_id=eos, pad_token_id=0, no_repeat_ngram_size=50)  # the processed loop
    stats = model.compiled.stats()
    assert stats.generate_calls == {"fast loop": 2, "processed loop": 1}
    assert stats.new_tokens == 16 + 2 * sum(ends)
    assert stats.tokens_per_second == pytest.approx(stats.new_tokens / stats.generate_seconds)


def test_compiling_is_no_time_of_generating(model, seed, monkeypatch):
    now = 0.0
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now)
    launch = BoundProgram.__call__

    def slow(*arguments: Any) -> Any:
        nonlocal now
        now += 1.0
        return launch(*arguments)

    monkeypatch.setattr(BoundProgram, "__call__", slow)
    greedy(model, mixed_prompts([4], 128, seed), 6)
    stats = model.compiled.stats()
    assert (stats.generate_seconds, stats.compile_seconds) == (5.0, 1.0), "the first launch prepares the bucket"
    assert stats.tokens_per_second == pytest.approx(6 / 5)


def test_a_call_that_is_stopped_counts_its_tokens(model, seed):
    class StopError(Exception):
        pass

    def criteria(ids: Any, scores: Any, **_: Any) -> Any:
        if ids.shape[1] == 8:
            raise StopError
        return torch.zeros(len(ids), dtype=torch.bool)

    with pytest.raises(StopError):
        greedy(model, mixed_prompts([5], 128, seed), 9, stopping_criteria=[criteria])
    assert model.compiled.stats().new_tokens == 3


def test_a_stopwatch_counts_what_overlaps_once_and_leaves_pauses_out(monkeypatch):
    now = 0.0
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now)
    watch = Stopwatch()
    with watch.running():
        now = 1.0
        with watch.running():
            now = 3.0
            with watch.paused():
                now = 10.0
            now = 11.0
        now = 12.0
        assert watch.seconds == 5.0
    now = 20.0
    with watch.paused():
        now = 30.0
    assert watch.seconds == 5.0


ON_CUDA: dict[str, Any] = {
    "device": "cuda:0",
    "pages": PageAccount(100, 0, 100, 0),
    "page_size": 16,
    "graphs": 3,
    "cuda_graphs": 2,
    "prefill_cuda_graphs": 5,
    "cudagraph_skips": 1,
    "uploads": 7,
    "memory": {"pages": 101 * 2**20, "workspace": 2**20, "graphs": 0},
    "peak_pages": 50,
}


def test_what_a_gpu_has_is_shown_there_and_nowhere_else():
    shown = str(Stats(**ON_CUDA))
    assert "page tables uploaded 7 times" in shown
    assert "2 decode steps and 5 prefills captured, 1 skipped" in shown
    assert "101.0 MiB, of which 50.0 MiB were used at most" in shown
    assert "memory: graphs" not in shown, "there are none"
    assert "room" not in shown
    assert "1 skipped, 5 made room" in str(Stats(**ON_CUDA, cuda_graph_table=[{"evictions": 2}, {"evictions": 3}]))
    for elsewhere in (str(Stats(**{**ON_CUDA, "device": "cpu"})), str(Stats(**ON_CUDA, mode="compile"))):
        assert "captured" not in elsewhere
        assert "skipped" not in elsewhere
    assert "uploaded" not in str(Stats(**{**ON_CUDA, "device": "cpu"}))
    assert "graphs in" not in str(Stats(**ON_CUDA, mode="eager"))


def test_reasons_stand_below_the_calls_that_they_are_of():
    stats = Stats(
        generate_calls={"original": 1},
        forward_calls={"original": 1},
        slow_paths={"forward: gradients": 1, "autocast": 1},
    )
    assert [line.split() for line in str(stats).splitlines()] == [
        ["generate", "1", "original"],
        [*["1", "on", "a", "slower", "path:", "autocast"]],
        ["forward", "1", "original"],
        [*["1", "on", "a", "slower", "path:", "gradients"]],
    ]
