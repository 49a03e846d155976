"""Sampling in the graph: the right sets, the right distribution, a new draw at each step, decided by the seed."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

import compiled_llm
from compiled_llm.compilation.sampling.bias import Bias, packed
from compiled_llm.compilation.sampling.draws import Draws
from compiled_llm.compilation.sampling.sampling import NOT_A_TOKEN, Sampling, sample
from compiled_llm.execution.state.arena import Arena
from compiled_llm.execution.state.slots import Slots
from compiled_llm.execution.state.staging import Staging
from compiled_llm.kvcache.pool import PagePool
from compiled_llm.kvcache.row import Row
from compiled_llm_ops import MAX_BIASES, sample_tokens
from compiled_llm_ops.contracts.sampling import OF_TILES, OF_TOKENS
from compiled_llm_ops.sampling.race import exponentials, philox
from support.ops.sampling_cases import (
    BRANCHES,
    EDITED,
    SINGLE_EDITS,
    arguments,
    assert_wins,
    counted_after,
    distribution,
    favouring,
    is_limited,
    reached_by,
    unusual_logits,
    warped,
)
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.core

VOCABULARY = 40
CPU = torch.device("cpu")


class FixedLogits:
    """A sampler over logits that never change, stepped as a decode loop steps it."""

    def __init__(self, logits: Tensor, settings: list[Sampling], mode: str = "compile") -> None:
        rows = len(settings)
        self.logits, self.rows = logits, [Row(PagePool(2, 4), 0) for _ in settings]
        staging = Staging(CPU)
        arena = Arena(Slots.columns(rows, 1), CPU, staging)
        self.sampler = Slots(arena, staging, logits.shape[1])
        self.sampler.admit(self.rows, settings)
        arena.flush()
        self.slots = torch.from_numpy(self.sampler.of(self.rows, rows))
        self.positions = torch.zeros(rows, dtype=torch.int64)
        self.sample = sample if mode == "eager" else torch.compile(sample, fullgraph=True)

    def steps(self, count: int) -> Tensor:
        """``[count, B]`` tokens."""
        draws = []
        for _ in range(count):
            self.positions.add_(1)
            with torch.no_grad():
                draws.append(self.sample(self.logits, self.slots, self.positions, self.sampler.tables))
        return torch.stack(draws)


def assert_drawn_from(draws: Tensor, probabilities: Tensor) -> None:
    """Pearson's chi-square at p = 1e-5, bins of fewer than five expected draws taken together."""
    counts = torch.bincount(draws, minlength=len(probabilities)).double()
    expected = probabilities.double() * len(draws)
    assert counts[expected == 0].sum() == 0, "a filtered token was drawn"
    large = expected >= 5
    observed = torch.cat([counts[large], counts[~large].sum()[None]])
    wanted = torch.cat([expected[large], expected[~large].sum()[None]])
    used = wanted > 0
    statistic = float(((observed - wanted)[used] ** 2 / wanted[used]).sum())
    freedom = max(1, int(used.sum()) - 1)
    # Wilson and Hilferty's approximation of the quantile.
    limit = freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f} over {limit:.1f} at {freedom} degrees of freedom"


def some_seeds(*shape: int) -> Tensor:
    return torch.randint(2**62, shape)


SETTINGS = [
    Sampling(seed=11),
    Sampling(temperature=0.5, seed=12),
    Sampling(temperature=1.7, top_k=7, seed=13),
    Sampling(top_p=0.8, seed=14),
    Sampling(min_p=0.1, seed=15),
    Sampling(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02, seed=16),
]


@pytest.mark.whole
@pytest.mark.parametrize("mode", ["eager", pytest.param("compile", marks=pytest.mark.whole)])
def test_a_thousand_replays_follow_each_rows_own_distribution(mode, seed):
    logits = torch.randn(len(SETTINGS), VOCABULARY) * 2
    draws = FixedLogits(logits, SETTINGS, mode).steps(1000)
    for row, setting in enumerate(SETTINGS):
        assert_drawn_from(draws[:, row], warped(logits[row], setting).softmax(dim=-1))


def test_rows_with_equal_settings_and_other_seeds_draw_independently(seed):
    logits = torch.zeros(2, VOCABULARY)
    first, second = FixedLogits(logits, [Sampling(seed=1), Sampling(seed=2)], "eager").steps(1000).T
    assert_drawn_from(first, torch.full((VOCABULARY,), 1 / VOCABULARY))
    assert abs(float((first == second).double().mean()) - 1 / VOCABULARY) < 0.02
    assert abs(float((first[1:] == first[:-1]).double().mean()) - 1 / VOCABULARY) < 0.02


