"""Finds the rows of a decode batch that begin with the same pages, on the host: attention reads those once for all."""

# Equal page numbers alone count. That two rows have the same page at one position says nothing about the pages before
# it: where a prefix tree has pages of equal tokens, a row keeps its own and hangs its later pages below those of the
# tree. So a row's numbers are compared from the first one on, but as bytes, and only when the row is new.
# Shapes: B rows, S page size.

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from itertools import compress
from operator import is_not, itemgetter, le
from typing import NamedTuple, Protocol

from compiled_llm_ops.attention.cascade.contract import CASCADE_LEVELS
from compiled_llm_ops.attention.cascade.tables import SharedRun

_BY_PAGE = itemgetter(1, 0)  # the first page of a run, then its rows

_WIDTH = array("i").itemsize
"""Bytes of a page number."""

_EXACT = 32
"""Up to so many different beginnings the best runs are found, which takes time with the square of nested ones."""


class Paged(Protocol):
    """The fields of a row that grouping needs, as those of a ``Row``; rows share pages that are full for certain."""

    pages: list[int]
    length_at_most: int
    page_period: object


class _Search(NamedTuple):
    """The arguments of a search for the best runs below a node, which keeps its results by them."""

    exact: bool  # whether all beginnings may end a run
    levels: int  # how many runs a row may still be in
    start: int  # the page from which the rows lack a run


class _Plan(NamedTuple):
    """The best runs below a node: how much they save, where each ends, and the page where it begins."""

    saved: int
    runs: Sequence[tuple[_Node, int]]


class _Node:
    """A beginning of rows, in a radix tree over whole pages.

    A node that one row alone has goes on as that row does: how far it reaches is brought up to date when another row
    gets there, so that a row that only grows changes nothing here.

    Attributes:
        label: the page numbers that it adds to ``above``, int32.
        end: how many pages it has from a row's first one on.
        shortest: the least length of a row that ends here.
        members: periods of the rows that begin so; in the order of their coming, which is mostly that of the batch.
        plans: the best runs for its members, as far as they were asked for.
        candidates: longer beginnings at which runs may end, when not all may; None until they are asked for.
    """

    __slots__ = (*("above", "below", "candidates", "end", "ends", "label", "members", "plans", "shared", "shortest"),)

    def __init__(self, above: _Node | None) -> None:
        self.above = above
        self.label = b""
        self.end = self.shortest = 0
        self.below: dict[bytes, _Node] = {}
        self.shared: dict[bytes, _Node] = {}
        self.members: dict[object, None] = {}
        self.ends: set[object] = set()
        self.plans: dict[_Search, _Plan] = {}
        self.candidates: list[_Node] | None = None


