"""What draws have to follow, by HuggingFace's processors, and settings that reach every branch of the kernels.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    InfNanRemoveLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from compiled_llm.compilation.sampling.bias import BARRED, FORCED, Bias, packed
from compiled_llm.compilation.sampling.masks import mask_of
from compiled_llm.compilation.sampling.sampling import Sampling, SamplingTables
from compiled_llm.execution.state.arena import Arena
from compiled_llm.execution.state.slot_settings import SlotSettings
from compiled_llm.execution.state.staging import Staging
from compiled_llm_ops import COUNTED
from compiled_llm_ops.contracts.sampling import OF_TILES, OF_TOKENS, PROPOSALS, TILE
from compiled_llm_ops.sampling.race import exponentials
from compiled_llm_ops.sampling.sampling import SampleTokens

BRANCHES = [
    Sampling(temperature=0.0),
    Sampling(),
    Sampling(temperature=0.8),
    Sampling(temperature=0.8, top_k=50),
    Sampling(temperature=0.8, top_k=50, top_p=0.95),
    Sampling(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2, seen=np.arange(0, 4000, 3)),
    Sampling(top_k=1),
    Sampling(top_k=128),
    Sampling(top_k=700),
    Sampling(top_k=700, top_p=0.6),
    Sampling(top_k=10**6),
    Sampling(top_p=0.95),
    Sampling(temperature=0.3, top_p=0.95),
    Sampling(top_p=1e-6),
    Sampling(top_p=0.999, min_p=1e-3),
    Sampling(min_p=0.05),
    Sampling(temperature=0.4, min_p=0.05),
    Sampling(min_p=1e-4),
    Sampling(min_p=1.0),
    Sampling(temperature=0.0, repetition_penalty=1.5, seen=np.arange(0, 4000, 2)),
    Sampling(temperature=0.9, top_k=40, min_p=0.02),
]
"""Greedy, unfiltered, few candidates, too many for that, and thresholds that need no search."""

CHOSEN = np.array([0, 3, 3, 2, 6, 9, 9, 9, 1, 2])
STEP = len(CHOSEN)
"""Which token of its answer each row chooses, of settings with biases."""


def _of_steps(*biases: Bias) -> dict[str, Any]:
    return {"biases": packed(biases), "start": 1000 - STEP}


def _counting(**penalties: float) -> dict[str, Any]:
    return {"seen": np.arange(0, 4000, 5), "output_ids": CHOSEN, **penalties}


SINGLE_EDITS: dict[str, dict[str, Any]] = {
    "repetition": _counting(repetition_penalty=1.3),
    "presence": _counting(presence_penalty=0.9),
    "frequency": _counting(frequency_penalty=-0.4),
    "biases": _of_steps(*(Bias(token, 4.0 - token % 7) for token in range(0, 3000, 101))),
    "barred": _of_steps(Bias(1, BARRED, 0, STEP + 1), Bias(3, BARRED, 0, STEP), Bias(4, BARRED, STEP, STEP + 1)),
    "forced": _of_steps(Bias(2, FORCED, STEP)),
    "not yet": _of_steps(Bias(2, FORCED, STEP + 1), Bias(0, BARRED, 3, STEP)),
    "following": {
        **_of_steps(
            *(Bias(token, 5.0, after=(2,)) for token in range(0, 40, 3)),
            *(Bias(token, -4.0, after=(1, 2)) for token in range(1, 40, 3)),
            *(Bias(token, 9.0, after=(2, 2)) for token in range(1, 40, 3)),
            Bias(4, BARRED, after=(3, 2, 6, 9, 9, 9, 1)),
            Bias(2, BARRED, after=(3, 3, 2, 6, 9, 9, 9, 1, 2)[-7:]),
            Bias(0, 3.0, 0, STEP, after=(2,)),
        ),
        "output_ids": CHOSEN,
    },
    "allowed": {"mask": mask_of(4000, allowed=range(0, 4000, 2))},
    "banned": {"mask": mask_of(2**18 + 64, banned=[0, 3, 7, *range(40, 900)])},
    "cleaned": {"cleaned": True},
}
"""What changes logits before the temperature, one by one."""

EVERYTHING: dict[str, Any] = {
    **_counting(repetition_penalty=0.8, presence_penalty=-0.5, frequency_penalty=0.3),
    **_of_steps(
        *(Bias(token, token % 5 - 2.5) for token in range(0, 2400, 49)),
        Bias(6, BARRED, 0, 2**20),
        Bias(7, 4.0, after=(1, 2)),
    ),
    "mask": mask_of(2**18 + 64, banned=range(9, 2000, 4)),
    "cleaned": True,
}
"""All of it."""

EDITED = [
    *(Sampling(**edit, temperature=0.7) for edit in SINGLE_EDITS.values()),
    *(
        Sampling(**EVERYTHING, **filters)
        for filters in ({}, {"top_k": 30, "top_p": 0.9}, {"top_k": 700}, {"min_p": 0.05})
    ),
    Sampling(**EVERYTHING, temperature=0.0),
    Sampling(**SINGLE_EDITS["banned"], temperature=0.0),
]


def warped(logits: Tensor, setting: Sampling, top_p: bool = True) -> Tensor:
    """`[V]` scores as HuggingFace's processors make them, with or without those after top-k."""
    scores = _adjusted(logits.float(), setting)
    for processor in _filters(setting, top_p):
        scores = processor(_NO_TEXT, scores[None].clone())[0]
    return scores


