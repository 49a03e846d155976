"""Runs ``sample_tokens``: on a CPU in plain PyTorch and NumPy, on CUDA by Triton."""

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

from compiled_llm_ops.contracts.sampling import DEFERRED, MAX_FOLLOWED, PROPOSALS, TILE
from compiled_llm_ops.library import kernel_of
from compiled_llm_ops.sampling.adjustments import AdjustmentTables, Noted, Places, adjusted, note_tokens
from compiled_llm_ops.sampling.race import winners, winners_by_tiles
from compiled_llm_ops.sampling.sampling import (
    NOT_A_TOKEN,
    NUMBERS,
    Filters,
    SampleTokens,
    sample_tokens,
    smallest_kept,
    wide_shapes,
)

_builder = ThreadPoolExecutor(1, "compiled_llm_sampling")
# those that a launch has not waited for yet, of kernels for calls without and with tokens ``before``
_builds: dict[bool, list[Future[None]]] = {False: [], True: []}


def build_sampling(vocabulary: int, dtype: torch.dtype, device: torch.device, before: bool = False) -> None:
    """Begin to build the kernels that ``sample_tokens`` launches on a CUDA device; the first launch waits for them.

    Triton takes 10 s for them unless it has them in its cache, most of it without the GIL: on a thread, so that models
    are traced and compiled meanwhile. Calls with tokens ``before`` have kernels of their own. On a CPU there is nothing
    to build.
    """
    if device.type == "cuda":
        _builds[before].append(_builder.submit(_build, vocabulary, dtype, device, before))


def _build(vocabulary: int, dtype: torch.dtype, device: torch.device, before: bool) -> None:
    from compiled_llm_ops.sampling.kernels import sampling as triton_sampling

    logits = torch.empty(1, vocabulary, dtype=torch.float32 if dtype == torch.float64 else dtype, device="meta")
    of_one = _shapes(1, 1, vocabulary).items()
    others: dict[str, Any] = {name: torch.empty(shape, dtype=own, device="meta") for name, (shape, own) in of_one}
    if before:
        others["before"] = torch.empty(1, 1, dtype=torch.int64, device="meta")
    with torch.cuda.device(device):
        triton_sampling.build(SampleTokens(logits, **others), NOT_A_TOKEN)


def _wait_for_builds(before: bool = False) -> None:
    for build in tuple(_builds[before]):
        build.exception()  # what has gone wrong there goes wrong again at the launch
        with suppress(ValueError):  # another thread has waited, too
            _builds[before].remove(build)


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
    if (before := args.before) is not None and (before.dim(), before.dtype, len(before)) != (2, torch.int64, rows):
        raise ValueError(f"sample_tokens: before must be [{rows}, n] int64; got {list(before.shape)} {before.dtype}")
    if before is not None and before.shape[1] > MAX_FOLLOWED:
        raise ValueError(f"sample_tokens: before must have at most {MAX_FOLLOWED} tokens; got {before.shape[1]}")


def _shapes(rows: int, entries: int, vocabulary: int) -> dict[str, tuple[list[int], torch.dtype]]:
    """Return the shape and dtype of each tensor but the logits."""
    return {
        "seeds": ([rows], torch.int64),
        "slots": ([rows], torch.int64),
        "positions": ([rows], torch.int64),
        **{name: ([entries], dtype) for name, dtype in NUMBERS.items()},
        **wide_shapes(entries, vocabulary),
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
        names = ("logits", "seeds", "slots", "positions", *(() if args.before is None else ("before",)))
        columns = {name: getattr(args, name)[served] for name in names}
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
    if args.before is None:
        note_tokens(args.counts, args.recent, Places(slots, args.positions), sampled, adjustments)
    return sampled


def _adjusted(args: SampleTokens, adjustments: Tensor) -> Tensor:
    """Return ``[B, V]`` float32 logits with the logit adjustments ``[B]`` of their rows."""
    logits = args.logits.float()
    rows = adjustments.nonzero()[:, 0]
    if len(rows) == 0:
        return logits
    slots = args.slots[rows]
    kinds = int(np.bitwise_or.reduce(adjustments[rows].numpy()))
    places = Places(slots, args.positions[rows])
    before = None if args.before is None else args.before[rows]
    scores = adjusted(logits[rows], places, AdjustmentTables.of(args), Noted.of(args, slots), kinds, before)
    return scores if len(rows) == len(logits) else logits.index_copy(0, rows, scores)


# ---- the draw


def _draw(args: SampleTokens, scores: Tensor) -> Tensor:
    """Return ``[B]`` int64, drawn from ``scores`` ``[B, V]`` with the filters of their rows."""
    filters = Filters.of(args, args.slots)
    limited = (filters.top_k > 0) & (filters.top_k < scores.shape[1])
    if bool(limited.all()):
        return _draw_of_few(scores, filters, args.seeds, args.positions)
    if not bool(limited.any()):
        return _draw_of_many(scores, filters, args.seeds, args.positions)
    sampled = torch.empty_like(args.slots)
    for rows, draw in ((limited, _draw_of_few), (~limited, _draw_of_many)):
        own = Filters(*(column[rows] for column in filters))
        sampled[rows] = draw(scores[rows], own, args.seeds[rows], args.positions[rows])
    return sampled


def _draw_of_few(scores: Tensor, filters: Filters, seeds: Tensor, positions: Tensor) -> Tensor:
    """Return what rows with top-k draw: their tokens race each for itself."""
    tiles, numbers = _candidates(_tiled(scores), filters.top_k)
    some = tiles.flatten(1)
    kept = some >= smallest_kept(some, filters)[:, None]
    order = kept.byte().topk(max(1, int(kept.sum(dim=-1).max()))).indices  # what is kept comes first
    tokens = numbers.gather(1, order // TILE) * TILE + order % TILE
    return winners(some.masked_fill(~kept, -math.inf).gather(1, order), tokens, seeds, positions)


def _draw_of_many(scores: Tensor, filters: Filters, seeds: Tensor, positions: Tensor) -> Tensor:
    """Return what rows without top-k draw: tiles race before their tokens, for proposals if there is a top-p."""
    tiles, smallest = _tiled(scores), smallest_kept(scores, filters)
    tiles_kept = tiles
    if bool((smallest > -math.inf).any()):
        tiles_kept = tiles.masked_fill(tiles < smallest[:, None, None], -math.inf)
    proposing = filters.top_p < 1
    if not bool(proposing.any()):
        return winners_by_tiles(tiles_kept, seeds, positions)[0]
    sampled = torch.empty_like(seeds)
    rows = proposing.nonzero()[:, 0]
    for attempt in range(PROPOSALS):
        tokens, reached = winners_by_tiles(tiles[rows], seeds[rows], positions[rows], attempt)
        kept = reached >= smallest[rows]
        sampled[rows[kept]] = tokens[kept]
        if len(rows := rows[~kept]) == 0:
            break
    for others, attempt in ((rows, PROPOSALS), ((~proposing).nonzero()[:, 0], 0)):
        if len(others):
            sampled[others] = winners_by_tiles(tiles_kept[others], seeds[others], positions[others], attempt)[0]
    return sampled


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


@kernel_of(sample_tokens, "CUDA")
def _cuda(args: SampleTokens) -> Tensor:
    from compiled_llm_ops.sampling.kernels import sampling as triton_sampling

    _check(args)
    if args.logits.dtype == torch.float64:
        args = args._replace(logits=args.logits.float())
    if _builds[before := args.before is not None]:
        _wait_for_builds(before)
    with torch.cuda.device_of(args.logits):
        return triton_sampling.sample_tokens(args, NOT_A_TOKEN)
