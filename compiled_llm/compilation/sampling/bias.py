"""Biases added to logits of tokens, at some steps of an answer or after some tokens; they also forbid and force."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ALWAYS = 2**31 - 1  # a step that no answer reaches

BARRED = -math.inf
FORCED = 1e20  # above all other logits, and so far that these vanish in the sum: forced tokens are equally likely

LARGEST = 1e10  # most that a bias may be: it vanishes in the sum with a forced token's


NO_BIASES: NDArray[np.int32] = np.zeros((4, 0), dtype=np.int32)


class Bias(NamedTuple):
    """A value added to a token's logit."""

    token: int
    value: float
    first: int = 0  # the first step of the answer with it; step 0 samples the first token
    end: int = ALWAYS  # the first step without it
    after: tuple[int, ...] = ()  # the tokens that have to precede it, at most ``MAX_FOLLOWED``


def packed(biases: Iterable[Bias]) -> NDArray[np.int32]:
    """Return ``[4 + F, N]`` int32, as ``sample_tokens`` reads them: no bias looks back further than F tokens."""
    if not (listed := sorted(biases)):
        return NO_BIASES
    columns = np.array([bias[:4] for bias in listed], dtype=np.float64).reshape(-1, 4).T
    tokens, values, first, end = columns
    whole = [np.clip(column, 0, ALWAYS).astype(np.int32) for column in (first, end)]
    furthest = max((len(bias.after) for bias in listed), default=0)
    backwards = [(*reversed(bias.after), *[-1] * (furthest - len(bias.after))) for bias in listed]
    before = np.array(backwards, dtype=np.int32).reshape(len(listed), furthest).T
    return np.stack([tokens.astype(np.int32), values.astype(np.float32).view(np.int32), *whole, *before])


def packed_values(values: Mapping[int, float], others: Iterable[Bias] = ()) -> NDArray[np.int32]:
    """Return the same as ``packed``, of tokens whose logits change at every step, and of other biases."""
    # One request may have hundreds of the former: making a ``Bias`` of each would take longer than all its other work.
    rest = packed(others)
    if not values:
        return rest
    columns = np.full((len(rest), len(values)), -1, dtype=np.int32)
    columns[0] = np.fromiter(values.keys(), np.int64, len(values))
    columns[1] = np.fromiter(values.values(), np.float32, len(values)).view(np.int32)
    columns[2], columns[3] = 0, ALWAYS
    both = np.concatenate([columns, rest], axis=1)
    return both[:, np.argsort(both[0], kind="stable")]


def from_position(biases: NDArray[np.int32], starts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return biases ``[4 + F, N]`` as ``[n, 4 + F, N]`` whose steps are positions, from ``starts`` ``[n]``."""
    each = np.repeat(biases[None], len(starts), axis=0)
    each[:, 2:4] = np.minimum(biases[2:4] + starts[:, None, None], ALWAYS)
    return each