_NO_TEXT: Any = torch.zeros(1, 1, dtype=torch.int64)


def _filters(setting: Sampling, top_p: bool = True) -> list[Any]:
    """The processors from the temperature on, with or without those after top-k."""
    before = {
        TemperatureLogitsWarper: setting.temperature or 1.0,
        TopKLogitsWarper: setting.top_k,
    }
    after = {
        TopPLogitsWarper: setting.top_p if setting.top_p < 1.0 else 0,
        MinPLogitsWarper: setting.min_p,
    }
    return [kind(value) for kind, value in (before | (after if top_p else {})).items() if value]


def _adjusted(logits: Tensor, setting: Sampling) -> Tensor:
    """`[V]` logits after HuggingFace's processors before the temperature; OpenAI's penalties follow HuggingFace's."""
    vocabulary = len(logits)
    text = torch.from_numpy(np.concatenate([setting.seen, setting.output_ids]))
    text = text[text < vocabulary]
    values = defaultdict[tuple[int, ...], float](float)
    for token, bits, begins, ends, *before in setting.biases.T:
        if token < vocabulary and begins <= STEP < ends:
            after = [int(other) for other in reversed(before) if other >= 0]
            values[(*after, int(token))] += float(bits.view(np.float32))
    if known := {sequence: value for sequence, value in values.items() if max(sequence) < vocabulary}:
        ids = torch.from_numpy(np.concatenate([setting.tail, setting.output_ids, [0]])).long()
        logits = SequenceBiasLogitsProcessor(known)(ids[None, :-1], logits[None].clone())[0]
    processors = LogitsProcessorList()
    if setting.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(setting.repetition_penalty))
    logits = processors(text[None], logits[None].clone())[0]
    times = torch.bincount(torch.from_numpy(setting.output_ids[setting.output_ids < vocabulary]), minlength=vocabulary)
    logits = logits - setting.frequency_penalty * times - setting.presence_penalty * (times > 0)
    if setting.cleaned:
        logits = InfNanRemoveLogitsProcessor()(text[None], logits[None])[0]
    if setting.mask is not None:
        allowed = np.unpackbits(setting.mask.view(np.uint8), bitorder="little")
        allowed = np.pad(allowed, (0, max(0, vocabulary - len(allowed))))[:vocabulary]
        logits = SuppressTokensLogitsProcessor(np.flatnonzero(allowed == 0))(text[None], logits[None])[0]
    return logits


