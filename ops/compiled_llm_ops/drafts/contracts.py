"""What the ops and kernels of drafts take."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

NOT_ACCEPTED = -2
"""Stands for a token that does not count, since the draft that it follows is not what was sampled there."""

NOT_DRAFTED = -3
"""Stands for a token that does not count, since no draft was offered where it follows one."""


class NgramDrafts(NamedTuple):
    """The arguments of ``ngram_drafts``."""

    texts: Tensor
    slots: Tensor
    lengths: Tensor
    longest: Tensor
    shortest: Tensor
    k: int


class WriteTexts(NamedTuple):
    """The arguments of ``write_texts``."""

    texts: Tensor
    slots: Tensor
    starts: Tensor
    tokens: Tensor


class AcceptDrafts(NamedTuple):
    """The arguments of ``accept_drafts``."""

    sampled: Tensor
    drafts: Tensor
    offered: Tensor
    slots: Tensor
    positions: Tensor
    adjustments: Tensor
    next_token: Tensor
    counts: Tensor
    recent: Tensor
