"""The part of a step that checks that rows read their own pages, with the page tables that attention reads.

Tags are the same in all layers, so that is once a step. Shapes: B rows, T new tokens, q of each row in decode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm.compilation.inputs import DecodeInputs, PageCheck, PrefillInputs
from compiled_llm_ops import check_pages

CHAIN_IN_SLOT = -1
"""In place of a chain that ``check_pages`` takes: it is the one in the row's slot."""


def check_decode(inputs: DecodeInputs, ids: Tensor) -> None:
    """Check the rows of a decode step, which feeds in tokens ``[B, q]`` and has not advanced yet."""
    check, planned = inputs.page_check, inputs.planned
    assert check is not None, "the caller has asked"
    starts, lengths, indices = inputs.starts, inputs.lengths, inputs.indices
    if planned is not None:
        starts, indices = planned.indptr[:-1], planned.indices
        lengths = _lengths(check, planned.indptr, planned.last_page_len)
    columns = (ids.flatten(), starts, lengths, indices, inputs.slots, check.row_numbers)
    check_pages(check.tags, check.chains, check.faults, *columns, None)


def check_prefill(inputs: PrefillInputs, ids: Tensor) -> None:
    """Check the rows of a prefill of tokens ``[T]``; rows with slots have their chains there afterwards."""
    check, begins, slots, numbers = inputs.page_check, inputs.begins, inputs.chain_slots, inputs.row_numbers
    assert check is not None, "the caller has asked"
    assert begins is not None, "they come together"
    assert slots is not None, "they come together"
    assert numbers is not None, "they come together"
    slots = torch.where(slots < 0, len(check.chains) - 1, slots)
    chains = torch.where(begins == CHAIN_IN_SLOT, check.chains[slots], begins)
    lengths = _lengths(check, inputs.indptr, inputs.last_page_len)
    rows = torch.arange(len(begins), device=ids.device)
    columns = (ids, inputs.indptr[:-1], lengths, inputs.indices, rows, numbers, inputs.qo_indptr)
    check_pages(check.tags, chains, check.faults, *columns)
    check.chains.index_copy_(0, slots, chains)


def _lengths(check: PageCheck, indptr: Tensor, last_page_len: Tensor) -> Tensor:
    """Return ``[B]`` int32, the tokens of each row."""
    return (indptr.diff() - 1) * check.tags.shape[1] + last_page_len
