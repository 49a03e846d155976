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

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm_ops.contracts import OF_TILES, OF_TOKENS, TILE

_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
_ROUNDS = 10
_LARGEST_SHARE = 1.0 - 2.0**-24
_LOOKED_AT = 16  # tiles of each row, before their winner says which others can still win


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
    return _numbers(of_tiles(seeds, positions, tokens // TILE), seeds, positions, tokens)


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
    tops = tiles.amax(dim=-1)
    peaks = tops.amax(dim=-1, keepdim=True).double()  # taken off: next to huge scores the numbers would be rounded away
    least, first = of_tiles(seeds, positions, numbers)
    # No token of a tile gets further than its largest score with its least number would.
    reach = tops.double() - peaks - least.log()
    furthest, tokens = torch.full_like(reach, -math.inf), numbers * TILE
    columns = reach.topk(min(_LOOKED_AT, reach.shape[1])).indices.flatten()
    rows = torch.arange(len(reach)).repeat_interleave(len(columns) // len(reach))
    while len(rows):
        at = rows, columns
        own = numbers[at][:, None] * TILE + torch.arange(TILE)
        drawn = _numbers((least[at][:, None], first[at][:, None]), seeds[rows], positions[rows], own)
        furthest[at], places = (tiles[at].double() - peaks[rows] - drawn.log()).max(dim=-1)
        tokens[at] += places
        lead = furthest.amax(dim=-1, keepdim=True)
        rows, columns = ((reach >= lead) & (furthest == -math.inf)).nonzero(as_tuple=True)
    return tokens.gather(1, furthest.argmax(dim=-1, keepdim=True))[:, 0]


def philox(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the words of Philox4x32-10, ``[4, ...]``, of a counter ``[4, ...]`` under a key ``[2, ...]``."""
    column = (2, *(1 for _ in counter.shape[1:]))
    multipliers, weyl = _MULTIPLIERS.reshape(column), _WEYL.reshape(column)
    even, odd = counter[::2], counter[1::2]
    for _ in range(_ROUNDS):
        product = (even * multipliers)[::-1]
        even, odd = (product >> _HALF) ^ odd ^ key, product & _MASK
        key = (key + weyl) & _MASK
    return np.stack([even[0], odd[0], even[1], odd[1]])


def _numbers(of_tiles: tuple[Tensor, Tensor], seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Return the exponential numbers of tokens ``[B, N]``, given those of their tiles ``[B, N]`` or ``[B, 1]``."""
    least, first = of_tiles
    high, low, _, _ = _words(seeds, positions, tokens, OF_TOKENS)
    return least + torch.where(tokens % TILE == first, 0.0, _exponential(high, low))


def _words(seeds: Tensor, positions: Tensor, numbers: Tensor, kind: int) -> NDArray[np.uint64]:
    """Return ``[4, B, N]``, four words of 32 bits for each of ``numbers`` ``[B, N]`` of tiles or tokens."""
    columns = (seeds[:, None], positions[:, None], numbers)
    seed, position, number = (column.numpy().astype(np.uint64) for column in columns)
    counter = np.empty((4, *np.broadcast_shapes(seed.shape, number.shape)), dtype=np.uint64)
    counter[0], counter[1], counter[2], counter[3] = number, kind, position & _MASK, position >> _HALF
    return philox(counter, np.stack([seed & _MASK, seed >> _HALF]))


def _exponential(high: NDArray[np.uint64], low: NDArray[np.uint64]) -> Tensor:
    """Return exponential numbers, each of two words; small ones, which win, are as precise as others."""
    share = ((high << _HALF) | low).astype(np.float64) * 2.0**-64 + 2.0**-65
    return torch.from_numpy(-np.log1p(-np.minimum(share, _LARGEST_SHARE)))