def distribution(logits: Tensor, setting: Sampling) -> Tensor:
    """`[V]` float64 probabilities; where HuggingFace's top-p cuts through equal scores, all of them stay."""
    scores = warped(logits, setting, top_p=False).double()
    if setting.temperature == 0.0:
        return torch.nn.functional.one_hot(scores.argmax(), len(scores)).double()
    if setting.top_p < 1.0:
        descending = scores.sort(descending=True).values
        before = descending.softmax(dim=0).cumsum(dim=0) - descending.softmax(dim=0)
        smallest = descending[: max(1, int((before < setting.top_p).sum()))].min()
        scores[scores < smallest] = -math.inf
    if setting.min_p > 0.0:
        scores[(scores - scores.max()).exp() < setting.min_p] = -math.inf
    return scores.softmax(dim=0)


def tables_of(settings: Sequence[Sampling], vocabulary: int, device: str = "cpu") -> SamplingTables:
    """What slots hold of settings, the last of them for padding."""
    count = len(settings) + 1
    staging = Staging(torch.device(device))
    arena = Arena(SlotSettings.columns(count), torch.device(device), staging)
    slots = SlotSettings(arena, staging, vocabulary)
    slots.enter(list(range(len(settings))), settings)
    arena.flush()
    return slots.tables


def arguments(logits: Tensor, seeds: Tensor, settings: Sequence[Sampling], position: int = 1000) -> SampleTokens:
    """Those of `sample_tokens`, on the device of the logits, rows' entries in reverse order."""
    device = logits.device
    tables = tables_of(list(reversed(settings)), logits.shape[1], str(device))
    slots = torch.arange(len(settings), device=device).flip(0)
    return tables.arguments(logits, seeds.to(device), slots, torch.full_like(slots, position))


def counted_after(given: SampleTokens) -> Callable[[Tensor], Tensor]:
    """The table of counts after `sample_tokens` has chosen: those tokens of rows that count are counted."""
    before = given.counts.clone()

    def after(sampled: Tensor) -> Tensor:
        counting = given.adjustments[given.slots] & COUNTED != 0
        before[given.slots[counting], sampled[counting]] += 2
        return before

    return after


