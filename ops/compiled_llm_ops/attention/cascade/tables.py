"""The tables of ``cascade_attention``, made on the host when rows come or go."""

# They say how runs of pages that rows share are divided: into tiles of members, whose queries read the keys together,
# and into pieces of keys, so that all programs of the kernel have about as much to read.
# Shapes: B rows, M = 3 * B members at most, W work items.

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compiled_llm_ops.attention.cascade.contract import CASCADE_LEVELS
from compiled_llm_ops.contracts import CASCADE_QUERIES

PIECE_KEYS = 128
"""Keys that a run is cut into multiples of: fewer are read no faster, and each piece has results to be merged."""

LENGTHS = np.array([0.5, 0.625, 0.75, 0.875, 1, 1.125, 1.25, 1.375, 1.5, 1.75, 2, 2.5, 3, 4, 6, np.inf])
"""How long pieces may be, relative to an even share of all keys for each program."""

ITEM_UNITS = 2
"""Keys of an item, times PIECE_KEYS, that take as long as queries and the merge of results; not yet fitted."""


class SharedRun(NamedTuple):
    """Pages next to each other that several rows share.

    Attributes:
        rows: numbers of the rows, two at least.
        first_page: where the run begins in each row's list of pages: at 0, or where another run of the row ends.
        pages: how many they are.
    """

    rows: tuple[int, ...]
    first_page: int
    pages: int


class CascadeTables(NamedTuple):
    """Arguments of ``cascade_attention`` of the same names, on the host; all int32.

    Attributes:
        shared_lengths: ``[B]``.
        members: ``[3 * B]``, unused entries at the end.
        work_items: ``[W, 6]``, in an order that gives all programs about as many keys; unused ones at the end.
        merge_parts: ``[B, 3, 3]``.
    """

    shared_lengths: NDArray[np.int32]
    members: NDArray[np.int32]
    work_items: NDArray[np.int32]
    merge_parts: NDArray[np.int32]


