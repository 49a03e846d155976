"""The Triton kernel that writes and compares the tags of pages."""

# Shapes: B rows, N page numbers of all rows.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from support.ops.page_tags import (
    CHAIN_ADOPTED,
    CHAIN_KNOWN,
    CHAIN_ORIGIN,
    CHAIN_SKIPPED,
    FAULT_PAGE_BITS,
    FAULT_ROW_BITS,
    NO_FAULT,
    CheckPages,
)


class Division(NamedTuple):
    """The way the slots of rows are divided."""

    slots: int  # that a program looks at in one go
    programs: int  # of all rows together, at least, if they are long enough
    splits: int  # programs of one row, at most


DIVISION = Division(256, 256, 64)
"""Fitted on an H100 with 1 to 256 rows of 32,768 tokens in all."""

_ORIGIN, _SKIPPED = tl.constexpr(CHAIN_ORIGIN), tl.constexpr(CHAIN_SKIPPED)
_ADOPTED, _KNOWN = tl.constexpr(CHAIN_ADOPTED), tl.constexpr(CHAIN_KNOWN)
_NO_FAULT = tl.constexpr(NO_FAULT)
_PAGE_BITS, _PAGE_MASK = tl.constexpr(FAULT_PAGE_BITS), tl.constexpr(2**FAULT_PAGE_BITS - 1)
_ROW_BITS, _ROW_MASK = tl.constexpr(FAULT_ROW_BITS), tl.constexpr(2**FAULT_ROW_BITS - 1)
_LOW = tl.constexpr(CHAIN_KNOWN - 1)


@triton.jit
def _mixed(tokens, positions):
    """Hash tokens and their positions to 32 bits, as the op does on a CPU."""
    mixed = (tokens.to(tl.uint32) * 0x9E3779B1) ^ ((positions + 1).to(tl.uint32) * 0x85EBCA77)
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
    return (mixed ^ (mixed >> 16)).to(tl.int64)


@triton.jit
def _place(indices, start, entries, positions, pages, SIZE: tl.constexpr):
    """Return the places of positions among all slots, their pages' numbers, and whether there are such pages."""
    entry = tl.minimum(tl.maximum(start + positions // SIZE, 0), entries - 1)
    page = tl.load(indices + entry)
    legal = (page >= 0) & (page < pages)
    return tl.where(legal, page, 0).to(tl.int64) * SIZE + positions % SIZE, page, legal


@triton.jit
def _fault(position, page, number):
    """Return a fault as one number; see ``fault_of``."""
    shown = (position.to(tl.int64) << _PAGE_BITS) + (page.to(tl.int64) & _PAGE_MASK)
    return (shown << _ROW_BITS) + number


@triton.jit
def _check_pages(
    tags, chains, faults, tokens, starts, lengths, indices, slots, row_numbers, qo_indptr, each, entries, pages,
    SIZE: tl.constexpr, WRITE: tl.constexpr, CHECK: tl.constexpr, BLOCK: tl.constexpr, NEW: tl.constexpr,
):  # fmt: skip
    """Check a part of a row's tags; the last program of a row has the new tokens, and writes theirs."""
    # Only that program reads and writes the row's chain: to the others it matters alone that the row is not skipped.
    row, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    slot = tl.load(slots + row)
    begin = tl.load(chains + slot)
    if begin != _SKIPPED:
        length, start = tl.load(lengths + row), tl.load(starts + row)
        number = tl.load(row_numbers + slot).to(tl.int64) & _ROW_MASK
        first, new = row * each, each
        if qo_indptr is not None:
            first = tl.load(qo_indptr + row)
            new = tl.load(qo_indptr + row + 1) - first
        old = length - new
        until = old
        if qo_indptr is not None:
            until = length
        count = 0
        worst = tl.full([], _NO_FAULT, tl.int64)
        if CHECK:
            span = tl.cdiv(until, splits * BLOCK) * BLOCK
            for base in tl.range(split * span, tl.minimum(until, split * span + span), BLOCK):
                at = base + tl.arange(0, BLOCK)
                inside = at < until
                here, page, legal = _place(indices, start, entries, at, pages, SIZE)
                there, _, _ = _place(indices, start, entries, tl.maximum(at - 1, 0), pages, SIZE)
                before = tl.load(tags + 2 * here, mask=inside, other=0)
                after = tl.load(tags + 2 * there + 1, mask=inside & (at > 0), other=_ORIGIN)
                wrong = inside & ((before != after) | (legal == 0))
                count += tl.sum(wrong.to(tl.int32))
                worst = tl.minimum(worst, tl.min(tl.where(wrong, _fault(at, page, number), _NO_FAULT)))
        if split == splits - 1:
            last = tl.maximum(old - 1, 0)
            there, page, has_page = _place(indices, start, entries, last, pages, SIZE)
            prior = tl.where(old == 0, _ORIGIN, tl.load(tags + 2 * there + 1).to(tl.int64) & _LOW)
            has_page |= old == 0
            chain = tl.where(begin >= _KNOWN, begin & _LOW, prior)
            if CHECK:
                apart = tl.where(begin >= _KNOWN, (chain != prior) | (has_page == 0), begin != _ADOPTED + old)
                count += apart.to(tl.int32)
                worst = tl.minimum(worst, tl.where(apart, _fault(last, page, number), _NO_FAULT))
            for base in tl.range(0, new, NEW):
                offs = base + tl.arange(0, NEW)
                inside = offs < new
                own = tl.load(tokens + first + offs, mask=inside, other=0)
                mixed = tl.where(inside, _mixed(own, old + offs), 0)
                after = chain + tl.cumsum(mixed, 0)
                if WRITE:
                    here, _, legal = _place(indices, start, entries, old + offs, pages, SIZE)
                    tl.store(tags + 2 * here, (after - mixed).to(tl.int32), mask=inside & legal)
                    tl.store(tags + 2 * here + 1, after.to(tl.int32), mask=inside & legal)
                chain = (chain + tl.sum(mixed, 0)) & _LOW
            if CHECK:
                tl.store(chains + slot, _KNOWN + chain)
        if count > 0:
            tl.atomic_add(faults, tl.cast(count, tl.int64))
            tl.atomic_min(faults + 1, worst)


def check(args: CheckPages, division: Division = DIVISION) -> None:
    """Launch the check, twice for a prefill, whose rows may read what others write in the same call."""
    rows = args.slots.shape[0]
    if not rows:
        return
    pages, size, _ = args.tags.shape
    splits = max(1, min(division.splits, division.programs // triton.next_power_of_2(rows)))
    each = args.tokens.shape[0] // rows
    new = division.slots if args.qo_indptr is not None else triton.next_power_of_2(max(1, each))
    sizes = {"SIZE": size, "BLOCK": division.slots, "NEW": new, "num_warps": 4}
    if args.qo_indptr is None:
        _check_pages[(rows, splits)](*args, each, args.indices.shape[0], pages, WRITE=True, CHECK=True, **sizes)
        return
    _check_pages[(rows, 1)](*args, each, args.indices.shape[0], pages, WRITE=True, CHECK=False, **sizes)
    _check_pages[(rows, splits)](*args, each, args.indices.shape[0], pages, WRITE=False, CHECK=True, **sizes)
