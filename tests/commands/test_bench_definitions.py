"""What is timed, asked and read: the definitions of every figure hold."""

from __future__ import annotations

import pytest
from transformers import MixtralConfig, MixtralForCausalLM

from compiled_llm.commands.bench.local import tokens_to_hold
from compiled_llm.commands.bench.results import Startup
from compiled_llm.commands.bench.timing import Timing, TokenClock, timed
from compiled_llm.commands.bench.workload import Workload, workloads
from compiled_llm.explaining.profile.step_bytes import step_bytes
from support.bench import one_latency
from support.tiny_models import tiny_llama, tiny_qwen3


class FakeTime:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def streamed(time: FakeTime, clock: TokenClock, tokens: int) -> None:
    """A call: 0.5 s, the prompt, 1.5 s to the first token, 0.25 s between tokens, 0.75 s to return."""
    time.pass_by(0.5)
    clock.put("prompt")
    for number in range(tokens):
        time.pass_by(1.5 if number == 0 else 0.25)
        clock.put("token")
    clock.end()
    time.pass_by(0.75)


def test_first_token_and_end_are_counted_from_the_call() -> None:
    time = FakeTime()
    clock = TokenClock(time)
    timing = timed(lambda: streamed(time, clock, 5), clock, 5, lambda: None)
    assert timing == Timing(first=0.5 + 1.5, total=0.5 + 1.5 + 4 * 0.25 + 0.75)


def test_device_is_idle_before_the_call_and_at_its_end() -> None:
    """What the device still does when the call returns belongs to it, what it did before does not."""
    time = FakeTime()
    clock = TokenClock(time)
    timing = timed(lambda: streamed(time, clock, 5), clock, 5, lambda: time.pass_by(10))
    assert timing == Timing(first=2.0, total=3.75 + 10)


def test_missing_tokens_are_an_error() -> None:
    time = FakeTime()
    clock = TokenClock(time)
    with pytest.raises(RuntimeError, match="4 tokens came instead of 5"):
        timed(lambda: streamed(time, clock, 4), clock, 5, lambda: None)


@pytest.mark.parametrize(("first", "total"), [(1.0, 1.0), (2.0, 1.0), (0.0, 1.0)])
def test_timing_without_decode_is_refused(first: float, total: float) -> None:
    with pytest.raises(ValueError, match="decode cannot be told apart"):
        Timing(first, total)


def test_rates_follow_their_definitions() -> None:
    result = one_latency()
    decode = [2 * 4 / 1.0, 2 * 4 / 2.0, 2 * 4 / 1.0]
    assert (result.first.best, result.first.median, result.first.runs) == (0.25, 0.5, 3)
    assert (result.decode.best, result.decode.median) == (max(decode), sorted(decode)[1])
    assert result.end_to_end.best == pytest.approx(2 * 5 / 1.5)
    assert result.end_to_end.median == pytest.approx(2 * 5 / 2.0)
    assert result.of_ceiling == pytest.approx(result.decode.median / 16.0)
    assert result.workload.context == 8 + 5 // 2


def test_stages_of_startup_are_summarised_as_times() -> None:
    spread = Startup("a", "warm", {"loaded": [3.0, 1.0, 8.0]}).stage("loaded")
    assert (spread.best, spread.median, spread.runs) == (1.0, 3.0, 3)


# ---- workloads


def test_contexts_are_met_in_the_middle_of_decode() -> None:
    (found,) = workloads([1], [], [100], [32], [False])
    assert (found.prompt, found.context) == (100 - 16, 100)
    with pytest.raises(ValueError, match="context 16"):
        workloads([1], [], [16], [32], [False])


def test_every_combination_comes_once() -> None:
    found = workloads([1, 8], [16, 32], [24], [16], [False, True])  # a context of 24 is a prompt of 16
    assert len(found) == len(set(found)) == 2 * 2 * 2


def test_prompts_never_repeat() -> None:
    asked = Workload(2, 50, 4)
    first, again, second = (asked.prompts(1000, number) for number in (0, 0, 1))
    assert first == again
    assert first[0] != first[1]
    assert first != second
    assert all(len(prompt) == 50 and min(prompt) > 0 and max(prompt) < 1000 for prompt in first)


def test_pages_hold_the_largest_workload() -> None:
    small, large = Workload(1, 100, 4), Workload(3, 17, 15)  # 7 pages; 3 times 2 pages
    assert tokens_to_hold([small], 16) == (7 + 1) * 16
    assert tokens_to_hold([small, large], 16) == 3 * (2 + 1) * 16


# ---- bytes


def test_bytes_of_a_step_are_weights_once_and_each_rows_keys_and_values() -> None:
    model = tiny_qwen3()  # 2 layers, 2 kv heads of 16, vocabulary 128, hidden 64, not tied
    everything = sum(parameter.nbytes for parameter in model.parameters())
    nbytes = step_bytes(model, context=10)
    assert nbytes.weights == everything - 128 * 64 * 4
    assert nbytes.kv_written == 2 * 2 * 2 * 16 * 4
    assert nbytes.kv_per_row == 10 * nbytes.kv_written
    assert nbytes.total(3) == nbytes.weights + 3 * nbytes.kv_per_row


def test_tied_embedding_is_read_whole() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    assert step_bytes(model, 10).weights == sum(parameter.nbytes for parameter in model.parameters())


def test_windows_bound_what_is_read() -> None:
    model = tiny_qwen3(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    kinds = model.config.layer_types
    token = 2 * 2 * 16 * 4
    assert sorted(kinds) == ["full_attention", "sliding_attention"]
    assert step_bytes(model, 10).kv_per_row == (10 + 4) * token


def test_ceiling_of_experts_is_not_known() -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=2))
    assert step_bytes(model, 10).total(1) is None
