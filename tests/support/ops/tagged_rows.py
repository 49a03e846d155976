"""Rows whose pages are tagged, and a naive check of their tags in Python's integers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from support.ops.check_pages import PageFault
from support.ops.page_tags import CHAIN_ADOPTED, CHAIN_KNOWN, CHAIN_ORIGIN, NO_FAULT, CheckPages

PADDING = 0
"""The slot whose chain is skipped."""


def mixed(token: int, position: int) -> int:
    """The last steps of MurmurHash3 over a token and its position."""
    bits = (token * 0x9E3779B1 ^ (position + 1) * 0x85EBCA77) % 2**32
    bits = (bits ^ bits >> 16) * 0x85EBCA6B % 2**32
    bits = (bits ^ bits >> 13) * 0xC2B2AE35 % 2**32
    return bits ^ bits >> 16


def chains_of(tokens: Sequence[int]) -> list[int]:
    """The chain before each token, and that after all."""
    chains = [CHAIN_ORIGIN]
    for position, token in enumerate(tokens):
        chains.append((chains[-1] + mixed(token, position)) % 2**32)
    return chains


class TaggedRows:
    """Rows of a step: the tokens that they have with the new ones, the last of these, and their pages.

    Rows that begin with the same tokens share the full pages of those; each row's slot is its index plus 1, its number
    that plus 100. Tags are those of the old tokens.
    """

    def __init__(self, tokens: Sequence[Sequence[int]], new: Sequence[int], page_size: int, seed: int = 0) -> None:
        self.tokens, self.new, self.size = [list(row) for row in tokens], list(new), page_size
        free = random.Random(seed).sample(range(1, 200), 199)
        full: dict[tuple[int, ...], int] = {}
        self.pages: list[list[int]] = []
        for row, count in zip(self.tokens, new, strict=True):
            own = []
            for end in range(page_size, len(row) + page_size, page_size):
                beginning = tuple(row[:end])
                shares = end <= len(row) - count
                page = full.get(beginning) if shares else None
                own.append(free.pop() if page is None else page)
                if shares:
                    full[beginning] = own[-1]
            self.pages.append(own)
        self.tags = torch.zeros(200, page_size, 2, dtype=torch.int32)
        for row, count, pages in zip(self.tokens, new, self.pages, strict=True):
            self.write(pages, row, 0, len(row) - count)
        self.chains = torch.zeros(len(self.tokens) + 3, dtype=torch.int64)
        for at, (row, count) in enumerate(zip(self.tokens, new, strict=True)):
            self.chains[at + 1] = CHAIN_KNOWN + chains_of(row)[len(row) - count]
        self.faults = torch.tensor([0, NO_FAULT])

    def write(self, pages: Sequence[int], tokens: Sequence[int], first: int, end: int) -> None:
        chains = torch.tensor(chains_of(tokens)).to(torch.int32)
        for position in range(first, end):
            self.tags[pages[position // self.size], position % self.size] = chains[position : position + 2]

    def arguments(self, packed: bool, device: str = "cpu") -> CheckPages:
        """The op's arguments, with a row of padding at the end; packed with ``qo_indptr``."""
        rows = [*range(len(self.tokens)), None]
        pages = [[0] if row is None else self.pages[row] for row in rows]
        tokens = [[7] * self.new[0] if row is None else self.tokens[row][-self.new[row] :] for row in rows]
        lengths = [self.new[0] if row is None else len(self.tokens[row]) for row in rows]

        def sums(counts: list[int]) -> list[int]:
            return [sum(counts[:at]) for at in range(len(counts) + 1)]

        def ints(numbers: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(numbers, dtype=dtype, device=device)

        return CheckPages(
            self.tags.clone().to(device),
            self.chains.clone().to(device),
            self.faults.clone().to(device),
            ints([*chain(*tokens)], torch.int64),
            ints(sums([*map(len, pages)])[:-1]),
            ints(lengths),
            ints([*chain(*pages)]),
            ints([PADDING if row is None else row + 1 for row in rows], torch.int64),
            ints([100 + slot for slot in range(len(self.chains))]),
            ints(sums([*map(len, tokens)])) if packed else None,
        )

    def after(self) -> tuple[Tensor, Tensor]:
        """The tags and chains that the op leaves, if all is right."""
        tags, chains = self.tags.clone(), self.chains.clone()
        for at, (row, count, pages) in enumerate(zip(self.tokens, self.new, self.pages, strict=True)):
            self.write(pages, row, len(row) - count, len(row))
            chains[at + 1] = CHAIN_KNOWN + chains_of(row)[-1]
        self.tags, tags = tags, self.tags
        return tags, chains

    def faults_of(self, packed: bool) -> tuple[int, PageFault | None]:
        """How many slots are wrong, and the first of them; the rows have been tagged."""
        tags, _ = self.after()
        found = []
        for at, (row, count, pages) in enumerate(zip(self.tokens, self.new, self.pages, strict=True)):
            old = len(row) - count
            before, begin = CHAIN_ORIGIN, int(self.chains[at + 1])
            for position in range(len(row) if packed else old):
                page = pages[position // self.size]
                own, after = (int(part) % 2**32 for part in tags[page, position % self.size])
                adopts = begin < CHAIN_KNOWN
                differs = begin != CHAIN_ADOPTED + old if adopts else begin - CHAIN_KNOWN != after
                ends = position == max(0, old - 1) and differs
                found += [PageFault(101 + at, page, position)] * ((own != before) + (ends and old > 0))
                before = after
        found.sort(key=lambda fault: (fault.position, fault.page, fault.row))
        return len(found), found[0] if found else None


def some_rows(seed: int, packed: bool, page_size: int = 4) -> TaggedRows:
    """Rows of random lengths, some of which begin alike."""
    rng = random.Random(seed)
    beginning = [rng.randrange(150_000) for _ in range(3 * page_size + 2)]
    tokens, new = [], []
    each = rng.choice([1, 1, 3])
    for _ in range(rng.randrange(1, 7)):
        own = [rng.randrange(150_000) for _ in range(rng.randrange(30))]
        shared = beginning[: rng.randrange(len(beginning))]
        count = rng.randrange(1, 20) if packed else each
        tokens.append([*shared, *own, *(rng.randrange(150_000) for _ in range(count))])
        new.append(count)
    return TaggedRows(tokens, new, page_size, seed)


def rows_that_begin_alike() -> TaggedRows:
    """The second reads a page of the first, which that one's new tokens fill."""
    rows = TaggedRows([[3, 1, 4, 1, 5], [3, 1, 4, 1, 5, 9]], [5, 2], 4)
    rows.pages[1][0] = rows.pages[0][0]
    return rows
