"""Tags beside the slots of pages, by which it is seen that a row reads a page that is not its own."""

# The tag of a slot is the row's chain before and after its token. A chain is a sum of hashed pairs of token and
# position, modulo 2**32: rows that share pages have the same, the host computes that of a prompt at once, and to forget
# tokens is to subtract. Where a row reads a slot of other tokens, of other positions, or that nobody wrote, its tag
# does not follow from the one before.
# Shapes: B rows, T new tokens, P pages, S page size, N page numbers of all rows, X slots.

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm_ops.contracts import check_int32
from compiled_llm_ops.library import define_op, kernel_of
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

LIBRARY = torch.library.Library("compiled_llm_tests", "DEF")

_LOW = CHAIN_KNOWN - 1

_Integers = TypeVar("_Integers", Tensor, NDArray[np.int64])


@define_op(CheckPages, writes=("tags", "chains", "faults"), library=LIBRARY)
def check_pages(args: CheckPages) -> None:
    """Tag the slots of new tokens, and check the tags of all tokens that their rows read.

    Rows, lengths and page numbers are those that attention reads, so a page table that is not the rows' own shows. The
    tag of a row's first token has to follow from no tokens, each other one from the tag before it, and the last one
    before the new tokens has to be the row's own chain, ``chains[slots[b]]``.

    Args:
        tags: ``[P, S, 2]`` int32, written: the chain before and after the token in each slot.
        chains: ``[X]`` int64, written: in the places of ``slots`` the rows' chains, ``chain_after`` of their tokens and
            ``CHAIN_KNOWN``, at first without the new tokens and afterwards with them; ``CHAIN_ADOPTED``
            plus the number of these tokens to take over that of the last tag, which an earlier call has written;
            ``CHAIN_SKIPPED`` for padding, which is left alone. No two rows have one place.
        faults: ``[2]`` int64, written: how many tags were wrong is added to the first, and the second becomes the
            least of itself and the wrong slots, see ``fault_of``; it begins as ``NO_FAULT``.
        tokens: ``[T]`` int64, the tokens of a row next to each other.
        starts: ``[B]`` int32, where each row's pages begin in ``indices``.
        lengths: ``[B]`` int32, tokens of each row, the new ones included.
        indices: ``[N]`` int32, page numbers.
        slots: ``[B]`` int64, where the row's chain lies in ``chains``, and its number in ``row_numbers``.
        row_numbers: ``[X]`` int32, by which a fault names a row.
        qo_indptr: ``[B + 1]`` int32, row b's new tokens are ``qo_indptr[b]:qo_indptr[b + 1]``; None if each row has as
            many. New tokens are then read by no other row, and their tags are looked at in the next call.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        Canaries, as of stacks (https://www.usenix.org/legacy/publications/library/proceedings/sec98/cowan.html); the
        hash is the end of MurmurHash3 (https://github.com/aappleby/smhasher). On CUDA a Triton kernel of our own.
    """


class PageFault(NamedTuple):
    """A slot that a row has read although it is not the row's.

    Attributes:
        row: its number, modulo 2**20.
        page: its number, modulo 2**21.
        position: which token of the row should be in the slot.
    """

    row: int
    page: int
    position: int


def fault_of(number: int) -> PageFault:
    """Read the second number of ``faults``."""
    rest, row = divmod(number, 2**FAULT_ROW_BITS)
    position, page = divmod(rest, 2**FAULT_PAGE_BITS)
    return PageFault(row, page, position)


def chain_after(ids: NDArray[np.int64], first: int = 0, chain: int = CHAIN_ORIGIN) -> int:
    """Return the chain after tokens ``[T]``, the first of them at position ``first``, that follow ``chain``."""
    with np.errstate(over="ignore"):
        return (chain + int(_mixed(ids.astype(np.int64), first + np.arange(len(ids), dtype=np.int64)).sum())) & _LOW