def distributions(logits: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """`[B, V]` float64 probabilities of rows, on the CPU."""
    return torch.stack([distribution(row, own) for row, own in zip(logits.cpu(), settings, strict=False)])


def reached_by(logits: Tensor, settings: Sequence[Sampling], seeds: Tensor, position: int = 1000) -> Tensor:
    """`[B, V]` float64: by how much the tokens that are kept lose, as negative numbers, in the race that decides.

    Tokens of rows with top-k race each for itself, others in their tile. Rows with top-p and without top-k race with
    all of their tokens first, until one wins that is kept. 0 is the winner's; -inf is that of those left out. One row
    of logits with one setting may have several seeds.
    """
    settings = settings[: len(logits)]
    kept = distributions(logits, settings)
    limited = torch.tensor([is_limited(own, logits.shape[1]) for own in settings])[:, None]
    reached = torch.where(limited, _raced_alone(kept, seeds, position), _raced(kept, seeds, position, 0))
    proposing = torch.tensor([_proposes(own, logits.shape[1]) for own in settings])
    if not bool(proposing.any()):
        return reached
    kept, proposing = kept.expand_as(reached), proposing.expand(len(seeds))
    whole = distributions(logits, [replace(own, top_p=1.0, min_p=0.0) for own in settings]).expand_as(reached)
    rows = proposing.nonzero()[:, 0]
    for attempt in range(PROPOSALS):
        raced = _raced(whole[rows], seeds[rows], position, attempt)
        decided = kept[rows].gather(1, raced.argmax(dim=-1, keepdim=True))[:, 0] > 0
        reached[rows[decided]] = raced[decided].masked_fill(kept[rows[decided]] == 0, -math.inf)
        if len(rows := rows[~decided]) == 0:
            return reached
    reached[rows] = _raced(kept[rows], seeds[rows], position, PROPOSALS)
    return reached


def is_limited(setting: Sampling, vocabulary: int) -> bool:
    """Whether top-k leaves some tokens out, so that the others race each for itself."""
    return 0 < setting.top_k < vocabulary


def _proposes(setting: Sampling, vocabulary: int) -> bool:
    return setting.temperature != 0.0 and setting.top_p < 1.0 and not is_limited(setting, vocabulary)


def _raced_alone(chances: Tensor, seeds: Tensor, position: int) -> Tensor:
    """`[B, V]` float64: by how much tokens of these probabilities lose, each for itself."""
    positions, numbers = torch.full_like(seeds, position), torch.arange(chances.shape[1])[None]
    reached = chances.log() - exponentials(seeds, positions, numbers, OF_TOKENS).log()
    return reached - reached.amax(dim=-1, keepdim=True)


def _raced(chances: Tensor, seeds: Tensor, position: int, attempt: int) -> Tensor:
    """`[B, V]` float64: by how much tokens of these probabilities lose, with their tile or in it."""
    tiled = torch.nn.functional.pad(chances, (0, -chances.shape[1] % TILE)).view(len(chances), -1, TILE)
    positions, count = torch.full_like(seeds, position), tiled.shape[1]
    tile_numbers, numbers = torch.arange(count)[None], torch.arange(count * TILE)[None]
    of_tiles = exponentials(seeds, positions, tile_numbers, OF_TILES, attempt)
    of_tokens = exponentials(seeds, positions, numbers, OF_TOKENS, attempt).view(len(seeds), -1, TILE)
    tiles, tokens = tiled.sum(dim=-1).log() - of_tiles.log(), tiled.log() - of_tokens.log()
    behind = (tiles - tiles.amax(dim=-1, keepdim=True))[:, :, None], tokens - tokens.amax(dim=-1, keepdim=True)
    return torch.minimum(*behind).nan_to_num(-math.inf).flatten(1)[:, : chances.shape[1]]


def assert_wins(sampled: Tensor, seeds: Tensor, logits: Tensor, settings: Sequence[Sampling], slack: float) -> None:
    """Each row's token wins the race among those that its filters keep, but for near ties."""
    reached = reached_by(logits, settings, seeds)
    for row, (token, setting) in enumerate(zip(sampled.tolist(), settings, strict=True)):
        where = f"row {row}, {setting}: token {token} under seed {int(seeds[row])}"
        assert reached[row, token] > -math.inf, f"{where} was filtered"
        assert reached[row, token] >= reached[row].max() - slack, f"{where} loses against {int(reached[row].argmax())}"


@functools.cache
def favouring(vocabulary: int, alone: bool = False, position: int = 1000) -> Tensor:
    """`[V]` seeds: each makes the numbers of its token and its tile so small that they win, unless likelier ones do.

    `alone` are those of races of tokens, in which tiles have no numbers.
    """
    tries = torch.arange(2**12 if alone else 2**19)
    positions, seeds = torch.full_like(tries, position), []
    for tile in range(-(-vocabulary // TILE)):
        some = tries
        if not alone:
            of_tile = exponentials(tries, positions, torch.tensor([[tile]]), OF_TILES)
            some = of_tile[:, 0].topk(2**10, largest=False).indices
        tokens = tile * TILE + torch.arange(TILE)[None]
        seeds.append(some[exponentials(some, positions[: len(some)], tokens, OF_TOKENS).argmin(dim=0)])
    return torch.cat(seeds)[:vocabulary]


def unusual_logits(vocabulary: int) -> Tensor:
    """`[7, V]`: rows with +inf, several of them, NaN, several of them, both, nothing but -inf, and equal logits."""
    logits = torch.randn(7, vocabulary)
    last, middle, first = vocabulary - 1, vocabulary // 2, vocabulary // 3
    logits[0, last] = logits[1, middle] = logits[1, last] = math.inf
    logits[2, middle] = logits[3, middle] = logits[3, last] = logits[4, last] = math.nan
    logits[4, first] = math.inf
    logits[5], logits[6] = -math.inf, 0.5
    return logits
