"""What the ops and kernels of sampling and of log-probabilities take."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

COUNTED = 1  # part of a row's logit adjustments, of ``sample_tokens``: penalties by what it has counted

MASKED = 2  # part of a row's logit adjustments: a mask says which tokens are allowed

CLEANED = 4  # part of a row's logit adjustments: NaN becomes 0, and infinities become finite

FOLLOWING = 8
"""Part of a row's logit adjustments for each token before the one that is sampled which its biases look at."""

DEFERRED = 64
"""Part of a row's logit adjustments: a launch of its own samples its token, once the host has written its mask."""

BIASED = 128  # part of a row's logit adjustments for each of its biases; they are its largest part

MAX_FOLLOWED = 7  # how many tokens before the one that is sampled a bias can look at

MAX_BIASES = 512  # how many biases a row can have

TILE = 64  # so many neighbouring tokens race as one first

OF_TILES, OF_TOKENS = 0, 1  # the use of a random number: a part of the generator's counter, as the attempt is

PROPOSALS = 8
"""So many tokens are drawn from the whole row, in turn, before a nucleus is searched for; the first in it is taken."""


class TopLogprobs(NamedTuple):
    logits: Tensor
    tokens: Tensor
    num_logprobs: int
