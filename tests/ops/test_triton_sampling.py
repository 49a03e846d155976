"""The kernels that sample tokens, under Triton's interpreter on the CPU; `test_sampling_gpu.py` runs them on a GPU."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm.compilation.sampling.masks import mask_of
from compiled_llm.compilation.sampling.sampling import NOT_A_TOKEN, Sampling
from compiled_llm_ops import (
    BIASED,
    COUNTED,
    FOLLOWING,
    MASKED,
    MAX_BIASES,
    MAX_FOLLOWED,
    build_sampling,
    sample_tokens,
)
from compiled_llm_ops.sampling.sampling import SampleTokens
from support.ops.compiling import compiled
from support.ops.interpreting import interpreted, needs_triton, not_interpreted
from support.ops.sampling_cases import (
    BRANCHES,
    EDITED,
    EVERYTHING,
    SINGLE_EDITS,
    arguments,
    assert_wins,
    distribution,
    favouring,
    is_limited,
    unusual_logits,
)

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]


class NoGpu:
    """What Triton asks of a driver before it launches."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.mark.slow
@pytest.mark.whole
@not_interpreted
def test_what_is_built_early_is_what_is_launched(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs
    from triton.runtime import driver

    from compiled_llm_ops.sampling import launches
    from compiled_llm_ops.sampling.kernels import sampling as kernels

    built: list[str] = []
    monkeypatch.setattr(driver, "_active", NoGpu())
    monkeypatch.setattr(knobs.compilation, "listener", lambda src, **_: built.append(src.fn.__name__))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    build_sampling(262_145, torch.float32, torch.device("cuda"))
    launches._wait_for_builds()
    assert built == ["_summarise_for_sampling", "_examine_rows", "_sample_rows"]
    build_sampling(262_145, torch.float32, torch.device("cuda"), before=True)
    launches._wait_for_builds(before=True)
    assert built[3:] == built[:3]
    for rows in (1, 3):
        given = arguments(torch.randn(rows, 262_145), some_seeds(rows), [Sampling()] * rows)
        for before in (None, *(torch.zeros(rows, width, dtype=torch.int64) for width in (1, 3, 7))):
            kernels.build(given._replace(before=before), NOT_A_TOKEN)
    assert len(built) == 6


@pytest.mark.whole
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(("dtype", "tiles"), [("bf16", 4096), ("fp16", 1), ("fp32", 8192)])
def test_kernels_compile_without_a_gpu(dtype: str, tiles: int) -> None:
    from compiled_llm_ops.sampling.kernels import sampling as kernels

    lists = ("found", "candidates", "sizes", "leaders", "part_leaders", "proposed")
    tables = ("top_k", "adjustments", "allowed", "biases", "recent")
    types = {
        "logits": f"*{dtype}",
        "counts": "*i16",
        **dict.fromkeys(lists + tables, "*i32"),
        **dict.fromkeys(("slots", "positions", "sampled", "seeds"), "*i64"),
        **dict.fromkeys(("stride", "vocabulary", "tiles", "spans", "not_a_token", "deferred", "width"), "i32"),
    }
    padded = {"padded_tiles": tiles}
    before: tuple[dict[str, Any], dict[str, str]]
    for before in (({"before": None}, {}), ({}, {"before": "*i64"}))[: 1 + (tiles == 4096)]:
        for kernel, constants in (
            (kernels._summarise_for_sampling, {}),
            (kernels._examine_rows, {**padded, "padded_spans": max(1, tiles // 32)}),
            (kernels._sample_rows, padded),
        ):
            own = {**dict.fromkeys(kernel.arg_names, "*fp32"), **types, **before[1]}
            compiled(kernel, {**constants, **before[0]}, own, warps=16)


def launch(*given: Any) -> Tensor:
    from compiled_llm_ops.sampling.kernels import sampling as triton_sampling

    return triton_sampling.sample_tokens(SampleTokens(*given), NOT_A_TOKEN)


def some_seeds(rows: int) -> Tensor:
    return torch.randint(2**62, (rows,))


SETTINGS = BRANCHES + EDITED
COUNTING = Sampling(presence_penalty=0.5)

SETS_OF = [
    own for own in SETTINGS if own.temperature and own.top_p != 0.999 and not (own.adjustments and own.top_k == 700)
]
SPREADS = [(0.3, torch.float32), (1.0, torch.float32), (5.0, torch.float32), (1.0, torch.bfloat16)]
IN_EACH_RUN = {(5, *SPREADS[3]), (777, *SPREADS[2])}
SIZES_AND_SPREADS = [
    pytest.param(*case, marks=() if case in IN_EACH_RUN else pytest.mark.whole)
    for case in ((vocabulary, *spread) for vocabulary in (5, 777, 4097, 9001) for spread in SPREADS)
]


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize(("vocabulary", "spread", "dtype"), SIZES_AND_SPREADS, ids=str)
def test_every_branch_follows_the_distribution(vocabulary: int, spread: float, dtype: torch.dtype, seed: int) -> None:
    logits = (torch.randn(len(SETTINGS), vocabulary) * spread).to(dtype)
    seeds = some_seeds(len(SETTINGS))
    given, same = (arguments(logits, seeds, SETTINGS) for _ in range(2))
    sampled = launch(*given)
    assert_wins(sampled, seeds, logits, SETTINGS, 1e-5)
    differ = int((sampled != sample_tokens(*same)).sum())
    assert differ <= 1, "other tokens than the CPU's, and not for rounding"
    if not differ:
        assert torch.equal(given.counts, same.counts)


@pytest.mark.drawn(most=12)
@interpreted
@pytest.mark.parametrize(
    "setting",
    [pytest.param(own, marks=[pytest.mark.whole] * (number % 2)) for number, own in enumerate(SETS_OF)],
    ids=lambda own: f"adjustments {own.adjustments}",
)
def test_sets_are_exact(setting: Sampling, seed: int) -> None:
    """The rarest token that is kept would win, and so would the likeliest that is not."""
    logits = torch.randn(1, 901) * 2
    setting = replace(setting, top_k=setting.top_k and min(setting.top_k, 300))
    chances = distribution(logits[0], setting)
    before = distribution(logits[0], replace(setting, top_k=0, top_p=1.0, min_p=0.0))
    rarest, barred = torch.where(chances > 0, before, math.inf).argmin(), torch.where(chances > 0, 0, before).argmax()
    seeds = favouring(901, is_limited(setting, 901))[torch.stack([rarest, barred])]
    logits, settings = logits.expand(2, -1), [setting] * 2
    assert_wins(launch(*arguments(logits, seeds, settings)), seeds, logits, settings, 1e-5)


@interpreted
@pytest.mark.parametrize("vocabulary", [64, 20_000])
def test_equal_logits_are_all_kept(vocabulary: int, seed: int) -> None:
    settings = [Sampling(top_k=3), Sampling(top_p=0.5), Sampling(top_k=3, top_p=0.1, min_p=0.9), Sampling(min_p=1.0)]
    logits, seeds = torch.full((4, vocabulary), -2.5), some_seeds(4)
    assert_wins(launch(*arguments(logits, seeds, settings)), seeds, logits, settings, 1e-5)


@pytest.mark.whole
@interpreted
def test_ties_with_the_kth_are_kept(seed: int) -> None:
    logits = torch.randn(8, 5000).clamp(max=0)  # half of all are the largest
    logits[:, 70:75] = 1.0
    settings = [Sampling(top_k=k, top_p=p) for k in (5, 6, 50, 400) for p in (1.0, 0.9)]
    seeds = some_seeds(8)
    assert_wins(launch(*arguments(logits, seeds, settings)), seeds, logits, settings, 1e-5)


@pytest.mark.whole
@interpreted
def test_the_tiles_that_a_mask_leaves_may_be_fewer_than_top_k_keeps_tokens(seed: int) -> None:
    mask = mask_of(4000, allowed=range(60, 160))
    settings = [Sampling(top_k=k, top_p=p, mask=mask) for k in (4, 30, 99, 300) for p in (1.0, 0.9) for _ in range(3)]
    logits, seeds = torch.randn(len(settings), 4000), some_seeds(len(settings))
    assert_wins(launch(*arguments(logits, seeds, settings)), seeds, logits, settings, 1e-5)


@pytest.mark.whole
@interpreted
def test_candidates_are_many_or_have_no_room_or_are_guessed_wrongly(seed: int) -> None:
    """Of 320 tiles, all are likely, or those beside each other, or the first tokens, of which the sample consists."""
    for likely in (slice(None), slice(2560), slice(0, None, 64)):
        settings = [Sampling(top_k=k, top_p=p) for k in (100, 300, 2500, 20_479) for p in (1.0, 0.7)]
        logits = torch.randn(len(settings), 20_480) * 0.3
        logits[:, likely] += 2.0
        seeds = some_seeds(len(settings))
        assert_wins(launch(*arguments(logits, seeds, settings)), seeds, logits, settings, 1e-5)


@interpreted
@pytest.mark.parametrize("setting", [BRANCHES[1], BRANCHES[4], BRANCHES[11], BRANCHES[15], COUNTING], ids=str)
def test_rows_without_a_usable_logit_are_told_apart(setting: Sampling, seed: int) -> None:
    logits = torch.randn(5, 3000)
    logits[0, 2999], logits[1, 70], logits[2] = math.nan, math.inf, -math.inf
    logits[3, :2990] = -math.inf
    given = arguments(logits, some_seeds(5), [setting] * 5)
    sampled = launch(*given)
    assert sampled[:3].tolist() == [NOT_A_TOKEN] * 3
    assert 2990 <= sampled[3] < 3000
    counted = [2, 2, 0, 0, 0, 0] if setting is COUNTING else [0] * 6
    assert given.counts.sum(dim=1).tolist() == counted, "entries are in reverse, the last is padding's"


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [1, 2, 64, 65, 4200])
def test_greedy_rows_take_what_argmax_takes(vocabulary: int, dtype: torch.dtype, seed: int) -> None:
    logits, settings = unusual_logits(vocabulary).to(dtype), [Sampling(temperature=0.0)] * 7
    given = arguments(logits, some_seeds(7), settings)
    assert launch(*given).tolist() == logits.argmax(dim=-1).tolist()


@pytest.mark.whole
@interpreted
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.whole), 1.0])
def test_unusual_logits_are_edited_as_on_the_cpu(temperature: float, seed: int) -> None:
    adjustments: list[dict[str, Any]] = [
        *({**edit, "cleaned": True} for edit in SINGLE_EDITS.values()),
        {"mask": mask_of(130, allowed=range(3, 60))},
        {"mask": mask_of(130, allowed=()), "cleaned": True},
        {**EVERYTHING, "mask": None},
    ]
    logits = unusual_logits(130).repeat(len(adjustments), 1)
    settings = [Sampling(**edit, temperature=temperature) for edit in adjustments for _ in range(7)]
    seeds = some_seeds(len(settings))
    given, same = (arguments(logits, seeds, settings) for _ in range(2))
    assert launch(*given).tolist() == sample_tokens(*same).tolist()
    assert torch.equal(given.counts, same.counts)


