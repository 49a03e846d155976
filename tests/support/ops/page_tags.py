"""What the check of pages and its kernel take, and the numbers that they write."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

CHAIN_ORIGIN = 0x2545F491  # the chain of no tokens; memory that was never written, zeros, follows from nothing

CHAIN_SKIPPED, CHAIN_ADOPTED = 0, 1
"""In place of a chain: the row is neither checked nor tagged; its chain is the one that its last tag says."""
# To the second is added how many tokens the row has, without the new ones.

CHAIN_KNOWN = 2**32  # added to a chain that is known

NO_FAULT = 2**63 - 1  # the second number of ``faults`` as long as the first is 0

FAULT_PAGE_BITS, FAULT_ROW_BITS = 21, 20
"""A fault is its position, the page's number and the row's, in one number, so that the first position is the least."""


class CheckPages(NamedTuple):
    tags: Tensor
    chains: Tensor
    faults: Tensor
    tokens: Tensor
    starts: Tensor
    lengths: Tensor
    indices: Tensor
    slots: Tensor
    row_numbers: Tensor
    qo_indptr: Tensor | None = None