def test_a_rows_draws_do_not_depend_on_its_batch(seed):
    logits = torch.randn(1, VOCABULARY).expand(4, VOCABULARY).contiguous()
    alone = FixedLogits(logits[:1], [Sampling(seed=5)], "eager").steps(50)[:, 0]
    among = FixedLogits(logits, [Sampling(seed=seed_) for seed_ in (8, 9, 5, 7)], "eager").steps(50)[:, 2]
    assert torch.equal(alone, among)


@pytest.mark.parametrize("setting", BRANCHES + EDITED, ids=range(len(BRANCHES + EDITED)))
def test_each_token_is_drawn_if_huggingfaces_filters_keep_it_and_no_other_is(setting, seed, whole):
    """Each token has a row whose seed lets it win, as far as any does: all of them, or the likely and some others."""
    logits = torch.randn(901) * 2
    order = distribution(logits, setting).argsort(descending=True)
    tokens = order if whole else torch.cat([order[:80], order[80:][torch.randperm(821)[:40]]])
    seeds = favouring(901, is_limited(setting, 901))[tokens]
    chosen = sample_tokens(*arguments(logits.expand(len(tokens), -1), seeds, [setting] * len(tokens)))
    reached = reached_by(logits[None], [setting], seeds)
    assert (reached.gather(1, chosen[:, None])[:, 0] >= reached.amax(dim=-1) - 1e-6).all()
    if setting.temperature:
        likely = distribution(logits, setting)[tokens] > 1e-3
        assert (chosen == tokens)[likely].double().mean() > 0.8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocabulary", [5, 1023, 5001])
@pytest.mark.parametrize("spread", [0.3, 4.0])
def test_rows_of_all_settings_follow_their_own_distributions(vocabulary, spread, dtype, seed):
    settings = BRANCHES + EDITED
    logits = (torch.randn(len(settings), vocabulary) * spread).to(dtype)
    seeds = some_seeds(len(settings))
    given = arguments(logits, seeds, settings)
    counts = counted_after(given)
    chosen = sample_tokens(*given)
    assert_wins(chosen, seeds, logits, settings, 1e-6)
    assert torch.equal(given.counts, counts(chosen))


def test_every_pair_of_edits_equals_huggingfaces_processors_in_one_batch(seed):
    pairs = [
        Sampling(**{**SINGLE_EDITS[first], **SINGLE_EDITS[second], **both_biases(first, second)}, **filters)
        for first, second in itertools.combinations(SINGLE_EDITS, 2)
        for filters in ({"temperature": 0.0}, {"temperature": 1.5}, {"top_k": 9, "top_p": 0.9})
    ]
    logits, seeds = torch.randn(len(pairs), 301) * 2, some_seeds(len(pairs))
    assert_wins(sample_tokens(*arguments(logits, seeds, pairs)), seeds, logits, pairs, 1e-6)


def test_as_many_biases_as_there_is_room_for(seed):
    biases = packed(Bias(token * 7, token % 9 - 4.0, after=(5,) * (token % 8)) for token in range(MAX_BIASES))
    setting = Sampling(biases=biases, start=995, output_ids=np.full(5, 5), tail=np.full(9, 5))
    seeds, logits, settings = some_seeds(64), torch.randn(64, 4000) * 2, [setting] * 64
    assert_wins(sample_tokens(*arguments(logits, seeds, settings)), seeds, logits, settings, 1e-6)


def both_biases(*names):
    biases = [SINGLE_EDITS[name]["biases"] for name in names if "biases" in SINGLE_EDITS[name]]
    if len(biases) < 2:
        return {}
    longest = max(map(len, biases))
    padded = [np.pad(own, ((0, longest - len(own)), (0, 0)), constant_values=-1) for own in biases]
    both = np.concatenate(padded, axis=1)
    return {"biases": both[:, both[0].argsort(kind="stable")]}


def test_tokens_as_likely_as_the_last_are_kept_too(seed):
    logits = torch.randn(6, 3000).clamp(max=0)  # half of all are the largest
    logits[:, 70:75] = 1.0
    settings = [Sampling(top_k=k, top_p=p) for k in (0, 5, 6) for p in (1.0, 0.9)]
    seeds = some_seeds(6)
    assert_wins(sample_tokens(*arguments(logits, seeds, settings)), seeds, logits, settings, 1e-6)


def test_rows_without_a_usable_logit_are_told_apart(seed):
    for settings in ({}, {"top_k": 5, "top_p": 0.5}, {"top_p": 0.5}, {"min_p": 0.1, "presence_penalty": 1.0}):
        logits = torch.randn(5, VOCABULARY)
        logits[1, 3], logits[2], logits[4, 9] = math.nan, -math.inf, math.inf
        stepped = FixedLogits(logits, [Sampling(seed=row, **settings) for row in range(5)], "eager")
        drawn = stepped.steps(1)[0].tolist()
        assert drawn[1] == drawn[2] == drawn[4] == NOT_A_TOKEN
        assert min(drawn[0], drawn[3]) >= 0
        assert stepped.sampler.tables.counts.sum() == 2 * 2 * bool(settings.get("presence_penalty"))


