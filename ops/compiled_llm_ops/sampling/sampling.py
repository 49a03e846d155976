"""Samples the next tokens, with settings for each row."""

# A draw is a race among the tokens that the filters keep, see ``race``.
# Shapes: B rows, V vocabulary, X entries of the tables of settings.

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_llm_ops.contracts.sampling import (
    COUNTED,
    DEFERRED,
    FOLLOWING,
    MAX_BIASES,
    MAX_FOLLOWED,
    TILE,
    SampleTokens,
)
from compiled_llm_ops.library import define_op, kernel_of
from compiled_llm_ops.sampling.adjustments import AdjustmentTables, Places, adjusted
from compiled_llm_ops.sampling.race import winners

NOT_A_TOKEN = -1
"""Stands for the next token of a row that is to be drawn from logits that are NaN, +inf or all -inf: none can be."""

_MAX_COUNTED = 2**15 - 1

_builder = ThreadPoolExecutor(1, "compiled_llm_sampling")
_builds: list[Future[None]] = []  # that a launch has not waited for yet

# So many of the most likely tokens are searched for a nucleus before the whole vocabulary is sorted.
_LIKELY = 1024


@define_op(SampleTokens, writes=("counts", "recent"))
def sample_tokens(args: SampleTokens) -> Tensor:
    """Sample each row's next token, and count and remember it.

    A row that is ``DEFERRED`` is left out, and so is every other one if ``deferred``: its tables are not written.

    Biases, repetition penalty, frequency and presence penalty, infinities, mask; temperature, top-k, top-p and min-p,
    each over the tokens that the one before has left: in this order. Tokens as likely as the last that is kept are kept
    too, and the most likely one always is. The result depends on the arguments alone. Of a row without logit
    adjustments, no table beyond ``adjustments`` is touched.

    Args:
        logits: ``[B, V]`` of any floating dtype, computed with in float32, with any stride between rows.
        seeds: ``[B]`` int64, not negative: with the position it decides the row's random numbers.
        slots: ``[B]`` int64, each row's entry in the tables; several rows may have one whose adjustments are 0.
        positions: ``[B]`` int64, the position of the sampled token, which decides the biases; not negative.
        temperature: ``[X]`` float32, divides; 0.0 takes the most likely token, the first of several, as ``argmax``
            does: of +inf as well, before that of NaN, and the first one if all are -inf.
        top_k: ``[X]`` int32, keep the k largest; 0 keeps all.
        top_p: ``[X]`` float32, keep the fewest of the largest ones whose probability reaches p; 1.0 keeps all.
        min_p: ``[X]`` float32, keep those at least p times as probable as the most probable; 0.0 keeps all.
        adjustments: ``[X]`` int32, flags of logit adjustments before the temperature: ``COUNTED`` for penalties,
            ``MASKED`` for ``allowed``, ``CLEANED`` if NaN becomes 0 and infinities become finite, ``BIASED`` for each
            bias, and ``FOLLOWING`` for each token that the bias which looks back furthest looks at. ``DEFERRED``
            changes no logits.
        repetition_penalty: ``[X]`` float32, divides positive logits of tokens that were counted or are in the prompt,
            and multiplies negative ones; 1.0 for none.
        presence_penalty: ``[X]`` float32, subtracted for tokens that were counted.
        frequency_penalty: ``[X]`` float32, subtracted for each time that a token was counted.
        counts: ``[X, V]`` int16, written: twice how often a token was sampled, and 1 more if the prompt has it.
        allowed: ``[X, ceil(V / 32)]`` int32, a bit for each token, the lowest first: 0 forbids it.
        biases: ``[X, 4 + MAX_FOLLOWED, MAX_BIASES]`` int32: tokens in ascending order; what is added to their logits,
            the bits of a float32; the first position at which it is, and the one at which it no longer is; the token
            that has to stand before it, and the one before that, and so on, or -1 for any.
        recent: ``[X, MAX_FOLLOWED + 1]`` int32, written: the row's token at each position modulo that number, or -1.
        deferred: sample the rows that are ``DEFERRED``, in place of all others.

    Returns:
        ``[B]`` int64; ``NOT_A_TOKEN`` for a row that is left out, and for one that is drawn and whose logits are NaN,
        +inf or all -inf.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        Order and sets are those of transformers' logits processors; presence and frequency penalty are those of
        OpenAI's API. Top-p: https://arxiv.org/abs/1904.09751, min-p: https://arxiv.org/abs/2407.01082. On CUDA
        ``kernels.sampling``.
    """
    return args.logits.new_empty(args.logits.shape[0], dtype=torch.int64)