def chain_before(chains: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    """Return chains ``[B]`` without the last tokens ``[B, q]`` of each row, unless they are not known."""
    # ``positions`` ``[B, q]`` int64 are the tokens'; -1 for tokens that stay.
    forgotten = torch.where(positions < 0, 0, _mixed(tokens, positions)).sum(1)
    return torch.where(chains < CHAIN_KNOWN, chains, CHAIN_KNOWN + ((chains - forgotten) & _LOW))


def _mixed(tokens: _Integers, positions: _Integers) -> _Integers:
    """Hash tokens and their positions, int64 arrays or tensors, to 32 bits; products beyond 64 bits lose the others."""
    mixed = ((tokens * 0x9E3779B1) ^ ((positions + 1) * 0x85EBCA77)) & _LOW
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & _LOW
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & _LOW
    return mixed ^ (mixed >> 16)


def _check(args: CheckPages) -> None:
    rows = args.slots.shape[0]
    if args.tags.dim() != 3 or args.tags.shape[2] != 2:
        raise ValueError(f"check_pages: tags must be [P, S, 2]; got {tuple(args.tags.shape)}")
    if args.starts.shape != (rows,) or args.lengths.shape != (rows,):
        raise ValueError(
            f"check_pages: starts and lengths must be [{rows}], one entry for each of slots; got "
            f"{tuple(args.starts.shape)} and {tuple(args.lengths.shape)}"
        )
    if args.chains.dim() != 1 or args.row_numbers.shape != args.chains.shape or args.faults.shape != (2,):
        raise ValueError(
            f"check_pages: chains and row_numbers must be [X], and faults [2]; got {tuple(args.chains.shape)}, "
            f"{tuple(args.row_numbers.shape)} and {tuple(args.faults.shape)}"
        )
    if args.tokens.dim() != 1 or (args.qo_indptr is None and args.tokens.shape[0] % max(1, rows)):
        raise ValueError(
            f"check_pages: tokens must be [T], equally many for each of {rows} rows without qo_indptr; got "
            f"{tuple(args.tokens.shape)}"
        )
    columns = {"starts": args.starts, "lengths": args.lengths, "indices": args.indices, "row_numbers": args.row_numbers}
    if args.qo_indptr is not None:
        columns["qo_indptr"] = args.qo_indptr
    check_int32("check_pages", tags=args.tags, **columns)
    for name, tensor in (("chains", args.chains), ("faults", args.faults), ("tokens", args.tokens)):
        if tensor.dtype != torch.int64:
            raise ValueError(f"check_pages: {name} must be int64; got {tensor.dtype}")


@kernel_of(check_pages, "CPU")
def _cpu(args: CheckPages) -> None:
    _check(args)
    rows = len(args.slots)
    if rows == 0:
        return
    begins = args.chains[args.slots]
    checked, known = begins != CHAIN_SKIPPED, begins >= CHAIN_KNOWN
    lengths = args.lengths.long()
    if args.qo_indptr is None:
        counts = torch.full_like(lengths, len(args.tokens) // rows)
    else:
        counts = args.qo_indptr.long().diff()
    old = lengths - counts
    each_row = torch.arange(rows, device=lengths.device)
    tags = args.tags.view(-1, 2)

    last, _, last_legal = _places(args, each_row, (old - 1).clamp(min=0))
    chains = torch.where(known, begins & _LOW, _prior(tags, last, old))
    row_of = each_row.repeat_interleave(counts)
    positions = (old - counts.cumsum(0) + counts)[row_of] + torch.arange(len(row_of), device=lengths.device)
    mixes = _mixed(args.tokens[: len(row_of)], positions)
    sums = mixes.cumsum(0)
    ends = counts.cumsum(0)
    before_row = torch.where(ends > counts, sums[(ends - counts - 1).clamp(min=0)], 0) if len(sums) else ends * 0
    after = chains[row_of] + sums - before_row[row_of]
    places, _, legal = _places(args, row_of, positions)
    written = checked[row_of] & legal
    pairs = torch.stack([after - mixes, after], 1).to(torch.int32)
    tags.index_copy_(0, places[written], pairs[written])

    differs = (_prior(tags, last, old) != chains) | ((old > 0) & ~last_legal)  # the tag may be as new
    apart = torch.where(known, differs, begins != CHAIN_ADOPTED + old)
    _note_faults(args, checked, apart, torch.where(checked, old if args.qo_indptr is None else lengths, 0), old)
    totals = torch.zeros_like(lengths).index_add_(0, row_of, mixes)
    ended = CHAIN_KNOWN + ((chains + totals) & _LOW)
    args.chains.index_copy_(0, args.slots[checked], ended[checked])


def _prior(tags: Tensor, last: Tensor, old: Tensor) -> Tensor:
    """Return ``[B]``, the chains that the rows' last old tags say, which lie in ``last``."""
    return torch.where(old > 0, tags[last, 1].long() & _LOW, CHAIN_ORIGIN)


def _note_faults(args: CheckPages, checked: Tensor, apart: Tensor, until: Tensor, old: Tensor) -> None:
    """Count wrong slots among the first ``until`` ``[B]`` of each row, and the last old one of those set ``apart``."""
    most = int(until.max())
    positions = torch.arange(max(1, most), device=until.device)
    row_of = torch.arange(len(until), device=until.device)[:, None]
    places, pages, legal = _places(args, row_of, positions[None])
    pairs = args.tags.view(-1, 2)[places]
    expected = torch.cat([torch.full_like(pairs[:, :1, 0], CHAIN_ORIGIN), pairs[:, :-1, 1]], 1)
    wrong = (positions < until[:, None]) & ((pairs[..., 0] != expected) | ~legal)
    apart &= checked
    args.faults[0] += wrong.sum() + apart.sum()
    wrong |= apart[:, None] & (positions == (old - 1).clamp(min=0)[:, None])
    numbers = args.row_numbers[args.slots].long() % 2**FAULT_ROW_BITS
    shown = (positions << FAULT_PAGE_BITS) + pages % 2**FAULT_PAGE_BITS
    keys = torch.where(wrong, (shown << FAULT_ROW_BITS) + numbers[:, None], NO_FAULT)
    args.faults[1] = torch.minimum(args.faults[1], keys.min())


def _places(args: CheckPages, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the places of tokens among all slots, their pages' numbers, and whether there are such pages."""
    pages, size, _ = args.tags.shape
    entries = (args.starts.long()[rows] + positions // size).clamp(0, args.indices.shape[0] - 1)
    numbers = args.indices[entries].long()
    legal = (numbers >= 0) & (numbers < pages)
    return torch.where(legal, numbers, 0) * size + positions % size, numbers, legal


@kernel_of(check_pages, "CUDA")
def _cuda(args: CheckPages) -> None:
    from support.ops.check_pages_kernel import check

    _check(args)
    with torch.cuda.device(args.tags.device):  # Triton launches on the current one
        check(args)
