"""Tags of pages show where a row reads what is not its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.ops.check_pages import PageFault, chain_after, chain_before, check_pages, fault_of
from support.ops.namespace import opcheck
from support.ops.page_tags import CHAIN_ADOPTED, CHAIN_KNOWN, NO_FAULT
from support.ops.tagged_rows import TaggedRows, chains_of, rows_that_begin_alike, some_rows

TOKENS = [[5, 3, 5, 9, 1, 1, 8, 2, 6, 4, 7], [5, 3, 5, 9, 2, 3, 4, 5, 6]]


def run(rows: TaggedRows, packed: bool = False) -> tuple[int, PageFault | None]:
    """How many slots were wrong, and the first of them."""
    args = rows.arguments(packed)
    check_pages(*args)
    count, key = args.faults.tolist()
    return count, None if key == NO_FAULT else fault_of(key)


@pytest.mark.parametrize("packed", [False, True], ids=["decode", "prefill"])
def test_rows_that_read_their_own_pages_are_tagged_and_silent(packed: bool, seed: int) -> None:
    for number in range(40):
        rows = some_rows(seed + number, packed)
        args = rows.arguments(packed)
        check_pages(*args)
        tags, chains = rows.after()
        assert torch.equal(args.tags, tags), seed + number
        assert torch.equal(args.chains, chains)
        assert args.faults.tolist() == [0, NO_FAULT]


@pytest.mark.parametrize("packed", [False, True], ids=["decode", "prefill"])
def test_faults_are_those_of_a_naive_check(packed: bool, seed: int) -> None:
    found = 0
    for number in range(60):
        rows = some_rows(seed + number, packed)
        rng = np.random.default_rng(seed + number)
        for _ in range(rng.integers(1, 3)):
            page, slot, side = rng.integers(200), rng.integers(rows.size), rng.integers(2)
            pages = [page for own in rows.pages for page in own]
            page = int(rng.choice(pages)) if rng.random() < 0.8 else page
            rows.tags[page, slot, side] += 1
        expected = rows.faults_of(packed)
        assert run(rows, packed) == expected, seed + number
        found += expected[0] > 0
    assert found > 20


def test_rows_of_a_prefill_read_what_others_write_in_the_same_call() -> None:
    rows = rows_that_begin_alike()
    assert run(rows, packed=True) == (0, None)
    rows.pages[1][0] = rows.pages[0][1]
    assert run(rows, packed=True)[1] == PageFault(102, rows.pages[0][1], 0)


def test_a_chain_that_is_adopted_is_that_of_the_last_tag() -> None:
    rows = TaggedRows(TOKENS, [1, 1], 4)
    _, chains = rows.after()
    rows.chains[1] = CHAIN_ADOPTED + 10
    args = rows.arguments(packed=False)
    check_pages(*args)
    assert torch.equal(args.chains, chains)
    assert args.faults.tolist() == [0, NO_FAULT]
    rows.chains[1] = CHAIN_ADOPTED + 9
    assert run(rows) == (1, PageFault(101, rows.pages[0][2], 9))  # is a token longer than the host knows


def test_the_first_wrong_slot_is_named() -> None:
    rows = TaggedRows(TOKENS, [1, 1], 4)
    (first, second, third), _ = rows.pages
    rows.pages[0] = [first, third, second]
    assert run(rows) == (4, PageFault(101, third, 4))  # at 4, 6 and 8, and the last one
    rows.pages[0] = [first, 100_000, third]  # is no page
    count, fault = run(rows)
    assert count == 5
    assert fault == PageFault(101, 100_000, 4)
    rows = TaggedRows(TOKENS, [1, 1], 4)
    rows.tokens[1].insert(4, 77)  # one token longer than what is stored
    assert run(rows) == (2, PageFault(102, rows.pages[1][-1], 8))
    rows = TaggedRows(TOKENS, [1, 1], 4)
    rows.pages[1] = rows.pages[0]  # all of it is another row's, and longer
    assert run(rows)[1] == PageFault(102, rows.pages[0][1], 7)


def test_chains_go_forward_and_back(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(200_000, size=23)
    chains = chains_of(ids.tolist())
    assert chain_after(ids) == chains[-1]
    assert chain_after(ids[7:], 7, chains[7]) == chains[-1]
    assert chain_after(ids[:0]) == chains[0]
    positions = torch.tensor([[20, 21, 22], [-1, -1, 22], [-1, -1, -1], [20, 21, 22]])
    known = torch.tensor([CHAIN_KNOWN + chains[23]] * 3 + [CHAIN_ADOPTED])
    tokens = torch.from_numpy(ids[20:]).expand(4, -1)
    back = chain_before(known, tokens, positions).tolist()
    assert back == [CHAIN_KNOWN + chains[20], CHAIN_KNOWN + chains[22], CHAIN_KNOWN + chains[23], CHAIN_ADOPTED]


def test_what_does_not_fit_is_refused() -> None:
    args = TaggedRows(TOKENS, [1, 1], 4).arguments(packed=False)
    for changed, message in (
        (args._replace(tags=args.tags[..., 0]), r"tags must be \[P, S, 2\]; got \(200, 4\)"),
        (args._replace(tags=args.tags.long()), "tags must be int32"),
        (args._replace(starts=args.starts[1:]), r"starts and lengths must be \[3\]"),
        (args._replace(chains=args.chains.int()), "chains must be int64"),
        (args._replace(faults=args.faults[:1]), r"faults \[2\]"),
        (args._replace(tokens=args.tokens[1:]), "equally many for each of 3 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            check_pages(*changed)


def test_the_op_is_an_op(seed: int, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [tuple(some_rows(number, packed).arguments(packed)) for number in range(3) for packed in (False, True)]
    opcheck(torch.ops.compiled_llm_tests.check_pages.default, cases, seed, whole, monkeypatch)
