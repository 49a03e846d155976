"""Masks of allowed tokens, a bit for each: ``sample_tokens`` reads them, and grammars write them."""

# Shapes: V vocabulary; a mask is ``[ceil(V / 32)]`` int32, the lowest bit of a word its first token.

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def mask_of(
    vocabulary: int, allowed: Iterable[int] | None = None, banned: Iterable[int] = ()
) -> NDArray[np.int32] | None:
    """The mask of a vocabulary's tokens that are ``allowed`` (None for all) and not ``banned``; None if all are."""
    banned = list(banned)
    if allowed is None and not banned:  # as mostly; a vocabulary takes long to look at
        return None
    bits = np.full(-(-vocabulary // 32) * 32, allowed is None, dtype=bool)
    bits[_known(() if allowed is None else allowed, vocabulary)] = True
    bits[_known(banned, vocabulary)] = False
    return None if bits.all() else np.packbits(bits, bitorder="little").view(np.int32)


def all_tokens(vocabulary: int) -> NDArray[np.int32]:
    """Return the mask that allows all tokens."""
    mask = np.full(-(-vocabulary // 32), -1, dtype=np.int32)
    if vocabulary % 32:
        mask[-1] = (1 << vocabulary % 32) - 1
    return mask


def _known(tokens: Iterable[int], vocabulary: int) -> NDArray[np.int64]:
    ids = np.fromiter(tokens, dtype=np.int64)
    return ids[(ids >= 0) & (ids < vocabulary)]
