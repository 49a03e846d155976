"""A wrapped model on a GPU: graphs captured once, logits as exact as HuggingFace's, no waiting, no stale page table.

Models are random, in bfloat16. Nothing here is compared with ourselves alone: the measure of every tolerance is how
far HuggingFace in bfloat16 (sdpa) is from HuggingFace in float32 (eager attention) on the same tokens.

Shapes: B rows, T steps, V vocabulary.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.generation.streamers import BaseStreamer

import compiled_llm
from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm.kvcache.cuda_virtual_memory import mapped_bytes
from compiled_llm.kvcache.pool import PagePool
from support.execution.launches import launches_of_steps
from support.execution.model_changes import (
    Changing,
    in_place,
    moved_data,
    new_parameter,
    other_attribute,
    swapped_module,
)
from support.execution.twins import (
    BEYOND_NOISE,
    DEVICE,
    OPTIONS,
    ROWS,
    SMALL,
    WINDOWED,
    Twins,
    assert_parity,
    hf_logits,
    in_float32,
    parity,
    prompts_on_device,
    random_model,
    rms,
    small_qwen3,
    twins_of,
)
from support.ops.sampling_cases import EVERYTHING
from support.parity import assert_account_is_empty, greedy

pytestmark = pytest.mark.gpu

SLEEP = 2_000_000_000
"""Cycles: about a second."""

QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
QWEN3_06B: dict[str, Any] = {
    **QWEN3,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
QWEN3_8B: dict[str, Any] = {
    **QWEN3,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
LLAMA: dict[str, Any] = {**SMALL, "hidden_size": 384, "num_attention_heads": 6}


# ---- HuggingFace as the measure


FAMILIES: dict[str, Callable[[int], Any]] = {
    "Qwen3-0.6B": lambda seed: random_model(Qwen3Config(**QWEN3_06B), seed),
    "two layers of Qwen3-8B": lambda seed: random_model(Qwen3Config(**{**QWEN3_8B, "num_hidden_layers": 2}), seed),
    "Llama": lambda seed: random_model(LlamaConfig(**LLAMA), seed, (1, 2)),
    "sliding and full layers": lambda seed: random_model(Qwen3Config(**WINDOWED), seed, (1, 2)),
    "head size 96": lambda seed: small_qwen3(seed, head_dim=96, num_attention_heads=8),
}


@pytest.fixture(scope="module")
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    made = twins_of(FAMILIES[request.param](request.config.getoption("seed")))
    yield made
    compiled_llm.unwrap(made.wrapped)
    gc.collect()


@pytest.mark.parametrize("twins", FAMILIES, indirect=True)
def test_logits_of_eight_rows_are_as_exact_as_huggingfaces(twins: Twins, seed: int) -> None:
    assert_parity(parity(twins, [1, 15, 16, 17, 33, 64, 100, 250], 220, seed))
    assert twins.wrapped.compiled.stats().recompiles == 0


@pytest.mark.parametrize("twins", ["Qwen3-0.6B", "sliding and full layers"], indirect=True)
def test_logits_of_one_row_are_as_exact_as_huggingfaces(twins: Twins, seed: int) -> None:
    assert_parity(parity(twins, [100], 220, seed + 1))
    assert twins.wrapped.compiled.stats().recompiles == 0


# ---- generate


@pytest.fixture(scope="module", params=["auto", "flashinfer"])
def small(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    """A small Qwen3 with the buckets of 1, 4 and 8 rows ready, decoding with our kernel or with FlashInfer's."""
    model = compiled_llm.wrap(small_qwen3(request.config.getoption("seed")), **OPTIONS, backend=request.param)
    model.compiled.warmup([1, 4, 8])
    yield model
    compiled_llm.unwrap(model)
    gc.collect()


def assert_ready(model: PreTrainedModel, buckets: list[int]) -> None:
    """Every bucket captured once, every program compiled once, nothing skipped."""
    stats = model.compiled.stats()
    assert stats.buckets == buckets
    assert stats.cuda_graphs == (len(buckets) if DEVICE == "cuda" else 0)
    programs = 4 if DEVICE == "cuda" else 3  # a prefill, two decodes, and one where rows share pages
    assert (stats.graphs, stats.graph_breaks, stats.recompiles, stats.cudagraph_skips) == (programs, 0, 0, 0)


