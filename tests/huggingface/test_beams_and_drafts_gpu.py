"""Every mode of ``generate`` and ``forward`` once on a GPU, in bfloat16: as exact as HuggingFace's, and only replayed.

Tokens are not compared with HuggingFace's in bfloat16, where near ties fall either way. What is compared is how far
logits are from float32, and whether a sampled token is one that float32 would choose, but for noise.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

import compiled_llm
from compiled_llm.huggingface import processed_loop
from support.execution.twins import (
    BEYOND_NOISE,
    DEVICE,
    Twins,
    hf_logits,
    prompts_on_device,
    rms,
    small_qwen3,
    twins_of,
)
from support.parity import assert_account_is_empty, greedy

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    made = twins_of(small_qwen3(request.config.getoption("seed")))
    made.wrapped.compiled.warmup([1, 4, 8])
    with torch.no_grad():  # and the prefill that reads embeddings
        made.wrapped(inputs_embeds=made.plain.get_input_embeddings()(torch.tensor([[3, 4]], device=DEVICE)))
    yield made
    compiled_llm.unwrap(made.wrapped)
    gc.collect()


@pytest.fixture(autouse=True)
def ready(twins: Twins) -> Iterator[None]:
    """Nothing is compiled, captured or skipped in a mode, and no page stays in use."""
    before = twins.wrapped.compiled.stats()
    with torch.compiler.set_stance("fail_on_recompile"):
        yield
    gc.collect()
    after = twins.wrapped.compiled.stats()
    assert (after.graphs, after.recompiles, after.cudagraph_skips) == (before.graphs, 0, 0)
    assert_account_is_empty(twins.wrapped)


def assert_as_exact(ours: Tensor, plain: Tensor, exact: Tensor) -> None:
    """`[T, V]` each; HuggingFace's own error is the measure."""
    error, measure = (float(rms(logits.float() - exact).square().mean().sqrt()) for logits in (ours, plain))
    print(f"RMS error {error:.3e}, HuggingFace's {measure:.3e}")
    assert error <= 1.1 * measure


def assert_chosen_as_float32_would(twins: Twins, ids: Tensor, new: int) -> None:
    """Each of the last tokens of `ids` `[T]` is the most likely one in float32, or as good as that within noise."""
    exact, plain = (hf_logits(model, ids[:-1], new) for model in (twins.exact, twins.plain))
    noise = rms(plain.float() - exact).square().mean().sqrt()
    behind = exact.max(dim=-1).values - exact.gather(1, ids[-new:, None])[:, 0]
    assert (behind <= BEYOND_NOISE * noise).all(), f"{behind.max():.3f} behind, noise {noise:.3f}"


# ---- caches


def reorder(cache: Any) -> None:
    cache.reorder_cache(torch.tensor([2, 0, 0, 2], device=DEVICE))


def crop(cache: Any) -> None:
    cache.crop(-3)


def select(cache: Any) -> None:
    cache.batch_select_indices(torch.tensor([3, 1, 1, 0], device=DEVICE))


def repeat(cache: Any) -> None:
    cache.batch_select_indices(torch.tensor([3, 1], device=DEVICE))
    cache.batch_repeat_interleave(2)