class SharedRuns:
    """The runs of pages that rows of one batch share, kept from step to step: only rows that are new are compared."""

    # A row is in up to three runs, which follow each other from its page 0 on: all its rows share the first, fewer the
    # second. The page of its newest token is in none, nor are those behind it, since the row writes there. Of all such
    # runs these save the most reads of pages, (rows - 1) * pages summed up, where a batch has up to 32 different
    # beginnings. With more of them those are left out whose rows are at most halved (less one) by a longer one; that
    # costs half of the savings at the very most if ``least_pages`` and ``least_saved`` are 1, and nothing where runs
    # are not nested.
    # The answer follows from the rows' present page numbers and lengths alone. No row is kept alive.

    def __init__(self, page_size: int, least_pages: int = 1, least_saved: int = 1) -> None:
        """Leave out runs of fewer pages than ``least_pages``, and those that save fewer reads than ``least_saved``."""
        # whether the last answer also holds after any growth of the same rows, as long as their ``page_period`` stay
        # the same and their lengths do not fall
        self.steady = True
        self._page_size = page_size
        self._least_pages, self._least_saved = least_pages, max(1, least_saved)
        self._forget()

    def _forget(self) -> None:
        self._empty = _Node(None)
        self._beginnings = 0  # nodes below the empty one
        self._nodes: dict[object, _Node] = {}  # where each row ends
        self._stops: dict[_Node, None] = {}  # in which a row ends whose growth might lengthen a run
        self._periods: list[object] = []
        self._index: dict[object, int] = {}
        self._shortest: list[int] = []  # lengths from which on the nodes hold
        self._longest: list[tuple[int, int]] = []  # and up to which, of those rows
        self._runs: tuple[SharedRun, ...] = ()

    def runs(self, rows: Sequence[Paged]) -> tuple[SharedRun, ...]:
        """Return the runs of B different rows, ordered by first page and row; the same object while nothing changes."""
        # The rows are already grown by the token that they are about to feed in.
        periods = [row.page_period for row in rows]
        lengths = [row.length_at_most for row in rows]
        if periods == self._periods and self._hold(lengths):
            return self._runs
        try:
            self._exchange(rows, periods)
            self._move(rows, lengths)
            self._runs = self._list_runs()
        except BaseException:  # an interrupt, say: what was changed by half is no answer
            self._forget()
            raise
        return self._runs

    # ---- rows come, go, and grow

    def _exchange(self, rows: Sequence[Paged], periods: list[object]) -> None:
        before, self._periods = self._periods, periods
        self._index = dict(zip(periods, range(len(periods)), strict=True))
        kept, end = _same_ends(before, periods)
        for period in before[kept : len(before) - end]:
            if period not in self._index:
                self._remove(period)
        for period in periods[kept : len(periods) - end]:
            if period not in self._nodes:
                self._add(rows, period, self._empty)

    def _move(self, rows: Sequence[Paged], lengths: list[int]) -> None:
        """Let each row end where its pages do now, as far as that matters."""
        self._note_bounds()
        if self._hold(lengths):
            return
        moved = [at for at, shortest in enumerate(self._shortest) if lengths[at] < shortest]
        grown = [at for at, longest in self._longest if lengths[at] > longest]
        for at in moved:
            self._remove(self._periods[at])
            self._add(rows, self._periods[at], self._empty)
        for at in grown:
            self._lengthen(rows, self._periods[at])
        self._note_bounds()

    def _hold(self, lengths: list[int]) -> bool:
        """Whether the nodes are right for rows of the same periods, of these lengths."""
        return all(map(le, self._shortest, lengths)) and all(lengths[at] <= longest for at, longest in self._longest)

    def _note_bounds(self) -> None:
        nodes, size, at = self._nodes, self._page_size, self._index
        self._shortest = [nodes[period].shortest for period in self._periods]
        self._longest = [(at[period], (node.end + 1) * size) for node in self._stops for period in node.ends]
        self.steady = not self._longest

    def _numbers(self, row: Paged, start: int) -> bytes:
        """Return the numbers of the pages from ``start`` on that the row does not write into."""
        end = max(0, row.length_at_most - 1) // self._page_size
        return array("i", row.pages[start:end]).tobytes()

    def _add(self, rows: Sequence[Paged], period: object, node: _Node) -> None:
        """Let a row, which begins with ``node``, end where its pages do."""
        text = self._numbers(rows[self._index[period]], node.end)
        while text:
            child = node.below.get(text[:_WIDTH])
            if child is None:
                child, same = self._hang(node, text), len(text)
            else:
                same = self._common(rows, child, text)
                if same < len(child.label):
                    child = self._split(child, same)
            node, text = child, text[same:]
        node.ends.add(period)
        self._nodes[period] = node
        above: _Node | None = node
        while above is not None:
            above.members[period] = None
            above = self._has_changed(above)

    def _remove(self, period: object) -> None:
        node = self._nodes.pop(period)
        node.ends.remove(period)
        above: _Node | None = node
        while above is not None:
            del above.members[period]
            above = self._has_changed(above)
        self._tidy(node)

    def _has_changed(self, node: _Node) -> _Node | None:
        """Note that a node has other members; return the node above."""
        node.plans.clear()
        node.candidates = None
        above, several = node.above, len(node.members) > 1
        if above is not None:
            self._enlist(above, node)
        # A row with a node of its own has a page there that no other row has: its growth cannot lengthen a run.
        if node.ends and (several or above is None):
            self._stops[node] = None
        else:
            self._stops.pop(node, None)
        return above

    def _enlist(self, above: _Node, node: _Node) -> None:
        key = node.label[:_WIDTH]
        above.below[key] = node
        if len(node.members) > 1:
            above.shared[key] = node
        else:
            above.shared.pop(key, None)

    def _lengthen(self, rows: Sequence[Paged], period: object) -> None:
        """Let a row end at a later page, after the same ones."""
        node = self._nodes[period]
        node.ends.remove(period)
        self._add(rows, period, node)
        self._tidy(node)

    # ---- the radix tree

    def _hang(self, above: _Node, label: bytes) -> _Node:
        node = _Node(above)
        node.end = above.end
        self._append(node, label)
        above.below[label[:_WIDTH]] = node
        self._beginnings += 1
        return node

    def _append(self, node: _Node, label: bytes) -> None:
        node.label += label
        node.end += len(label) // _WIDTH
        node.shortest = node.end * self._page_size + 1

    def _split(self, node: _Node, at: int) -> _Node:
        """Return a new node that has the first ``at`` bytes of another's label, above that one."""
        above, label = node.above, node.label
        assert above is not None, "the empty beginning has nothing to split"
        upper = self._hang(above, label[:at])
        upper.members = dict(node.members)
        node.above, node.label = upper, label[at:]
        self._enlist(upper, node)
        return upper

    def _tidy(self, node: _Node) -> None:
        """Remove a node in which no row ends and no two part."""
        above = node.above
        if above is None or node.ends or len(node.below) > 1:
            return
        self._beginnings -= 1
        self._stops.pop(node, None)
        if not node.below:
            key = node.label[:_WIDTH]
            del above.below[key]
            above.shared.pop(key, None)
            self._tidy(above)
            return
        (child,) = node.below.values()
        child.above, child.label = above, node.label + child.label
        self._enlist(above, child)

    def _common(self, rows: Sequence[Paged], node: _Node, text: bytes) -> int:
        """Return how many bytes ``text`` has in common with the node's label, in whole pages."""
        same = _common(node.label, text)
        if same == len(node.label) and len(node.members) == 1:
            (period,) = node.ends
            more = self._numbers(rows[self._index[period]], node.end)
            self._append(node, more)
            same = _common(node.label, text)
        return same

    # ---- the best runs

    def _list_runs(self) -> tuple[SharedRun, ...]:
        shared = self._beginnings - (len(self._periods) - len(self._longest))  # the others have a node of their own
        plan = self._plan(self._empty, _Search(shared <= _EXACT, CASCADE_LEVELS, 0))
        at = self._index.__getitem__
        runs = [SharedRun(tuple(sorted(map(at, node.members))), start, node.end - start) for node, start in plan.runs]
        runs.sort(key=_BY_PAGE)
        return tuple(runs)

    def _plan(self, node: _Node, search: _Search) -> _Plan:
        """Find the best runs of the members' pages from a page on."""
        candidates = _candidates(node, search.exact)
        below = self._plan_all(candidates, search)
        saved = sum([plan.saved for plan in below])
        pages, runs = node.end - search.start, []
        own = (len(node.members) - 1) * pages
        if own >= self._least_saved and pages >= self._least_pages:
            further: list[_Plan] = []
            if search.levels > 1:
                next_level = _Search(search.exact, search.levels - 1, node.end)
                further = self._plan_all(candidates, next_level)
                own += sum([plan.saved for plan in further])
            if own > saved:
                saved, below, runs = own, further, [(node, search.start)]
        for plan in below:
            runs += plan.runs
        plan = node.plans[search] = _Plan(saved, runs)
        return plan

    def _plan_all(self, nodes: Collection[_Node], search: _Search) -> list[_Plan]:
        return [node.plans.get(search) or self._plan(node, search) for node in nodes]