def test_each_bucket_is_recorded_once_and_only_replayed_ever_after(seed: int) -> None:
    model = compiled_llm.wrap(small_qwen3(seed), **OPTIONS)
    model.compiled.warmup([1, 4, 8])
    assert_ready(model, [1, 4, 8, ROWS])
    with torch.compiler.set_stance("fail_on_recompile"):
        for number, lengths in enumerate([[1], [40], [3, 90, 1], [5] * 4, [16] * 5, [1, 2, 3, 4, 5, 6, 7], [33] * 8]):
            for new_tokens in (1, 2, 37):
                greedy(model, prompts_on_device(lengths, seed + number), new_tokens)
        assert_ready(model, [1, 4, 8, ROWS])
        greedy(model, prompts_on_device([4, 2], seed), 9)
        greedy(model, prompts_on_device([1] * ROWS, seed), 9)
    assert_ready(model, [1, 2, 4, 8, ROWS])
    assert model.compiled.stats().generate_calls == {"fast loop": 23}
    assert_account_is_empty(model)
    compiled_llm.unwrap(model)


def test_a_decode_step_launches_one_graph_and_no_kernel_beside_it(small: PreTrainedModel) -> None:
    """What Inductor keeps out of a CUDA graph it launches by itself, without counting a skip."""
    generate_loop = small.compiled.generate_loop()
    for length in (3, 5, 4):
        generate_loop.admit([7] * length, 20)
    for _ in range(3):
        generate_loop.step()
    launches = launches_of_steps(small, generate_loop, 4)
    generate_loop.close()
    if not launches:
        pytest.skip("the profiler shows no launches on this machine")
    assert launches == ["cudaGraphLaunch"] * 4


BESIDE_A_USERS_OWN_GRAPHS = """
import torch
import compiled_llm
from support.parity import greedy
from support.execution.twins import OPTIONS, prompts_on_device, small_qwen3

model = compiled_llm.wrap(small_qwen3(0), **OPTIONS)
inputs = prompts_on_device([5, 9, 30], 0)
expected = greedy(model, inputs, 20)

@torch.compile(mode="reduce-overhead", fullgraph=True)
def double(x):
    return 2 * x

for number in range(4):
    torch.compiler.cudagraph_mark_step_begin()
    assert double(torch.full((8,), float(number), device="cuda")).tolist() == [2.0 * number] * 8
    torch.testing.assert_close(greedy(model, inputs, 20), expected)
stats = model.compiled.stats()
assert (stats.cuda_graphs, stats.recompiles, stats.cudagraph_skips) == (2, 0, 0), stats  # the largest, too
compiled_llm.unwrap(model)
print("all is well")
"""


