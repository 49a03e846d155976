"""The races that draw a token: exponential random numbers of a counter-based generator, and the winners, on the CPU."""

# Of competitors with exponential random numbers, the one whose number divided by its probability is the smallest wins:
# each with its probability. With top-k the few tokens that are left race each for itself. Else tiles of neighbouring
# tokens race first, each with the probability of its tokens together, then the tokens of the tile that has won. A seed
# and a position decide the number of each tile and token.
# A logit that is computed in another order, and so a little differently, changes the winner only if two are nearly
# level; had the token been looked up in the cumulative sum of probabilities, it would have moved every border there.
# Shapes: B rows, C tiles, N numbers, V vocabulary.

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm_ops.contracts.sampling import OF_TILES, OF_TOKENS, TILE

_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
_ROUNDS = 10
_LARGEST_SHARE = 1.0 - 2.0**-24


def exponentials(seeds: Tensor, positions: Tensor, numbers: Tensor, kind: int, attempt: int = 0) -> Tensor:
    """Return exponential random numbers, which depend on the arguments alone.

    Args:
        seeds: ``[B]`` int64, not negative.
        positions: ``[B]`` int64, not negative.
        numbers: ``[B, N]`` int64, or ``[1, N]`` for the same ones in all rows: which tiles or tokens they are of.
        kind: ``OF_TILES`` or ``OF_TOKENS``.
        attempt: how many races the rows have had before at their positions.

    Returns:
        ``[B, N]`` float64, above 0; small ones, which win, are as precise as others.

    Source:
        Philox4x32-10: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011),
        https://doi.org/10.1145/2063384.2063405.
    """
    columns = (seeds[:, None], positions[:, None], numbers)
    seed, position, number = (column.numpy().astype(np.uint64) for column in columns)
    counter = np.empty((4, *np.broadcast_shapes(seed.shape, number.shape)), dtype=np.uint64)
    counter[0], counter[1], counter[2], counter[3] = number, kind + 2 * attempt, position & _MASK, position >> _HALF
    high, low, _, _ = philox(counter, np.stack([seed & _MASK, seed >> _HALF]))
    share = ((high << _HALF) | low).astype(np.float64) * 2.0**-64 + 2.0**-65
    return torch.from_numpy(-np.log1p(-np.minimum(share, _LARGEST_SHARE)))


def winners(scores: Tensor, tokens: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Return ``[B]`` int64, those of ``tokens`` ``[B, N]`` that win by their ``scores``, -inf for who does not run."""
    # Scores may be huge: beside them, random numbers would not count.
    ahead = scores - scores.amax(dim=-1, keepdim=True)
    return tokens.gather(1, _leaders(ahead, exponentials(seeds, positions, tokens, OF_TOKENS)))[:, 0]


def winners_by_tiles(tiles: Tensor, seeds: Tensor, positions: Tensor, attempt: int = 0) -> tuple[Tensor, Tensor]:
    """Return ``[B]`` int64, the tokens that win among those of all tiles, and their scores.

    Of scores that are NaN, or all -inf, any token wins.
    """
    # ``tiles`` ``[B, C, TILE]`` float32 have the scores, -inf for who does not take part.
    peak = tiles.amax(dim=(1, 2), keepdim=True)
    masses = (tiles - peak).exp().sum(dim=-1).log()
    numbers = torch.arange(tiles.shape[1], device=tiles.device)[None]
    tile = _leaders(masses, exponentials(seeds, positions, numbers, OF_TILES, attempt))
    tokens = tile * TILE + torch.arange(TILE, device=tile.device)
    scores = tiles.gather(1, tile[:, :, None].expand(-1, -1, TILE))[:, 0]
    best = _leaders(scores - peak[:, 0], exponentials(seeds, positions, tokens, OF_TOKENS, attempt))
    return tokens.gather(1, best)[:, 0], scores.gather(1, best)[:, 0]


def _leaders(scores: Tensor, numbers: Tensor) -> Tensor:
    """Return ``[B, 1]``, the places of those that get furthest of ``scores`` ``[B, N]``."""
    return (scores.double() - numbers.log()).argmax(dim=-1, keepdim=True)


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
