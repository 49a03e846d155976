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


def unpadded(ids: Tensor, mask: Tensor, row: int) -> Tensor:
    width = mask.shape[1]
    return torch.cat([ids[row, :width][mask[row] != 0], ids[row, width:]])


# ---- forward


@pytest.mark.parametrize("padding", ["left", "right", "holes", "none"])
def test_scores_are_as_exact_as_huggingfaces(padding: str, twins: Twins, seed: int) -> None:
    inputs = prompts_on_device([70, 33, 100] if padding != "none" else [64] * 3, seed)
    if padding == "right":
        inputs = {name: value.flip(1) for name, value in inputs.items()}
    if padding == "holes":
        inputs["attention_mask"][2, 20:33] = 0
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    seen = inputs["attention_mask"] != 0
    with torch.no_grad():
        ours, plain, exact = (
            model(**inputs, position_ids=positions, use_cache=False).logits[seen]
            for model in (twins.wrapped, twins.plain, twins.exact)
        )
    assert_as_exact(ours, plain, exact)


def test_the_loss_is_as_exact_as_huggingfaces(twins: Twins, seed: int) -> None:
    ids = prompts_on_device([90] * 4, seed)["input_ids"]
    with torch.no_grad():
        ours, plain, exact = (
            float(model(ids, labels=ids, use_cache=False).loss) for model in (twins.wrapped, twins.plain, twins.exact)
        )
    assert abs(ours - exact) <= 1.1 * abs(plain - exact) + 5e-3


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


@pytest.mark.parametrize("lengths", [[50], [5, 33]])
def test_beam_scores_are_those_of_float32(lengths: list[int], twins: Twins, seed: int) -> None:
    inputs, new = prompts_on_device(lengths, seed), 40
    out = greedy(
        twins.wrapped,
        inputs,
        new,
        num_beams=4,
        num_return_sequences=4,
        length_penalty=0.0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    for number, (sequence, score) in enumerate(zip(out.sequences, out.sequences_scores, strict=True)):
        row = unpadded(out.sequences, inputs["attention_mask"].repeat_interleave(4, 0), number)
        assert len(row) == lengths[number // 4] + new
        targets = row[-new:, None]
        exact, plain = (
            hf_logits(model, row[:-1], new).float().log_softmax(-1).gather(1, targets).sum()
            for model in (twins.exact, twins.plain)
        )
        assert abs(score - exact) <= 4 * abs(plain - exact) + 0.02 * new, sequence


def test_drafts_of_another_model_and_of_the_prompt_choose_as_float32_would(twins: Twins, seed: int) -> None:
    inputs, new = prompts_on_device([40], seed), 60
    inputs["input_ids"][:, 20:] = inputs["input_ids"][:, :20]
    for options in (
        {"assistant_model": small_qwen3(seed + 1, num_hidden_layers=1)},
        {"assistant_model": twins.plain},
        {"prompt_lookup_num_tokens": 5},
    ):
        out = greedy(twins.wrapped, inputs, new, **options)
        assert_chosen_as_float32_would(twins, out[0], new)


def test_sampled_beams_and_processors_run(twins: Twins, seed: int) -> None:
    inputs = prompts_on_device([9, 30], seed)
    for options in (
        {"num_beams": 4, "do_sample": True},
        {"num_beams": 2, "no_repeat_ngram_size": 2},
        {"guidance_scale": 1.3, "do_sample": False},
    ):
        out = twins.wrapped.generate(**inputs, max_new_tokens=20, **options)
        assert out.shape == (2, 50)


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


def test_the_seed_decides(twins: Twins, seed: int) -> None:
    inputs, texts = prompts_on_device([5, 33], seed), []
    for number in (1, 1, 2):
        torch.manual_seed(number)
        texts.append(twins.wrapped.generate(**inputs, do_sample=True, top_p=0.95, min_p=0.01, max_new_tokens=40))
    torch.testing.assert_close(texts[1], texts[0])
    assert not torch.equal(texts[2], texts[0])


def test_the_loop_with_processors_has_logits_as_exact_as_huggingfaces(twins: Twins, seed: int) -> None:
    inputs, new = prompts_on_device([50, 9, 17], seed), 60
    out = greedy(twins.wrapped, inputs, new, no_repeat_ngram_size=2, output_logits=True, return_dict_in_generate=True)
    for row, logits in enumerate(torch.stack(out.logits, dim=1)):
        ids = unpadded(out.sequences, inputs["attention_mask"], row)
        pairs = list(zip(ids.tolist(), ids[1:].tolist(), strict=False))
        assert len(set(pairs[-new:])) == new, "a pair of tokens repeats"
        assert_as_exact(logits, *(hf_logits(model, ids[:-1], new) for model in (twins.plain, twins.exact)))
    paths = twins.wrapped.compiled.stats().generate_calls
    assert paths["processed loop"] > 0


def test_guided_scores_are_as_exact_as_huggingfaces(twins: Twins, seed: int) -> None:
    """Of two rows a request: the text, and what follows its prompt's last token."""
    inputs, new, scale = prompts_on_device([50, 9, 17], seed), 40, 1.5
    wanted = {"output_scores": True, "return_dict_in_generate": True}
    out = greedy(twins.wrapped, inputs, new, guidance_scale=scale, **wanted)
    for row, scores in enumerate(torch.stack(out.scores, dim=1)):
        ids, guided = unpadded(out.sequences, inputs["attention_mask"], row)[:-1], []
        for model in (twins.plain, twins.exact):
            given, negative = (hf_logits(model, of, new).float().log_softmax(-1) for of in (ids, ids[-new:]))
            guided.append(negative + scale * (given - negative))
        assert_as_exact(scores, *guided)


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


def test_embeddings_choose_as_float32_would(twins: Twins, seed: int) -> None:
    inputs = prompts_on_device([9, 30], seed)
    embeddings = twins.plain.get_input_embeddings()(inputs["input_ids"]).detach()
    out = greedy(twins.wrapped, {"inputs_embeds": embeddings, "attention_mask": inputs["attention_mask"]}, 20)
    for row in range(2):
        prompt = inputs["input_ids"][row][inputs["attention_mask"][row] != 0]
        assert_chosen_as_float32_would(twins, torch.cat([prompt, out[row]]), 20)