@interpreted
@pytest.mark.parametrize("before", [0, 1, 32764, 32765, 32766, 32767])
def test_counts_stay_in_their_range(before: int) -> None:
    for sample in (launch, sample_tokens):
        given = arguments(torch.zeros(1, 3), torch.tensor([0]), [replace(COUNTING, temperature=0.0)])
        given.counts[0] = before
        sample(*given)
        assert given.counts[0].tolist() == [before + 2 * (before < 32766), before, before]


@interpreted
@pytest.mark.parametrize("sample", [launch, sample_tokens])
def test_what_adjustments_do_not_ask_for_may_hold_anything(sample: Any, seed: int) -> None:
    settings = [Sampling(), COUNTING, *EDITED]
    logits, seeds = torch.randn(len(settings), 777), some_seeds(len(settings))
    expected = sample(*arguments(logits, seeds, settings))
    given = arguments(logits, seeds, settings)
    kinds = given.adjustments[:, None]
    asked = {"counts": kinds & COUNTED, "allowed": kinds & MASKED, "recent": kinds // FOLLOWING & MAX_FOLLOWED}
    unread = {name: (own == 0).expand_as(getattr(given, name)) for name, own in asked.items()}
    unread["biases"] = (torch.arange(MAX_BIASES) >= kinds // BIASED)[:, None].expand_as(given.biases)
    for name, places in unread.items():
        getattr(given, name)[places] = 5  # a token, a count, a mask that bars tokens, and a bias that always holds
        assert places[-1].all(), "the entry of padding rows"
    assert torch.equal(sample(*given), expected)
    assert all(bool((getattr(given, name)[places] == 5).all()) for name, places in unread.items())


@interpreted
@pytest.mark.parametrize("sample", [launch, sample_tokens])
def test_a_launch_serves_rows_of_one_kind_and_leaves_the_others_as_they_are(sample: Any, seed: int) -> None:
    kinds = [Sampling(temperature=0.0), COUNTING, SETTINGS[4], Sampling(**EVERYTHING)]
    settings = [replace(own, deferred=deferred) for own in kinds for deferred in (False, True)]
    logits, seeds = torch.randn(len(settings), 777), some_seeds(len(settings))
    whole = launch(*arguments(logits, seeds, [own for own in kinds for _ in range(2)]))
    for deferred in (False, True):
        given = arguments(logits, seeds, settings)
        before = given.counts.clone(), given.recent.clone()
        sampled = sample(*given._replace(deferred=deferred))
        here = torch.tensor([own.deferred == deferred for own in settings])
        assert torch.equal(sampled[here], whole[here])
        assert sampled[~here].tolist() == [NOT_A_TOKEN] * 4
        there = given.slots[~here]
        for table, then in zip((given.counts, given.recent), before, strict=True):
            assert torch.equal(table[there], then[there])
            assert not torch.equal(table, then)


@interpreted
@pytest.mark.parametrize("width", [3, 7])
def test_tokens_that_tables_lack_are_seen_as_on_the_cpu_and_nothing_is_counted(width: int, seed: int) -> None:
    settings = [own for own in SETTINGS if own.adjustments] + [Sampling(temperature=0.0), COUNTING]
    logits, seeds = torch.randn(len(settings), 777), some_seeds(len(settings))
    before = torch.randint(0, 12, (len(settings), width)) - (torch.rand(len(settings), width) < 0.2) * 12
    given, same = (arguments(logits, seeds, settings)._replace(before=before.clamp(min=-1)) for _ in range(2))
    tables = given.counts.clone(), given.recent.clone()
    given.counts[:, 3] += 32760
    same.counts[:, 3] += 32760
    assert launch(*given).tolist() == sample_tokens(*same).tolist()
    given.counts[:, 3] -= 32760
    assert torch.equal(given.counts, tables[0])
    assert torch.equal(given.recent, tables[1])


@interpreted
def test_penalties_reach_tokens_that_tables_lack_at_both_ends_of_a_block() -> None:
    """Of a tile, and of what one program reads; the other token of a pair, which is next to it, comes second."""
    likely = torch.tensor([0, 62, 63, 64, 65, 126, 2046, 2047, 2048, 2049, 2099, 2098])
    second, rows = torch.where(likely % 64 == 63, likely - 1, likely + 1).clamp(max=2099), torch.arange(12)
    second[-2] = 2097
    logits = torch.zeros(12, 2100)
    logits[rows, likely], logits[rows, second] = 3.0, 2.0
    for temperature in (0.0, 0.01):
        given = arguments(logits, some_seeds(12), [Sampling(temperature=temperature, presence_penalty=2.0)] * 12)
        before = torch.stack([torch.full((12,), -1), likely], 1)
        assert launch(*given._replace(before=before)).tolist() == second.tolist()


@interpreted
def test_random_numbers_are_those_of_the_cpu(seed: int, whole: bool) -> None:
    """Of rows whose logits are equal, tiles and tokens with the smallest win: large positions, seeds, vocabularies."""
    settings, seeds = [Sampling()] * 4, torch.tensor([0, 2**32 - 1, 2**32, 2**62 - 1])
    for position, vocabulary in ((0, 262_144 if whole else 40_000), (2**31 - 1, 5000), (2**40, 5000)):
        logits = torch.zeros(4, vocabulary)
        given, same = (arguments(logits, seeds, settings, position) for _ in range(2))
        assert launch(*given).tolist() == sample_tokens(*same).tolist()


@interpreted
def test_rows_of_logits_may_have_any_stride(seed: int) -> None:
    logits = torch.randn(3, 2 * 1500)[:, :1500]
    for given in (logits, torch.randn(1500, 3).T):
        seeds, settings = some_seeds(3), [Sampling()] * 3
        assert_wins(launch(*arguments(given, seeds, settings)), seeds, given, settings, 1e-5)
