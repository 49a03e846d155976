"""Finds pages with the beginnings of sequences that may come again: a radix tree over whole pages, on the host."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compiled_llm.kinds.rows import NO_ENTRY
from compiled_llm.kvcache.pool import PagePool, StatePool
from compiled_llm.kvcache.state_pool import owned

# The page before a page; of a first one the salt, in a tuple so that it never equals a page's number.
_Above = int | tuple[Hashable]
# The key of a page: the node above it, and the ids of its tokens. A plain tuple, which the garbage collector
# passes over. Of an end within a page, there are fewer ids.
_Node = tuple[_Above, bytes]

_PAGES_OF_A_CUT = 4
"""Others that begin alike have to save as many to be worth the launch that ends where they part, and a state."""


_BYTES_OF_AN_ID = np.dtype(np.int64).itemsize


class PrefixMatch(NamedTuple):
    """The longest beginning of a prompt that a row can take over, and what is known of it beyond."""

    pages: list[int]  # that hold it; their taker owns them. The last one may be full in part
    # the entry of the state after it, which its taker owns; ``NO_ENTRY`` if rows have none, and if nothing was
    # found
    state: int = NO_ENTRY
    # after how many tokens of the prompt the tree lacks a state that others could begin with
    checkpoints: tuple[int, ...] = ()
    tokens: int = 0  # how many it has


class PrefixTree:
    """The pages of prompts and answers, kept after their rows have ended, until other rows need them."""

    # The tree is one owner of each of its pages. No row writes into them: rows copy a shared page before they do. When
    # the pool runs out, the least recently used pages go first, those at the ends of sequences before those they
    # continue.
    # Where rows have states, one can begin only where the tree has the state after its pages, too. The tree
    # is one owner of the entries of such states, which no row writes either. They go with their pages, or before them
    # if entries run out, the least recently used first. A state may be that after tokens which end within a page, such
    # as those of an answer: then the tree keeps that page as well, as a leaf, and no longer than the state.
    # Any thread may call; the pool's lock is held. A finalizer may not: it may run in the middle of another call.

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        # how often it was cleared. After new weights, pages that rows had computed with the old ones must not be
        # inserted: a caller remembers in which generation its row began
        self.generation = 0
        self.cleared: list[Callable[[], None]] = []  # what else is kept of texts, and is forgotten with them
        # The least recently used first, and each node before those above it, so the first one is always a leaf.
        # A node needs no list of its children: they are found by its page, which no other node has.
        self._pages: OrderedDict[_Node, int] = OrderedDict()
        self._nodes: dict[_Above, _Node] = {}  # by their pages
        self._states: OrderedDict[_Node, int] = OrderedDict()  # the least recently used first
        self._ends: dict[_Above, list[_Node]] = {}  # those within a page, by what is above them
        self._notes: dict[_Node, object] = {}

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def page_size(self) -> int:
        return self._pool.page_size

    def match(self, ids: NDArray[np.int64], salt: Hashable = None) -> PrefixMatch:
        """Return the pages that hold the beginning of a prompt's ids ``[L]``, under a salt, now the caller's, too."""
        # At least one token is left to compute. Pages that only the tree owns are left out as far as they are promised
        # to other rows. Where rows have states, they end where the tree has a state.
        texts = self._texts(ids[:-1])
        with self._pool.lock:
            nodes, pages = self._walk(texts, salt)
            if self._pool.states is None:
                matched = self._pool.share_cached(pages)
                self._touch(nodes[:matched])
                return PrefixMatch(pages[:matched], tokens=self._pool.tokens_in(matched))
            path, state = self._share_with_state(self._path(ids[:-1], nodes, salt))
            self._touch(path)
            match = PrefixMatch(self._pages_of(path), state, tokens=self._length(path))
        return self._with_checkpoints(match, pages, len(texts))

    @property
    def least_saving(self) -> int:
        """Tokens that a state has to save others, to be worth a launch that ends there."""
        return _PAGES_OF_A_CUT * self._pool.page_size

    def known(self, ids: NDArray[np.int64], salt: Hashable = None) -> int:
        """Return the length of the longest beginning of ``ids`` after which the tree has a state; it takes nothing."""
        with self._pool.lock:
            nodes, _ = self._walk(self._texts(ids), salt)
            return self._length(self._path(ids, nodes, salt))

    def _with_checkpoints(self, match: PrefixMatch, known: Sequence[int], most: int) -> PrefixMatch:
        """Add a prompt's checkpoints: where it parts from ``known`` pages, and where it ends, of ``most`` pages."""
        size = self._pool.page_size
        at, checkpoints = match.tokens // size, list[int]()
        for border in (len(known), most):
            if border - at >= _PAGES_OF_A_CUT:
                checkpoints.append(border * size)
                at = border
        return match._replace(checkpoints=tuple(checkpoints))

    def _path(self, ids: NDArray[np.int64], nodes: Sequence[_Node], salt: Hashable) -> list[_Node]:
        """Return the nodes to the last state within a text, which may be an end within a page behind the ``nodes``."""
        depth, size = self._depth(nodes), self._pool.page_size
        for full in range(len(nodes), depth - 1, -1):
            above: _Above = self._pages[nodes[full - 1]] if full else (salt,)
            if above in self._ends:
                text = _in_bytes(ids[full * size : (full + 1) * size])
                if ends := [node for node in self._ends[above] if text.startswith(node[1])]:
                    return [*nodes[:full], max(ends, key=lambda node: len(node[1]))]
        return list(nodes[:depth])

    def _depth(self, nodes: Sequence[_Node]) -> int:
        """Return after how many of ``nodes`` the last state is."""
        return next((depth for depth in range(len(nodes), 0, -1) if nodes[depth - 1] in self._states), 0)

    def _length(self, path: Sequence[_Node]) -> int:
        """Return how many tokens the pages of a path hold."""
        return sum(len(text) for _, text in path) // _BYTES_OF_AN_ID

    def _pages_of(self, path: Sequence[_Node]) -> list[int]:
        return [self._pages[node] for node in path]

    def _share_with_state(self, path: list[_Node]) -> tuple[list[_Node], int]:
        """Return as much of a path as ends with a state, and its entry; the caller owns it and the pages as well."""
        states, pages = self._pool.states, self._pages_of(path)
        assert states is not None, "rows have states"
        shared = self._pool.share_cached(pages)
        depth = self._depth(path[:shared])
        if depth and not states.share_cached([self._states[path[depth - 1]]]):
            depth = 0
        self._pool.give_back(pages[depth:shared])
        if not depth:
            return [], NO_ENTRY
        self._states.move_to_end(path[depth - 1])
        return path[:depth], self._states[path[depth - 1]]

    def give_back(self, match: PrefixMatch) -> None:
        """Give back what ``match`` has found, if no row begins with it."""
        self._pool.give_back(match.pages)
        if self._pool.states is not None:
            self._pool.states.give_back(owned(match.state))

    def insert(
        self, ids: NDArray[np.int64], pages: Sequence[int], salt: Hashable = None, state: int = NO_ENTRY
    ) -> None:
        """Keep a row's full pages. Where the tree has equal ones, it keeps those, and the row its own.

        The pages' keys and values have to be computed, or queued on the device before anything that will read them.

        Args:
            ids: ``[L]`` ids of the tokens that the row holds, or of the first of them; without a state, pages beyond
                the last one that they fill are left out.
            salt: ``match`` finds them with the same one alone.
            state: the entry of the state after ``ids``. The tree owns it in the caller's place; it is given back if the
                tree has one there. A page that ``ids`` do not fill is kept with it: its row goes on no more, and has
                not been forked.

        Raises:
            ValueError: there are more tokens than fit the pages, a page has no owner or is in the tree with other
                tokens before it, or another tree holds pages of the pool; or there are no tokens before ``state``, or
                it is in the tree after others; nothing has changed.
        """
        texts, size = self._texts(ids), self._pool.page_size
        if state != NO_ENTRY:
            if not len(ids):
                raise ValueError("insert: a state after no tokens")
            if len(ids) % size:
                texts.append(_in_bytes(ids[len(texts) * size :]))
        if len(pages) < len(texts):
            raise ValueError(f"insert: {len(ids)} tokens take {len(texts)} pages; got {len(pages)}")
        with self._pool.lock:
            nodes, there = self._walk(texts, salt)
            has_state = len(nodes) == len(texts) > 0 and nodes[-1] in self._states
            if state != NO_ENTRY and not has_state:
                self._checked_states().check(state, self)
            self._pool.cache(pages[len(there) : len(texts)], self)
            above: _Above = there[-1] if there else (salt,)
            for text, page in zip(texts[len(nodes) :], pages[len(nodes) :], strict=False):
                nodes.append((above, text))
                self._pages[nodes[-1]], self._nodes[page] = page, nodes[-1]
                if self._is_end(nodes[-1]):
                    self._ends.setdefault(above, []).append(nodes[-1])
                above = page
            self._touch(nodes)
            if state != NO_ENTRY:
                self._keep_state(nodes[-1], state)

    def note(self, ids: NDArray[np.int64], note: Callable[[int, object], object], salt: Hashable = None) -> None:
        """Keep what ``note`` returns, of a page's number and note, with each page of the longest known beginning."""
        texts = self._texts(ids)
        with self._pool.lock:
            nodes, _ = self._walk(texts, salt)
            for page, node in enumerate(nodes):
                self._notes[node] = note(page, self._notes.get(node))

    def notes(self, ids: NDArray[np.int64], salt: Hashable = None) -> list[object]:
        """Return the notes of the longest known beginning's pages, None for those that lack one; takes no page."""
        with self._pool.lock:
            nodes, _ = self._walk(self._texts(ids), salt)
            return [self._notes.get(node) for node in nodes]

    def _is_end(self, node: _Node) -> bool:
        """Whether a node ends within a page."""
        return len(node[1]) < self._pool.page_size * _BYTES_OF_AN_ID

    def _keep_state(self, node: _Node, state: int) -> None:
        states = self._checked_states()
        if node in self._states:
            states.give_back([state])
        else:
            states.cache(state, self)
            self._states[node] = state
        self._states.move_to_end(node)

    def _checked_states(self) -> StatePool:
        if self._pool.states is None:
            raise ValueError("insert: a state is given, and rows have none")
        return self._pool.states

    def forget_oldest(self) -> int:
        """Remove the least recently used leaf and return its page, which the tree may not use any more."""
        self._keep_shared()
        node = next(iter(self._pages))
        if (state := self._states.pop(node, None)) is not None:
            self._checked_states().uncache([state])
        return self._pop(node)

    def _keep_shared(self) -> None:
        """Count beginnings that rows share as used, up to the oldest leaf that is none."""
        # To forget one frees no page, and the next row would compute it again.
        moved = 0
        while moved < len(self._pages):  # above a leaf that rows share there may be a page that none has
            node, page = next(iter(self._pages.items()))
            if not self._pool.has_several_rows(page):
                return
            path = [node]
            while (above := path[-1][0]) in self._nodes:
                path.append(self._nodes[above])
            self._touch(path[::-1])
            moved += len(path)

    def _pop(self, node: _Node) -> int:
        if self._is_end(node):
            self._ends[node[0]].remove(node)
            if not self._ends[node[0]]:
                del self._ends[node[0]]
        self._notes.pop(node, None)
        page = self._pages.pop(node)
        del self._nodes[page]
        return page

    def forget_state(self) -> int:
        """Remove the least recently used state that no row owns; return its entry, which the tree gives up."""
        # Its pages stay, since others may go on from there; but for one that it is within.
        states = self._checked_states()
        node = next(node for node, state in self._states.items() if states.is_cached(state))
        if self._is_end(node):
            self._pool.uncache([self._pop(node)])
        return self._states.pop(node)

    def clear(self) -> None:
        """Remove all pages and states; those that no row holds are free again."""
        with self._pool.lock:
            if self._states:
                self._checked_states().uncache(self._states.values())
            self._states.clear()
            self._ends.clear()
            self._notes.clear()
            pages = list(self._pages.values())
            self._pages.clear()
            self._nodes.clear()
            self.generation += 1
            self._pool.uncache(pages)
            for clear in self.cleared:
                clear()

    def _texts(self, ids: NDArray[np.int64]) -> list[bytes]:
        size = self._pool.page_size
        whole = np.ascontiguousarray(ids[: len(ids) // size * size], dtype=np.int64)
        texts: list[Any] = whole.view(f"V{size * _BYTES_OF_AN_ID}").tolist()
        return texts

    def _walk(self, texts: Sequence[bytes], salt: Hashable) -> tuple[list[_Node], list[int]]:
        """Return the nodes of the longest known beginning of ``texts``, and their pages."""
        nodes: list[_Node] = []
        pages: list[int] = []
        above: _Above = (salt,)
        for tokens in texts:
            node = (above, tokens)
            page = self._pages.get(node)
            if page is None:
                break
            nodes.append(node)
            pages.append(page)
            above = page
        return nodes, pages

    def _touch(self, nodes: Sequence[_Node]) -> None:
        for node in reversed(nodes):
            self._pages.move_to_end(node)


def _in_bytes(ids: NDArray[np.int64]) -> bytes:
    return np.ascontiguousarray(ids, dtype=np.int64).tobytes()