def build_sampling(vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
    """Begin to build the kernels that ``sample_tokens`` launches on a CUDA device; the first launch waits for them.

    Triton takes 10 s for them unless it has them in its cache, most of it without the GIL: on a thread, so that models
    are traced and compiled meanwhile. On a CPU there is nothing to build.
    """
    if device.type == "cuda":
        _builds.append(_builder.submit(_build, vocabulary, dtype, device))


def _build(vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
    from compiled_llm_ops.kernels import sampling as triton_sampling

    logits = torch.empty(1, vocabulary, dtype=torch.float32 if dtype == torch.float64 else dtype, device="meta")
    of_one = _shapes(1, 1, vocabulary).items()
    others: dict[str, Any] = {name: torch.empty(shape, dtype=own, device="meta") for name, (shape, own) in of_one}
    with torch.cuda.device(device):
        triton_sampling.build(SampleTokens(logits, **others), NOT_A_TOKEN)


def _wait_for_builds() -> None:
    for build in tuple(_builds):
        build.exception()  # what has gone wrong there goes wrong again at the launch
        with suppress(ValueError):  # another thread has waited, too
            _builds.remove(build)


def _check(args: SampleTokens) -> None:
    logits = args.logits
    if logits.dim() != 2 or not logits.dtype.is_floating_point:
        raise ValueError(f"sample_tokens: logits must be [B, V] floats; got {list(logits.shape)} {logits.dtype}")
    rows, vocabulary = logits.shape
    for name, (shape, dtype) in _shapes(rows, args.temperature.shape[0], vocabulary).items():
        tensor = getattr(args, name)
        if list(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"sample_tokens: {name} must be {shape} {dtype}, contiguous; got {list(tensor.shape)} {tensor.dtype}"
            )


def _shapes(rows: int, entries: int, vocabulary: int) -> dict[str, tuple[list[int], torch.dtype]]:
    """Return the shape and dtype of each tensor but the logits."""
    return {
        "seeds": ([rows], torch.int64),
        "slots": ([rows], torch.int64),
        "positions": ([rows], torch.int64),
        "temperature": ([entries], torch.float32),
        "top_k": ([entries], torch.int32),
        "top_p": ([entries], torch.float32),
        "min_p": ([entries], torch.float32),
        "adjustments": ([entries], torch.int32),
        "repetition_penalty": ([entries], torch.float32),
        "presence_penalty": ([entries], torch.float32),
        "frequency_penalty": ([entries], torch.float32),
        "counts": ([entries, vocabulary], torch.int16),
        "allowed": ([entries, -(-vocabulary // 32)], torch.int32),
        "biases": ([entries, 4 + MAX_FOLLOWED, MAX_BIASES], torch.int32),
        "recent": ([entries, MAX_FOLLOWED + 1], torch.int32),
    }


@kernel_of(sample_tokens, "CPU")
def _cpu(args: SampleTokens) -> Tensor:
    _check(args)
    slots = args.slots.numpy()  # for a few numbers, NumPy takes a tenth of PyTorch's time
    adjustments = args.adjustments.numpy()[slots]
    if not (args.deferred or adjustments.any() or args.temperature.numpy()[slots].any()):
        return args.logits.max(dim=-1).indices  # what most rows want
    served = torch.from_numpy((adjustments & DEFERRED != 0) == args.deferred)
    if bool(served.all()):
        return _sample_rows(args)
    sampled = torch.full_like(args.slots, NOT_A_TOKEN)
    if bool(served.any()):
        columns = {name: getattr(args, name)[served] for name in ("logits", "seeds", "slots", "positions")}
        sampled[served] = _sample_rows(args._replace(**columns))
    return sampled


def _sample_rows(args: SampleTokens) -> Tensor:
    slots, temperature, adjustments = args.slots, args.temperature[args.slots], args.adjustments[args.slots]
    scale = torch.where(temperature == 0, 1.0, temperature)[:, None]
    scores = _adjusted(args, adjustments)
    if bool((scale != 1).any()):
        scores = scores / scale
    best, sampled = scores.max(dim=-1)
    greedy = temperature == 0
    usable = greedy | ((best > -math.inf) & (best < math.inf))  # both are False for NaN
    if not bool(greedy.all()):
        sampled = torch.where(greedy, sampled, _draw(args, scores))
    sampled = torch.where(usable, sampled, NOT_A_TOKEN)
    _count(args.counts, slots, sampled, usable & (adjustments & COUNTED != 0))
    remembered = usable & (adjustments // FOLLOWING & MAX_FOLLOWED > 0)
    at = args.positions[remembered] % (MAX_FOLLOWED + 1)
    args.recent[slots[remembered], at] = sampled[remembered].int()
    return sampled


def _count(counts: Tensor, slots: Tensor, sampled: Tensor, counted: Tensor) -> None:
    at = slots[counted], sampled[counted]
    before = counts[at]
    counts[at] = torch.where(before < _MAX_COUNTED - 1, before + 2, before)


def _adjusted(args: SampleTokens, adjustments: Tensor) -> Tensor:
    """Return ``[B, V]`` float32 logits with the logit adjustments ``[B]`` of their rows."""
    logits = args.logits.float()
    rows = adjustments.nonzero()[:, 0]
    if len(rows) == 0:
        return logits
    slots = args.slots[rows]
    kinds = int(np.bitwise_or.reduce(adjustments[rows].numpy()))
    places = Places(slots, args.positions[rows])
    scores = adjusted(logits[rows], places, AdjustmentTables.of(args), args.counts[slots], kinds)
    return scores if len(rows) == len(logits) else logits.index_copy(0, rows, scores)


# ---- the draw


def _draw(args: SampleTokens, scores: Tensor) -> Tensor:
    """Return ``[B]`` int64, drawn from ``scores`` ``[B, V]`` with the filters of their rows."""
    top_k, top_p, min_p = (table[args.slots] for table in (args.top_k, args.top_p, args.min_p))
    tiles = _tiled(scores)
    numbers = torch.arange(tiles.shape[1], device=scores.device)[None]
    if bool(((top_k > 0) & (top_k < scores.shape[1])).all()):
        tiles, numbers = _candidates(tiles, top_k)
    smallest = smallest_kept(tiles.flatten(1), top_k, top_p, min_p)
    if bool((smallest > -math.inf).any()):
        tiles = tiles.masked_fill(tiles < smallest[:, None, None], -math.inf)
    return winners(tiles, numbers, args.seeds, args.positions)


def _tiled(scores: Tensor) -> Tensor:
    """Return ``scores`` ``[B, V]`` as ``[B, C, TILE]``, -inf for tokens that the vocabulary lacks."""
    rows, vocabulary = scores.shape
    return torch.nn.functional.pad(scores, (0, -vocabulary % TILE), value=-math.inf).view(rows, -1, TILE)


def _candidates(tiles: Tensor, top_k: Tensor) -> tuple[Tensor, Tensor]:
    """Return those of ``tiles`` ``[B, C, TILE]`` that top-k can keep tokens of, and their numbers, in order."""
    # As many tiles as top-k keeps tokens reach the k-th largest maximum of a tile, so the k-th largest score does.
    peaks = tiles.amax(dim=-1)
    most = min(int(top_k.max()), peaks.shape[1])
    kth = peaks.topk(most).values.gather(1, (top_k.long() - 1).clamp(max=most - 1)[:, None])
    width = max(1, int((peaks >= kth).sum(dim=-1).max()))
    likely = peaks.topk(width).indices.sort(dim=-1).values
    return tiles.gather(1, likely[:, :, None].expand(-1, -1, TILE)), likely


def smallest_kept(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return ``[B]`` float32, the scores of ``[B, V]`` from which on a row's tokens are kept; -inf where all are."""
    smallest = scores.new_full(top_k.shape, -math.inf)
    limited, nucleus = (top_k > 0) & (top_k < scores.shape[1]), top_p < 1
    most = 0
    if bool(limited.any()):
        most = int(top_k[limited].max())
        kth = scores.topk(most).values.gather(1, (top_k.long() - 1).clamp(0, most - 1)[:, None])
        smallest = torch.where(limited, kth[:, 0], smallest)
    if bool(nucleus.any()):
        likely = most if bool(limited[nucleus].all()) else max(most, _LIKELY)
        smallest = torch.where(nucleus, _nucleus(scores, smallest, top_p, likely), smallest)
    if bool((min_p > 0).any()):
        smallest = smallest.maximum(scores.amax(dim=-1) + min_p.log())
    return smallest


def _nucleus(scores: Tensor, smallest: Tensor, top_p: Tensor, likely: int) -> Tensor:
    """Return ``[B]``, the largest score that together with all larger ones has top-p of the tokens kept so far."""
    kept = (scores - scores.amax(dim=-1, keepdim=True)).exp_().masked_fill_(scores < smallest[:, None], 0)
    needed = kept.sum(dim=-1, dtype=torch.float64) * top_p.double()
    likely = min(likely, scores.shape[1])
    largest, order = scores.topk(likely)
    short = (kept.gather(1, order).cumsum(dim=-1, dtype=torch.float64) < needed[:, None]).sum(dim=-1)
    # Only more tokens as likely as the last of the top-k reach it, or many tokens in rows without top-k.
    found = largest.gather(1, short.clamp(max=likely - 1)[:, None])[:, 0].maximum(smallest)
    missing = (short == likely) & (found > smallest) & (top_p < 1)
    if likely < scores.shape[1] and bool(missing.any()):
        return _nucleus(scores, smallest, top_p, scores.shape[1])
    return found


@kernel_of(sample_tokens, "CUDA")
def _cuda(args: SampleTokens) -> Tensor:
    from compiled_llm_ops.kernels import sampling as triton_sampling

    _check(args)
    if args.logits.dtype == torch.float64:
        args = args._replace(logits=args.logits.float())
    if _builds:
        _wait_for_builds()
    with torch.cuda.device_of(args.logits):
        return triton_sampling.sample_tokens(args, NOT_A_TOKEN)
