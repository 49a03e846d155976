"""The race that draws a token: exponential random numbers of a counter-based generator, and who wins, on the CPU.

Each token of a vocabulary has an exponential random number, which a seed, a position and the token decide. The one
whose number divided by its probability is the smallest is drawn: each with its probability. A logit that is computed
in another order, and so a little differently, changes who wins only if two tokens are nearly level.

A tile of neighbouring tokens has the least of its numbers from one random number, and which token has that one from
another. The rest of any other token's is exponential again, since exponential numbers have no memory. So most tiles are
known to lose without a look at their tokens.

Shapes: B rows, C tiles, N tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TILE = 64
"""So many neighbouring tokens have the least of their numbers from one random number."""

OF_TILES, OF_TOKENS = 0, 1
"""What a number is drawn for: a part of the generator's counter."""

Words = tuple[NDArray[np.uint64], ...]

_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_ROUNDS = 10
_LARGEST_SHARE = 1.0 - 2.0**-24
_LOOKED_AT = 16


def exponentials(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Return the exponential random numbers of tokens; nothing but the arguments decides.

    Args:
        seeds: ``[B]`` int64, not negative.
        positions: ``[B]`` int64, not negative.
        tokens: ``[B, N]`` int64, or ``[1, N]`` for the same ones in all rows.

    Returns:
        ``[B, N]`` float64, above 0.

    Source:
        Philox4x32-10: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011),
        https://doi.org/10.1145/2063384.2063405.
    """
    least, first = of_tiles(seeds, positions, tokens // TILE)
    high, low, _, _ = _words(seeds, positions, tokens, OF_TOKENS)
    return least + torch.where(tokens % TILE == first, 0.0, _exponential(high, low))


def of_tiles(seeds: Tensor, positions: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return, of tiles, the least exponential number, and the place of the token that has it.

    Args:
        seeds: ``[B]`` int64.
        positions: ``[B]`` int64.
        numbers: ``[B, C]`` int64, or ``[1, C]``, which tiles these are: the first has tokens 0 to ``TILE - 1``.

    Returns:
        ``[B, C]`` float64, and ``[B, C]`` int64.
    """
    high, low, place, _ = _words(seeds, positions, numbers, OF_TILES)
    return _exponential(high, low) / TILE, torch.from_numpy((place % np.uint64(TILE)).astype(np.int64))


def winners(tiles: Tensor, numbers: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the tokens that win the race among those of some tiles.

    Args:
        tiles: ``[B, C, TILE]`` float32, the tokens' scores; -inf for those that do not take part.
        numbers: ``[B, C]`` int64, or ``[1, C]``, which tiles these are.
        seeds: ``[B]`` int64.
        positions: ``[B]`` int64.

    Returns:
        ``[B]`` int64; any of the tokens for a row whose scores are NaN, or all -inf.
    """
    numbers = numbers.expand(tiles.shape[:2])
    # No token of a tile gets further than its largest score with its least number would.
    reach = tiles.amax(dim=-1).double() - of_tiles(seeds, positions, numbers)[0].log()
    looked_at, wanted = 0, min(_LOOKED_AT, tiles.shape[1])
    while wanted > looked_at:
        looked_at = wanted
        some = reach.topk(looked_at).indices
        tokens = (numbers.gather(1, some)[:, :, None] * TILE + torch.arange(TILE)).flatten(1)
        scores = tiles.gather(1, some[:, :, None].expand(-1, -1, TILE)).flatten(1)
        lead, place = (scores.double() - exponentials(seeds, positions, tokens).log()).max(dim=-1)
        wanted = int((reach >= lead[:, None]).sum(dim=-1).max())
    return tokens.gather(1, place[:, None])[:, 0]


def philox(counter: Words, key: Words) -> Words:
    """Return the four words of Philox4x32-10 of a counter of four words under a key of two; 32 bits each."""
    first, second, third, fourth = counter
    left, right = key
    for _ in range(_ROUNDS):
        product, other = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first, second = (other >> _HALF) ^ second ^ left, other & _MASK
        third, fourth = (product >> _HALF) ^ fourth ^ right, product & _MASK
        left, right = (left + _WEYL[0]) & _MASK, (right + _WEYL[1]) & _MASK
    return first, second, third, fourth


def _words(seeds: Tensor, positions: Tensor, numbers: Tensor, kind: int) -> Words:
    """Return four words of ``[B, N]`` of 32 bits, for ``numbers`` ``[B, N]`` of tiles or tokens."""
    columns: tuple[Any, ...] = (seeds[:, None], positions[:, None], numbers)
    seed, position, number = (column.numpy().astype(np.uint64) for column in columns)
    counter = (number, np.full_like(position, kind), position & _MASK, position >> _HALF)
    return philox(counter, (seed & _MASK, seed >> _HALF))


def _exponential(high: NDArray[np.uint64], low: NDArray[np.uint64]) -> Tensor:
    """Return exponential numbers, each of two words; small ones, which win, are as precise as others."""
    share = ((high << _HALF) | low).astype(np.float64) * 2.0**-64 + 2.0**-65
    return torch.from_numpy(-np.log1p(-np.minimum(share, _LARGEST_SHARE)))