def cascade_tables(
    runs: Sequence[SharedRun],
    starts: Sequence[int],
    page_size: int,
    heads: int,
    kv_heads: int,
    processors: int,
    max_items: int,
    max_parts: int,
) -> CascadeTables:
    """Return the tables of ``cascade_attention`` for rows that share these runs.

    The runs of a row follow one another from its first page on, at most three. Each run must end before the row's
    newest token, since that is written by the row alone; lengths are unknown here, so the caller sees to it.

    If there are too many items or parts, runs are cut into fewer pieces. If that is not enough, those runs are left to
    decode that save the fewest keys, of a row's runs the last one first.

    Args:
        starts: of each of the B rows, where its pages begin in ``indices``.
        page_size: tokens of a page.
        heads: query heads.
        processors: multiprocessors of the device.
        max_items: W.
        max_parts: the op's argument.

    Raises:
        ValueError: runs do not follow one another from page 0, a row is in more than three runs or twice in one, a run
            has fewer than two rows or no page, or a kv head has more query heads than a tile.
    """
    rows = len(starts)
    tables = CascadeTables(
        np.zeros(rows, np.int32),
        np.zeros(CASCADE_LEVELS * rows, np.int32),
        np.zeros((max_items, 6), np.int32),
        np.zeros((rows, CASCADE_LEVELS, 3), np.int32),
    )
    tile = rows_of_a_tile(heads, kv_heads)
    found, tiles = _members_that_fit(runs, rows, tile, max_items, max_parts)
    if found is None:
        return tables
    tables.members[: len(found.members)] = found.members
    tables.shared_lengths[found.by_row] = found.ends * page_size  # of a row's runs the last one stays

    items = _tiles_of(found, tiles, tile, np.array(starts))
    piece = max(1, PIECE_KEYS // page_size)
    programs = max(1, processors // kv_heads)
    splits = _splits(-(-items.pages // piece), items.counts, programs, max_items, max_parts)
    given = splits * items.counts
    items = items._replace(parts=given.cumsum() - given)
    _write_merges(tables.merge_parts.reshape(-1), found, items, splits)
    items = _pieces_of(items, splits, piece)
    keys = items.pages * page_size
    order = _in_turn(keys, programs)
    columns = (items.entries, items.firsts * page_size, keys, items.members, items.counts, items.parts)
    for field, column in enumerate(columns):
        tables.work_items[: len(order), field] = column[order]
    return tables


def rows_of_a_tile(heads: int, kv_heads: int) -> int:
    """Return how many rows read keys together; ValueError if a kv head has more query heads than a tile."""
    tile = CASCADE_QUERIES >> (heads // kv_heads - 1).bit_length()
    if not tile:
        raise ValueError(f"a kv head may have at most {CASCADE_QUERIES} query heads; got {heads // kv_heads}")
    return tile


class _Items(NamedTuple):
    """Tiles of members, or pieces of these tiles' keys, as columns."""

    entries: NDArray[np.int64]  # where the first page stands in ``indices``
    firsts: NDArray[np.int64]  # the first page within the rows
    pages: NDArray[np.int64]  # how many
    members: NDArray[np.int64]  # the first member
    counts: NDArray[np.int64]  # how many members
    parts: NDArray[np.int64]  # the first part


def _members_that_fit(
    runs: Sequence[SharedRun], rows: int, tile: int, max_items: int, max_parts: int
) -> tuple[_Members | None, NDArray[np.int64]]:
    """Return the columns of the runs that there is room for, and each one's number of tiles; None if there is none."""
    while runs:
        found = _checked(runs, rows)
        tiles = -(-found.sizes // tile)
        if len(found.members) <= max_parts and int(tiles.sum()) <= max_items:
            return found, tiles
        runs = _that_fit(runs, tile, max_items, max_parts)
    return None, np.zeros(0, np.int64)


def _tiles_of(found: _Members, tiles: NDArray[np.int64], tile: int, starts: NDArray[Any]) -> _Items:
    """Cut each run's members into tiles, so many at a time; parts are numbered later."""
    first_members, counts = found.sizes.cumsum() - found.sizes, found.sizes
    firsts, pages = found.firsts, found.pages
    entries = starts[found.members[first_members]] + firsts
    if len(tiles) < (count := int(tiles.sum())):
        run = np.arange(len(tiles)).repeat(tiles)
        before = (np.arange(count) - (tiles.cumsum() - tiles).repeat(tiles)) * tile
        entries, firsts, pages = entries[run], firsts[run], pages[run]
        first_members, counts = first_members[run] + before, np.minimum(found.sizes[run] - before, tile)
    return _Items(entries, firsts, pages, first_members, counts, first_members)


def _write_merges(merges: NDArray[np.int32], found: _Members, tiles: _Items, splits: NDArray[np.int64]) -> None:
    """Write each member's parts, those of a piece next to each other, into the flat ``merge_parts``."""
    counts, at = tiles.counts, found.members * (3 * CASCADE_LEVELS) + found.levels * 3
    merges[at] = (tiles.parts - tiles.members).repeat(counts) + np.arange(len(found.members))
    merges[at + 1] = splits.repeat(counts)
    merges[at + 2] = counts.repeat(counts)


def _pieces_of(tiles: _Items, splits: NDArray[np.int64], piece: int) -> _Items:
    """Cut each tile's keys into so many pieces, of multiples of ``piece`` pages but for the last."""
    if len(splits) == (count := int(splits.sum())):
        return tiles
    tile_of = np.arange(len(splits)).repeat(splits)
    split = np.arange(count) - (splits.cumsum() - splits).repeat(splits)
    pages, counts = tiles.pages[tile_of], tiles.counts[tile_of]
    units, of_tile = -(-pages // piece), splits[tile_of]
    begin = split * units // of_tile * piece
    end = np.minimum((split + 1) * units // of_tile * piece, pages)
    entries, firsts = tiles.entries[tile_of] + begin, tiles.firsts[tile_of] + begin
    return _Items(entries, firsts, end - begin, tiles.members[tile_of], counts, tiles.parts[tile_of] + split * counts)


class _Members(NamedTuple):
    """Runs as columns: the members of all, and of each run how many it has, its first page and its pages."""

    members: NDArray[np.int64]
    sizes: NDArray[np.int64]
    firsts: NDArray[np.int64]
    pages: NDArray[np.int64]
    levels: NDArray[np.int64] | int  # of each member, how many runs its row is in before
    by_row: NDArray[np.int64]  # rows of all runs, with the runs of a row in order
    ends: NDArray[np.int64]  # of these, the page at which the run ends


def _checked(runs: Sequence[SharedRun], rows: int) -> _Members:
    """Return the columns of runs, of which there are some; ValueError if they are not what ``cascade_tables`` takes."""
    of_rows, all_firsts, all_pages = zip(*runs, strict=True)
    lengths = [*map(len, of_rows)]
    members = np.fromiter(chain.from_iterable(of_rows), np.int64, sum(lengths))
    # A negative number is a very large one without its sign.
    if min(lengths) < 2 or min(all_pages) < 1 or members.view(np.uint64).max() >= rows:
        bad = next(run for run in runs if len(run[0]) < 2 or run[2] < 1 or min(run[0]) < 0 or max(run[0]) >= rows)
        raise ValueError(f"a shared run must have a page, and at least two of the {rows} rows; got {bad}")
    sizes, firsts, pages = np.array(lengths), np.array(all_firsts), np.array(all_pages)
    ends = pages.repeat(sizes)
    if not any(all_firsts) and np.bincount(members).max() == 1:  # each row has one run
        return _Members(members, sizes, firsts, pages, 0, members, ends)
    begins = firsts.repeat(sizes)
    ends += begins
    order = ((members << 32) + begins).argsort(kind="stable")  # the runs of a row one after the other
    own, ends = members[order], ends[order]
    follows, before = np.zeros(len(own), np.int64), np.zeros(len(own), np.int64)
    follows[1:] = own[1:] == own[:-1]
    before[1:] = ends[:-1]
    wrong = begins[order] != before * follows
    if wrong.any():
        raise ValueError(
            f"the shared runs of row {own[wrong.argmax()]} must follow one another from page 0, each with the row once"
        )
    depths, deeper = follows.copy(), follows
    for _ in range(CASCADE_LEVELS - 1):
        deeper[1:] = deeper[1:] * deeper[:-1]
        depths += deeper
    if depths.max() >= CASCADE_LEVELS:
        raise ValueError(f"a row may be in at most {CASCADE_LEVELS} shared runs; row {own[depths.argmax()]} is in more")
    levels = np.empty(len(own), np.int64)
    levels[order] = depths
    return _Members(members, sizes, firsts, pages, levels, own, ends)


def _splits(units: NDArray[Any], counts: NDArray[Any], programs: int, max_items: int, max_parts: int) -> NDArray[Any]:
    """Return into how many pieces each tile's keys are cut, which are ``units`` long."""
    # Pieces are at most so long, of several lengths, that it probably takes the least time. If each program has one,
    # that is the time of the longest. If they take more in turn, they end about half a piece apart.
    total = int(units.sum())
    each = -(-units // -(-total // programs))
    if int(each.sum()) <= min(programs, max_items) and int(each @ counts) <= max_parts:
        return each  # one piece of the same length for each program: nothing takes less time
    even = total / programs
    sizes = np.ceil(np.minimum(even * LENGTHS, units.max()))  # the last one leaves all tiles whole
    splits = np.ceil(units / sizes[:, None])  # of floats, which divide several times as fast
    pieces = splits.sum(1)
    turns = np.ceil(pieces / programs)
    times = np.where(turns == 1, sizes, even + sizes / 2) + turns * ITEM_UNITS
    if pieces[0] > max_items or splits[0] @ counts > max_parts:  # the shortest pieces are the most
        times[(pieces > max_items) | (splits @ counts > max_parts)] = np.inf
        times[-1] = min(times[-1], 2.0**60)  # has room in any case
    best: NDArray[Any] = splits[times.argmin()].astype(np.int64)
    return best


def _in_turn(keys: NDArray[Any], programs: int) -> NDArray[Any]:
    """Return an order of items in which programs that take them in turn get about as many keys each."""
    # Long ones come first, and who has a long one of a round takes a short one of the next.
    order = (-keys).argsort(kind="stable")
    # The last round may have no item for the last programs, so these have the long ones of the round before.
    for end in range((len(order) - 1) // programs * programs, 0, -2 * programs):
        order[end - programs : end] = order[end - programs : end][::-1].copy()
    return order


def _that_fit(runs: Sequence[SharedRun], tile: int, max_items: int, max_parts: int) -> list[SharedRun]:
    """Return the runs without those that save the fewest keys, so that one piece of each tile has room."""
    # A run is left out only after all that follow it, or these would not follow one another from page 0.
    of_row: dict[int, list[int]] = {}
    for number in sorted(range(len(runs)), key=lambda number: runs[number].first_page):
        for row in runs[number].rows:
            of_row.setdefault(row, []).append(number)
    before: list[set[int]] = [set() for _ in runs]
    followers = [0] * len(runs)
    for own in of_row.values():
        for first, second in pairwise(own):
            if first not in before[second]:
                before[second].add(first)
                followers[first] += 1
    tiles = [-(-len(run.rows) // tile) for run in runs]
    saved = [(len(run.rows) - count) * run.pages for run, count in zip(runs, tiles, strict=True)]
    items, parts = sum(tiles), sum(len(run.rows) for run in runs)
    last = [(saved[number], number) for number in range(len(runs)) if not followers[number]]
    heapq.heapify(last)
    kept = set(range(len(runs)))
    while items > max_items or parts > max_parts:
        _, number = heapq.heappop(last)
        kept.remove(number)
        items -= tiles[number]
        parts -= len(runs[number].rows)
        for earlier in before[number]:
            followers[earlier] -= 1
            if not followers[earlier]:
                heapq.heappush(last, (saved[earlier], earlier))
    return [runs[number] for number in sorted(kept)]