def test_nothing_is_skipped_in_a_fresh_process_nor_a_users_own_graphs_disturbed() -> None:
    """Inductor raises where it would skip; the user captures graphs on the main thread, after ours and between."""
    done = subprocess.run(
        [sys.executable, "-c", BESIDE_A_USERS_OWN_GRAPHS],
        env={**os.environ, "TORCHINDUCTOR_CUDAGRAPH_OR_ERROR": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["all is well"]), done.stdout + done.stderr


@pytest.mark.parametrize("tokens", [48, 64])
def test_logits_after_prompts_in_pieces_are_as_exact_as_huggingfaces(tokens: int, seed: int) -> None:
    """Pieces end within rows, at their ends and on page boundaries; a row attends to its earlier pieces."""
    made = twins_of(small_qwen3(seed), prefill_tokens=tokens)
    assert_parity(parity(made, [300, 10, 128, 64, 47], 40, seed))
    assert made.wrapped.compiled.stats().recompiles == 0
    compiled_llm.unwrap(made.wrapped)


@pytest.mark.parametrize("mode", ["eager", "compile", "reduce-overhead", "cuda-graphs"])
def test_every_token_is_the_one_that_float32_would_choose_but_for_noise(mode: str, seed: int) -> None:
    twins = twins_of(small_qwen3(seed), mode=mode)
    lengths = [1, 16, 31, 100, 7]
    inputs = prompts_on_device(lengths, seed)
    sequences = greedy(twins.wrapped, inputs, 120)
    for length, sequence in zip(lengths, sequences, strict=True):
        ids = sequence[max(lengths) - length : -1]
        exact = hf_logits(twins.exact, ids, 120)
        noise = rms(hf_logits(twins.plain, ids, 120) - exact)
        missed = exact.amax(dim=1) - exact.gather(1, sequence[-120:, None])[:, 0]
        assert bool((missed <= BEYOND_NOISE * noise.clamp(min=noise.mean())).all()), f"row of {length}: {missed}"
    compiled_llm.unwrap(twins.wrapped)


def test_steps_past_the_end_stay_within_the_rows_own_pages(
    small: PreTrainedModel, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths end on page boundaries, rows end early and late, and no page is touched that no row has taken."""
    pages, taken = small.compiled.model_runner().state.pages, set()
    take = PagePool.take_reserved

    def noted(pool: PagePool, count: int) -> list[int]:
        own = take(pool, count)
        taken.update(own)
        return own

    monkeypatch.setattr(PagePool, "take_reserved", noted)
    for lengths, new_tokens in (([16, 32, 48, 64], 16), ([15, 31, 1], 17), ([1, 17, 33, 2, 5], 15), ([16], 16)):
        inputs = prompts_on_device(lengths, seed)
        free = greedy(small, inputs, new_tokens)
        for eos in (None, int(free[0, -1]), int(free[0, -2]), int(free[0, max(lengths)])):
            expected = greedy(small, inputs, new_tokens, eos_token_id=eos, pad_token_id=0)
            for layer in pages:
                layer.fill_(100)
            taken.clear()
            tokens = greedy(small, inputs, new_tokens, eos_token_id=eos, pad_token_id=0)
            torch.testing.assert_close(tokens, expected)
            foreign = [page for page in range(1, len(pages[0])) if page not in taken]
            assert foreign
            assert taken
            for layer in pages:
                assert bool((layer[foreign] == 100).all()), "a page was written that no row had taken"
    assert_account_is_empty(small)


def test_unwrap_gives_device_memory_back(seed: int) -> None:
    """Pages, buffers and workspaces, and what the captured graphs reserve: here some 20 MiB for their logits alone."""
    model = small_qwen3(seed, num_hidden_layers=1, vocab_size=300_000, tie_word_embeddings=True)

    def held() -> tuple[int, int]:
        """Bytes that tensors take, and bytes that torch holds without being able to give them back."""
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # torch keeps them for each thread and stream
        torch.cuda.empty_cache()
        mapped = mapped_bytes(torch.device(DEVICE))
        return torch.cuda.memory_allocated() + mapped, torch.cuda.memory_reserved() + mapped

    before = held()
    for _ in range(2):
        compiled_llm.wrap(model, **{**OPTIONS, "kv_memory": "64MiB"})
        model.compiled.warmup([1, ROWS])
        greedy(model, prompts_on_device([5, 20, 9], seed), 20)
        assert torch.cuda.memory_allocated() + mapped_bytes(torch.device(DEVICE)) - before[0] > 64 * 2**20
        compiled_llm.unwrap(model)
        for _ in range(100):  # a thread that is in the midst of collecting garbage may hold some of it a moment longer
            more = tuple(now - then for now, then in zip(held(), before, strict=True))
            if max(more) < 8 * 2**20:
                break
            time.sleep(0.1)
        print(f"after unwrap: {more[0]} bytes more allocated, {more[1]} more reserved")
        assert max(more) < 8 * 2**20


# ---- any thread may call


def test_twenty_fresh_threads_get_the_same_tokens_and_record_nothing(small: PreTrainedModel, seed: int) -> None:
    """All at once, every other one on a stream of its own, every fourth with n-grams, which take another loop."""
    batches = [prompts_on_device(lengths, seed) for lengths in ([20], [3, 40, 9], [1, 2, 3, 4, 5, 6], [16, 17, 31])]
    together, outcomes = threading.Barrier(20), [None] * 20

    def tokens(kind: int) -> list[list[int]]:
        if kind < 3:
            return greedy(small, batches[kind], 50).tolist()
        options = {"no_repeat_ngram_size": 60, "output_scores": True, "return_dict_in_generate": True}
        return greedy(small, batches[kind], 50, **options).sequences.tolist()

    expected = [tokens(kind) for kind in range(4)]
    before = small.compiled.stats()
    torch.cuda.synchronize()

    def call(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()) if number % 2 else nullcontext():
                together.wait()
                outcomes[number] = tokens(number % 4)
        except BaseException as error:
            outcomes[number] = error

    threads = [threading.Thread(target=call, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    for number, outcome in enumerate(outcomes):
        assert outcome == expected[number % 4], f"thread {number}: {outcome!r}"
    after = small.compiled.stats()
    assert (after.cuda_graphs, after.graphs, after.recompiles) == (before.cuda_graphs, before.graphs, 0)
    assert after.buckets == before.buckets
    gc.collect()
    assert_account_is_empty(small)


class Nested(BaseStreamer):
    """Calls the model again at every seventh token."""

    def __init__(self, call: Callable[[], Tensor]) -> None:
        self.call, self.seen, self.results = call, 0, []

    def put(self, value: Tensor) -> None:
        self.seen += 1
        if self.seen % 7 == 0:
            self.results.append(self.call())

    def end(self) -> None:
        self.seen = -1


@pytest.mark.parametrize("inner", [[9], [2, 30, 8]], ids=["another bucket", "the same bucket"])
def test_a_streamer_may_call_generate(inner: list[int], small: PreTrainedModel, seed: int) -> None:
    outer_inputs, inner_inputs = prompts_on_device([5, 12, 20], seed), prompts_on_device(inner, seed + 1)
    outer, nested = greedy(small, outer_inputs, 40), greedy(small, inner_inputs, 25)
    before = small.compiled.stats().cuda_graphs
    streamer = Nested(lambda: greedy(small, inner_inputs, 25))
    torch.testing.assert_close(greedy(small, outer_inputs, 40, streamer=streamer), outer)
    assert streamer.seen == -1
    assert len(streamer.results) == 5
    for result in streamer.results:
        torch.testing.assert_close(result, nested)
    assert small.compiled.stats().cuda_graphs == before
    assert_account_is_empty(small)


# ---- what a CUDA graph holds of the model


CHANGES = [new_parameter, moved_data, swapped_module, in_place, other_attribute]


@pytest.mark.parametrize("during", [False, True], ids=["between calls", "during a call"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_replay_never_reads_what_the_model_no_longer_has(
    change: Callable[[PreTrainedModel], None], during: bool, seed: int
) -> None:
    """Logits of prefill and decode are as exact as HuggingFace's of a model that was made after the change.

    Tokens would be compared with those of another wrapped model, which Inductor may have compiled with other tilings
    (it chooses them by timing them): sums in another order, and near ties of bfloat16 that fall the other way.
    """
    model = compiled_llm.wrap(small_qwen3(seed, tie_word_embeddings=False), **OPTIONS)
    lengths = [5, 18, 40]
    inputs = prompts_on_device(lengths, seed)
    before = greedy(model, inputs, 12)
    if during:
        greedy(model, prompts_on_device([7], seed), 30, streamer=Changing(lambda: change(model)))
    else:
        change(model)
    changed = small_qwen3(seed, tie_word_embeddings=False)
    change(changed)
    assert_parity(parity(Twins(changed, in_float32(changed), model), lengths, 60, seed))
    assert not torch.equal(greedy(model, inputs, 12), before)
    recorded_anew, _ = model.compiled.recaptures()
    assert (recorded_anew > 0) == (change is not in_place)
    compiled_llm.unwrap(model)


# ---- no wait on the device


@pytest.mark.parametrize(
    ("event", "launches"),
    [
        ("rows enter pages", 3),
        ("a row leaves", 2),
        ("a row comes in", 2),
        ("a sampled row comes in", 2),
        ("rows with all settings come in", 2),
    ],
    ids=lambda value: str(value),
)
def test_a_step_that_uploads_returns_while_the_device_sleeps(
    event: str, launches: int, small: PreTrainedModel, seed: int
) -> None:
    """One whole step, and more launched behind it unread; then the tokens are what they are on a device awake.

    The prompts are such that from the fourth decode step on, each step takes one row into a new page.
    """
    model_runner = small.compiled.model_runner()
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(SMALL["vocab_size"], (n,), generator=generator).numpy() for n in (13, 12, 11, 10, 6)]

    processed = Sampling(**{**EVERYTHING, "seen": prompts[4], "start": 0}, seed=5)
    coming = {
        "a row comes in": [None],
        "a sampled row comes in": [Sampling(top_k=20, seed=3)],
        "rows with all settings come in": [processed] * 4,
    }
    prepared = small.compiled.generate_loop()  # what prompts of so many rows need is captured
    for sampling in coming.get(event, [None]):
        prepared.admit(prompts[4], 40, sampling)
    prepared.step()
    prepared.close()

    def play(cycles: int) -> list[list[int]]:
        generate_loop = small.compiled.generate_loop()
        rows = [generate_loop.admit(prompt, 40) for prompt in prompts[:4]]
        arrived = [generate_loop.step() for _ in range(4)]
        torch.cuda.synchronize()
        if event == "a row leaves":
            generate_loop.release(rows[3])
        for sampling in coming.get(event, ()):
            generate_loop.admit(prompts[4], 40, sampling)
        uploads, asleep = model_runner.events.uploads.total(), torch.cuda.Event()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(cycles)
            asleep.record()
            start = time.perf_counter()
            arrived.append(generate_loop.step())
            for _ in range(launches - 1):
                model_runner.thread.call(generate_loop._launch, None)
            took, over = time.perf_counter() - start, asleep.query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if cycles == SLEEP:
            assert not over, f"{launches} launches took {took:.3f} s, when the device had woken up"
        # Rows of FlashInfer's are planned whenever one enters a page; ours know the pages ahead.
        planned = model_runner.decode_buffers.follows_pages
        expected = {"rows enter pages": 3 * planned, "a row leaves": 1 + planned}.get(event, 1)
        assert model_runner.events.uploads.total() - uploads == expected
        while last := generate_loop.drain():
            arrived.append(last)
        generate_loop.close()
        return [list(tokens.values()) for tokens in arrived]

    awake = play(1)
    play(SLEEP // 20)  # fills the allocators' caches: memory that CUDA pins for the first time may wait for the device
    assert play(SLEEP) == awake