def test_processed_scores_are_drawn_from_as_they_are(seed):
    scores = torch.randn(1, VOCABULARY).log_softmax(dim=-1)
    scores[0, ::3] = -math.inf
    rows = scores.expand(2000, -1)
    draws = Draws(torch.arange(2000), torch.full((2000,), 7))
    assert_drawn_from(draws(rows), scores[0].exp() / scores[0].exp().sum())
    assert Draws(None, torch.tensor([7]))(scores).item() == scores.argmax()


def test_tokens_drawn_outside_the_graph_are_those_drawn_inside(seed):
    logits = torch.randn(3, VOCABULARY)
    stepped = FixedLogits(logits, [Sampling(seed=row) for row in range(3)], "eager")
    draws = Draws(torch.arange(3), stepped.positions + 1)
    assert torch.equal(torch.stack([draws(logits) for _ in range(20)]), stepped.steps(20))


PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)


def test_philox_gives_the_published_numbers():
    known = {
        (0,) * 6: (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        (0xFFFFFFFF,) * 6: (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        PI: (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    }
    for given, words in known.items():
        counter, key = np.array(given[:4], dtype=np.uint64), np.array(given[4:], dtype=np.uint64)
        assert tuple(philox(counter, key).tolist()) == words


@pytest.mark.parametrize("kind", [OF_TILES, OF_TOKENS], ids=["tiles", "tokens"])
def test_random_numbers_are_exponential_and_others_for_each_seed_position_and_number(kind):
    """Also where they are small, since small ones win."""
    tokens, seeds = torch.arange(300)[None], torch.tensor([3, 2**61, 2**61 + 1, 2**61 + 2**40])
    parts = []
    for position in (1, 2, 2**33, 2**40 + 1):
        parts += [exponentials(seeds, seeds * 0 + position + 5 * step, tokens, kind) for step in range(60)]
    numbers = torch.stack(parts)
    assert numbers.min() > 0
    assert len(numbers.unique()) == numbers.numel()
    shares = -torch.expm1(-numbers)
    assert_drawn_from((shares * 64).long().flatten(), torch.full((64,), 1 / 64))
    assert_drawn_from((shares * 2**36).long().flatten() % 64, torch.full((64,), 1 / 64))
    small = shares[shares < 2**-8] * 2**8
    assert_drawn_from((small * 16).long(), torch.full((16,), 1 / 16))
    assert_drawn_from(shares.argmin(dim=-1).flatten(), torch.full((300,), 1 / 300))
    assert shares[:, 0].T.corrcoef().triu(1).abs().max() < 5 / math.sqrt(240)
    assert shares[:, :, 0].T.corrcoef().triu(1).abs().max() < 5 / math.sqrt(240)


@pytest.mark.whole
@pytest.mark.parametrize("setting", [Sampling(), Sampling(temperature=0.7, top_k=900), Sampling(top_p=0.9)], ids=str)
def test_draws_of_a_large_vocabulary_follow_the_distribution(setting, seed, whole):
    """Most tokens are rare, and most tiles."""
    logits, draws = torch.randn(1, 5001) * 2, []
    for _ in range(20 if whole else 8):
        seeds = some_seeds(400)
        draws.append(sample_tokens(*arguments(logits.expand(400, -1), seeds, [setting] * 400)))
    assert_drawn_from(torch.cat(draws), distribution(logits[0], setting))


@pytest.mark.drawn(most=2)
@pytest.mark.parametrize("setting", [Sampling(), Sampling(top_k=50, top_p=0.95), Sampling(top_p=0.95)], ids=str)
@pytest.mark.parametrize(("thousands", "noise"), [(1, 1e-4), pytest.param(60, 1e-5, marks=pytest.mark.whole)])
def test_logits_that_are_rounded_otherwise_change_near_ties_alone(thousands, noise, setting, seed):
    """As in a batch of another size."""
    changed = 0
    for _ in range(thousands):
        logits, seeds, settings = torch.randn(1000, 3001) * 2, some_seeds(1000), [setting] * 1000
        rounded = logits + torch.randn_like(logits) * noise
        first, second = (sample_tokens(*arguments(own, seeds, settings)) for own in (logits, rounded))
        rows = (first != second).nonzero()[:, 0]
        changed += len(rows)
        if len(rows):
            reached = reached_by(logits[rows], settings, seeds[rows])
            ends = reached.gather(1, torch.stack([first[rows], second[rows]], dim=1))
            assert (ends[:, 0] - ends[:, 1]).max() < 20 * noise
    assert changed <= 3


# ---- through generate


@pytest.fixture(scope="module")
def wrapped():
    return compiled_llm.wrap(tiny_qwen3(eos_token_id=None), mode="eager", page_size=4)


def generate_sampled(model, inputs, new_tokens=20, **settings):
    return model.generate(**inputs, max_new_tokens=new_tokens, do_sample=True, **settings)


def test_the_seed_decides_the_tokens(wrapped, seed):
    inputs = mixed_prompts([3, 7, 5], 128, seed)
    outputs = []
    for chosen in (1, 1, 2):
        torch.manual_seed(chosen)
        outputs.append(generate_sampled(wrapped, inputs))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert not torch.equal(generate_sampled(wrapped, inputs), generate_sampled(wrapped, inputs)), (
        "without a new seed, draws go on"
    )
    assert_account_is_empty(wrapped)


@pytest.mark.parametrize("row", range(7))
def test_greedy_takes_what_huggingface_takes_of_unusual_scores(wrapped, row, seed):
    scores = unusual_logits(128)[row].expand(2, -1)
    options = {
        "logits_processor": LogitsProcessorList([lambda input_ids, _: scores]),
        **mixed_prompts([4, 9], 128, seed),
    }
    expected = tiny_qwen3(eos_token_id=None).generate(**options, max_new_tokens=3, do_sample=False)
    torch.testing.assert_close(wrapped.generate(**options, max_new_tokens=3, do_sample=False), expected)


@pytest.mark.parametrize("token", [3, 90])
@pytest.mark.parametrize("value", [math.inf, math.nan, -math.inf])
def test_greedy_takes_what_huggingface_takes_of_unusual_logits(value, token, seed):
    reference, model = (tiny_qwen3(eos_token_id=None, num_hidden_layers=1) for _ in range(2))
    for changed in (reference, model):
        bias = torch.full((128,), value if value == -math.inf else 0.0)
        bias[token] = value
        changed.lm_head.bias = torch.nn.Parameter(bias)
    compiled_llm.wrap(model, mode="eager", kv_memory="200 tokens", progress=False)
    inputs = mixed_prompts([4, 9], 128, seed)
    torch.testing.assert_close(greedy(model, inputs, 3), greedy(reference, inputs, 3))


@pytest.mark.parametrize("top_k", [2**31 - 1, 2**31, 2**70])
def test_top_k_above_the_vocabulary_keeps_all(wrapped, top_k, seed):
    inputs = mixed_prompts([4, 9], 128, seed)
    texts = []
    for most in (top_k, 0):
        torch.manual_seed(seed)
        texts.append(generate_sampled(wrapped, inputs, top_k=most))
    torch.testing.assert_close(*texts)


def test_a_row_that_cannot_be_sampled_raises_and_the_next_call_works(wrapped, seed):
    inputs = mixed_prompts([4, 9], 128, seed)

    def mask_row_one(input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.where(torch.tensor([[False], [True]]), -math.inf, scores)

    processors = LogitsProcessorList([mask_row_one])
    with pytest.raises(RuntimeError, match="row 1: no token can be drawn after 0 new ones"):
        wrapped.generate(**inputs, max_new_tokens=4, do_sample=True, logits_processor=processors)
    assert_account_is_empty(wrapped)
    assert generate_sampled(wrapped, inputs).shape == (2, 29)


@pytest.mark.usefixtures("without_inductor")
def test_three_graphs_serve_all_settings(seed):
    plain = tiny_qwen3(seed=1, eos_token_id=None, num_hidden_layers=1)
    model = compiled_llm.wrap(plain, page_size=4, max_batch_size=8, progress=False)
    settings = [
        {},
        {"temperature": 0.3},
        {"top_k": 5, "top_p": 0.5},
        {"min_p": 0.2},
        {"repetition_penalty": 1.5, "temperature": 2.0},
        {"suppress_tokens": [3, 4], "sequence_bias": {(9,): 2.0}, "min_new_tokens": 4, "eos_token_id": 7},
    ]
    for number, options in enumerate(settings):
        for lengths in ([3], [5, 2], [1, 7, 3]):
            generate_sampled(model, mixed_prompts(lengths, 128, seed + number), 6, **options)
        greedy(model, mixed_prompts([4, 4], 128, seed), 6)
    assert set(model.compiled.graphs.values()) == {1}
    assert len(model.compiled.graphs) == 3
    stats = model.compiled.stats()
    assert (stats.graphs, stats.graph_breaks, stats.recompiles, stats.cudagraph_skips) == (3, 0, 0, 0)
