"""The kernels that sample tokens, on a GPU: every draw follows the distribution that HuggingFace's processors make.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compiled_llm.compilation.sampling.sampling import NOT_A_TOKEN, Sampling, sample
from compiled_llm_ops import build_sampling, sample_tokens, top_logprobs
from compiled_llm_ops.sampling import launches
from support.gpu import captured, needs_cuda, seeded
from support.ops.logprob_cases import check_packed, logits_of
from support.ops.sampling_cases import (
    BRANCHES,
    EDITED,
    arguments,
    assert_wins,
    counted_after,
    favouring,
    is_limited,
    reached_by,
    tables_of,
)

pytestmark = [pytest.mark.gpu, needs_cuda]

VOCABULARIES = [11, 49_152, 151_936, 262_145]  # all have the tokens that rows have sampled before
SETTINGS = BRANCHES + EDITED
SLACK = 3e-5
"""How far behind a winner may be, for logarithms and scores are rounded to float32."""


def some_seeds(rows: int) -> Tensor:
    return torch.randint(2**62, (rows,))


def normal_logits(rows: int, vocabulary: int, spread: float, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(rows, vocabulary, generator=generator, device="cuda") * spread).to(dtype)


@seeded
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("spread", [0.5, 4.0], ids="spread={}".format)
@pytest.mark.parametrize("vocabulary", VOCABULARIES, ids="V={}".format)
def test_each_row_is_sampled_by_its_own_settings(vocabulary: int, spread: float, dtype: torch.dtype, seed: int) -> None:
    settings = [SETTINGS[row % len(SETTINGS)] for row in range(64)]
    logits = normal_logits(64, vocabulary, spread, dtype, seed)
    seeds = some_seeds(64)
    given = arguments(logits, seeds, settings)
    counts = counted_after(given)
    sampled = sample_tokens(*given)
    assert_wins(sampled.cpu(), seeds, logits, settings, SLACK)
    assert torch.equal(given.counts, counts(sampled))
    for rows in (1, 7):
        alone = arguments(logits[:rows], seeds[:rows], settings[:rows])
        assert torch.equal(sample_tokens(*alone), sampled[:rows]), "a draw depends on its batch"


@seeded
@pytest.mark.parametrize(
    "setting", [own for own in SETTINGS if own.temperature], ids=lambda own: f"adjustments {own.adjustments}"
)
def test_sampled_sets_are_exact(setting: Sampling, seed: int) -> None:
    """Each token has a row whose seed lets it win, as far as any does: another one more or less would show."""
    logits, seeds = normal_logits(1, 901, 2.0, torch.float32, seed), favouring(901, is_limited(setting, 901))
    sampled = sample_tokens(*arguments(logits.expand(901, -1), seeds, [setting] * 901)).cpu()
    reached = reached_by(logits, [setting], seeds)
    assert (reached.gather(1, sampled[:, None])[:, 0] >= reached.amax(dim=-1) - SLACK).all()


@seeded
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_draws_are_those_of_the_cpu_but_for_near_ties(dtype: torch.dtype, seed: int) -> None:
    settings = [SETTINGS[row % len(SETTINGS)] for row in range(512)]
    logits, seeds = normal_logits(512, 49_152, 3.0, dtype, seed), some_seeds(512)
    ours, theirs = (sample_tokens(*arguments(own, seeds, settings)).cpu() for own in (logits, logits.cpu()))
    assert int((ours != theirs).sum()) <= 2


@seeded
def test_kernels_that_are_built_early_are_not_built_at_the_launch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    vocabulary = 5_000  # of no other test: some kernels of theirs may be built already
    built: list[str] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda src, **_: built.append(src.fn.__name__))
    logits = normal_logits(3, vocabulary, 1.0, torch.float16, seed)
    given = arguments(logits, some_seeds(3), [Sampling()] * 3)
    build_sampling(vocabulary, torch.float16, logits.device)
    launches._wait_for_builds()  # on a thread, which has the GIL when it comes by
    early = [*built]
    assert "_sample_rows" in early
    sample_tokens(*given)
    sample_tokens(*arguments(logits[:1], some_seeds(1), [Sampling()]))
    assert built == early


@seeded
def test_equal_logits_and_ties_are_all_kept(seed: int) -> None:
    settings = [Sampling(top_k=50), Sampling(top_p=0.5), Sampling(top_k=3, top_p=0.1, min_p=0.9), Sampling(min_p=1.0)]
    seeds = some_seeds(4)
    logits = torch.full((4, 151_936), -2.5, device="cuda", dtype=torch.bfloat16)
    for own in (logits, normal_logits(4, 151_936, 3.0, torch.bfloat16, seed).clamp(max=0)):
        assert_wins(sample_tokens(*arguments(own, seeds, settings)).cpu(), seeds, own, settings, SLACK)


@seeded
def test_rows_without_a_usable_logit_are_not_sampled(seed: int) -> None:
    for setting in BRANCHES:
        logits = normal_logits(4, 151_936, 1.0, torch.bfloat16, seed)
        logits[0, 151_935], logits[1, 70], logits[2] = float("nan"), float("inf"), float("-inf")
        sampled = sample_tokens(*arguments(logits, some_seeds(4), [setting] * 4)).tolist()
        greedy = setting.temperature == 0.0
        assert sampled[:3] == ([151_935, 70, 0] if greedy else [NOT_A_TOKEN] * 3)
        assert sampled[3] >= 0


@seeded
def test_sampled_rows_may_have_any_stride(seed: int) -> None:
    wide = normal_logits(len(BRANCHES), 2 * 50_001, 2.0, torch.bfloat16, seed)
    seeds = some_seeds(len(BRANCHES))
    for logits in (wide[:, :50_001], wide[:, 1:50_001]):
        assert_wins(sample_tokens(*arguments(logits, seeds, BRANCHES)).cpu(), seeds, logits, BRANCHES, SLACK)


@seeded
def test_replays_draw_anew_and_by_the_settings_of_the_moment(seed: int) -> None:
    settings = [Sampling(temperature=0.8, top_k=50, top_p=0.95)] * 8
    logits = normal_logits(8, 151_936, 2.0, torch.bfloat16, seed)
    given = arguments(logits, some_seeds(8), settings)
    graph, sampled = captured(lambda: sample_tokens(*given))
    drawn = []
    for turn in range(20):
        seeds = some_seeds(8)
        own = [SETTINGS[(5 * turn + row) % len(SETTINGS)] for row in range(8)] if turn % 2 else settings
        fresh = arguments(logits, seeds, own)
        for static, value in zip(given[1:], fresh[1:], strict=True):
            if isinstance(static, Tensor):
                static.copy_(value)
        graph.replay()
        assert_wins(sampled.cpu(), seeds, logits, own, SLACK)
        drawn.append(sampled.tolist())
    assert len({tuple(tokens) for tokens in drawn}) == len(drawn)


@seeded
def test_choosing_compiles_whole_and_draws_what_eager_draws(seed: int) -> None:
    compiled = torch.compile(sample, fullgraph=True, dynamic=False)
    logits = normal_logits(len(SETTINGS), 49_152, 2.0, torch.bfloat16, seed)
    slots, positions = (torch.arange(len(SETTINGS), device="cuda") + start for start in (0, 1000))
    ours, theirs = (tables_of(SETTINGS, 49_152, "cuda") for _ in range(2))
    for _ in range(3):
        assert torch.equal(compiled(logits, slots, positions, ours), sample(logits, slots, positions, theirs))
        positions += 1
    assert torch.equal(ours.counts, theirs.counts)


@pytest.mark.parametrize("kind", ["normal", "ties", "filtered", "strided"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("vocabulary", [5, 49_152, 151_936, 262_145])
def test_kernels(vocabulary: int, dtype: torch.dtype, kind: str) -> None:
    logits = logits_of(kind, 64, vocabulary, dtype, "cuda")
    tokens = torch.randint(-1, vocabulary, (64,), device="cuda")
    for most in (0, 1, 5, min(20, vocabulary)):
        check_packed(top_logprobs(logits, tokens, most), logits, tokens, most)
        check_packed(top_logprobs(logits[:1], tokens[:1], most), logits[:1], tokens[:1], most)