def _candidates(node: _Node, exact: bool) -> Collection[_Node]:
    """Return the longer beginnings, next to this one, at which runs may end."""
    if exact:
        return node.shared.values()
    if node.candidates is None:
        node.candidates = _far_apart(node)
    return node.candidates


def _far_apart(node: _Node) -> list[_Node]:
    """Return the longer shared beginnings, without those of which at least half of the rows go on together."""
    # Two longer ones cannot both keep half of the rows, so what is left out are the upper parts of single chains.
    found, left = [], [*node.shared.values()]
    while left:
        child = left.pop()
        if any(_magnitude(other) == _magnitude(child) for other in child.shared.values()):
            left += child.shared.values()
        else:
            found.append(child)
    return found


def _magnitude(node: _Node) -> int:
    return (len(node.members) - 1).bit_length()


def _common(one: bytes, other: bytes) -> int:
    """Return how many bytes two texts have in common, in whole page numbers; slices are compared, not bytes."""
    same, differs = 0, min(len(one), len(other)) // _WIDTH + 1
    middle = differs - 1
    while same < differs - 1:
        if one[same * _WIDTH : middle * _WIDTH] == other[same * _WIDTH : middle * _WIDTH]:
            same = middle
        else:
            differs = middle
        middle = (same + differs) // 2
    return same * _WIDTH


def _same_ends(one: list[object], other: list[object]) -> tuple[int, int]:
    """Return how many objects two lists have in common at their beginnings, and then at their ends."""
    short = min(len(one), len(other))
    first = next(compress(range(short), map(is_not, one, other)), short)
    differ = map(is_not, reversed(one), reversed(other))
    return first, next(compress(range(short - first), differ), short - first)