@pytest.mark.parametrize("change", [reorder, crop, select, repeat], ids=lambda change: change.__name__)
def test_a_changed_cache_goes_on_as_exactly_as_huggingfaces(
    change: Callable[[Any], None], twins: Twins, seed: int
) -> None:
    """Steps of one token go through a captured graph, steps of several through prefill; pages are copied in between."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    steps = [
        torch.randint(3, 2048, (4, count), generator=generator, device=DEVICE) for count in (37, 1, 1, 5, 1, 30, 1)
    ]
    results = []
    for model in (twins.wrapped, twins.plain, twins.exact):
        cache = model.compiled.new_cache() if model is twins.wrapped else DynamicCache(config=model.config)
        logits = []
        with torch.no_grad():
            for step in steps:
                logits.append(model(step, past_key_values=cache).logits.flatten(0, 1))
                change(cache)
                fork = copy.deepcopy(cache)
                model(step[:, :1], past_key_values=fork)  # another owner writes elsewhere
        results.append(torch.cat(logits))
        if model is twins.wrapped:
            cache.close()
            fork.close()
    assert_as_exact(*results)


def test_a_chat_of_ten_turns_chooses_as_float32_would(twins: Twins, seed: int) -> None:
    inputs = prompts_on_device([20, 7, 33, 16], seed)
    ids, mask, cache = inputs["input_ids"], inputs["attention_mask"], None
    before = twins.wrapped.compiled.stats()
    for _ in range(10):
        out = greedy(
            twins.wrapped,
            {"input_ids": ids, "attention_mask": mask},
            13,
            past_key_values=cache,
            return_dict_in_generate=True,
        )
        cache, width = out.past_key_values, ids.shape[1]
        for row in range(4):
            seen = torch.cat([ids[row][mask[row] != 0], out.sequences[row, width:]])
            assert_chosen_as_float32_would(twins, seen, 13)
        question = torch.full((4, 5), 9, device=DEVICE)
        hidden = torch.ones(4, 18, dtype=mask.dtype, device=DEVICE)
        hidden[1, -3] = hidden[2, -5] = 0
        ids, mask = torch.cat([out.sequences, question], dim=1), torch.cat([mask, hidden], dim=1)
    after = twins.wrapped.compiled.stats()
    assert after.generate_calls["fast loop"] == before.generate_calls.get("fast loop", 0) + 10
    # Whether blocks share a row's keys, as they do towards the end, or not: warmup has captured both.
    assert after.prefill_cuda_graphs == before.prefill_cuda_graphs


# ---- generate


def test_draws_follow_float32(twins: Twins, seed: int) -> None:
    """The first token, chosen at the end of a prefill, and one behind it, chosen at the end of a captured step."""
    settings = {"do_sample": True, "temperature": 1.5, "top_k": 20, "max_new_tokens": 2, "num_return_sequences": 8}
    inputs, calls = prompts_on_device([21], seed), 100
    drawn = torch.cat([twins.wrapped.generate(**inputs, **settings) for _ in range(calls)])[:, -2:]
    first = int(drawn[:, 0].mode().values)
    ids = inputs["input_ids"][0]
    for tokens, seen in (
        (drawn[:, 0], ids),
        (drawn[drawn[:, 0] == first, 1], torch.cat([ids, ids.new_tensor([first])])),
    ):
        # Which tokens come last among the 20 is for noise to say: the first five are counted.
        best = hf_logits(twins.exact, seen, 1)[0].topk(20)
        probabilities = (best.values / 1.5).softmax(0)[:5]
        expected = torch.cat([probabilities, 1 - probabilities.sum(0, keepdim=True)]) * len(tokens)
        counts = (tokens[:, None] == best.indices[:5]).sum(0)
        counts = torch.cat([counts, len(tokens) - counts.sum(0, keepdim=True)])
        print(counts.tolist(), expected.tolist())
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert chi_square < 30, chi_square  # five degrees of freedom: once in 65,000


class Halved(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores / 2


PROCESSED: dict[str, dict[str, Any]] = {
    "a user's own": {"logits_processor": LogitsProcessorList([Halved()])},
    "drawn": {"logits_processor": LogitsProcessorList([Halved()]), "do_sample": True},
    "guidance": {"guidance_scale": 1.5},
    "n-grams": {"no_repeat_ngram_size": 2},
    "green tokens": {"watermarking_config": WatermarkingConfig()},
    "SynthID": {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[5, 6]), "do_sample": True},
}


@pytest.mark.parametrize("options", PROCESSED.values(), ids=PROCESSED)
def test_steps_between_which_processors_run_wait_for_nothing(
    options: dict[str, Any], twins: Twins, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever waits for the device raises; only the tokens of a step are waited for, while the next forward runs."""
    checked: list[str] = []

    def strict(name: str) -> None:
        original = getattr(processed_loop._Steps, name)

        def call(self: Any, *args: Any) -> Any:
            if self._sequences.generated > 2:  # the first steps upload who sits where
                checked.append(name)
                torch.cuda.set_sync_debug_mode("error")
            try:
                return original(self, *args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(processed_loop._Steps, name, call)

    for name in ("sample", "launch", "pad"):
        strict(name)
    inputs = prompts_on_device([9, 30], seed)
    out = twins.wrapped.generate(
        **inputs, max_new_tokens=60, eos_token_id=list(range(0, 2048, 40)), pad_token_id=1, **options
    )
    assert out.shape[1] > 33
    assert {"sample", "launch", "pad"} == set(checked)
