"""Finds pages with the beginnings of sequences that may come again: a radix tree over whole pages, on the host."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiled_llm.kvcache.pool import PagePool

# The page before a page; of a first one the salt, in a tuple so that it never equals a page's number.
_Above = int | tuple[Hashable]
# The key of a page: the node above it, and the ids of its tokens. A plain tuple, which the garbage collector
# passes over.
_Node = tuple[_Above, bytes]


class PrefixTree:
    """The pages of prompts and answers, kept after their rows have ended, until other rows need them.

    The tree is one owner of each of its pages. No row writes into them: rows copy a shared page before they do.
    When the pool runs out, the least recently used pages go first, those at the ends of sequences before
    those they continue.

    Any thread may call; the pool's lock is held. A finalizer may not: it may run in the middle of another call.

    Attributes:
        generation: how often it was cleared. After new weights, pages that rows had computed with the old ones must not
            be inserted: a caller remembers in which generation its row began.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.generation = 0
        # The least recently used first, and each node before those above it, so the first one is always a leaf.
        # Each has one page of each group of layers. A node needs no list of its children: they are found by its first
        # page, which no other node has.
        self._pages: OrderedDict[_Node, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def match(self, ids: NDArray[np.int64], salt: Hashable = None) -> list[int]:
        """Return the pages that hold the beginning of a prompt, as many as there are; the caller owns them as well.

        At least one token is left to compute. Pages that only the tree owns are left out as far as they are promised
        to other rows.

        Args:
            ids: ``[L]`` token ids.
            salt: pages that were inserted with another salt are not found.
        """
        texts = self._texts(ids[:-1])
        with self._pool.lock:
            nodes, pages = self._walk(texts, salt)
            matched = self._pool.share_cached(pages)
            self._touch(nodes[: matched // self._pool.groups])
        return pages[:matched]

    def insert(self, ids: NDArray[np.int64], pages: Sequence[int], salt: Hashable = None) -> None:
        """Keep a row's full pages. Where the tree has equal ones, it keeps those, and the row its own.

        The pages' keys and values have to be computed, or queued on the device before anything that will read them.

        Args:
            ids: ``[L]`` ids of the tokens that the row holds, or of the first of them.
            pages: the row's pages; those beyond the last one that ``ids`` fill are left out.
            salt: ``match`` finds them with the same one alone.

        Raises:
            ValueError: there are more tokens than fit the pages, a page has no owner or is in the tree with other
                tokens before it, or another tree holds pages of the pool; nothing has changed.
        """
        if self._pool.states is not None:  # pages are of no use to a row that lacks the state after them
            return
        texts, groups = self._texts(ids), self._pool.groups
        if len(pages) < len(texts) * groups:
            raise ValueError(f"insert: {len(ids)} tokens fill {len(texts) * groups} pages; got {len(pages)}")
        with self._pool.lock:
            nodes, there = self._walk(texts, salt)
            self._pool.cache(pages[len(there) : len(texts) * groups], self)
            above: _Above = there[-groups] if there else (salt,)
            for number in range(len(nodes), len(texts)):
                nodes.append((above, texts[number]))
                self._pages[nodes[-1]] = own = tuple(pages[number * groups : (number + 1) * groups])
                above = own[0]
            self._touch(nodes)

    def forget_oldest(self) -> Sequence[int]:
        """Remove the least recently used leaf and return its pages, which the tree may not use any more."""
        return self._pages.popitem(last=False)[1]

    def clear(self) -> None:
        """Remove all pages; those that no row holds are free again."""
        with self._pool.lock:
            pages = list(chain.from_iterable(self._pages.values()))
            self._pages.clear()
            self.generation += 1
            self._pool.uncache(pages)

    def _texts(self, ids: NDArray[np.int64]) -> list[bytes]:
        size = self._pool.page_size
        whole = np.ascontiguousarray(ids[: len(ids) // size * size], dtype=np.int64)
        texts: list[Any] = whole.view(f"V{size * whole.itemsize}").tolist()
        return texts

    def _walk(self, texts: Sequence[bytes], salt: Hashable) -> tuple[list[_Node], list[int]]:
        """Return the nodes of the longest known beginning of ``texts``, and their pages."""
        nodes: list[_Node] = []
        pages: list[int] = []
        above: _Above = (salt,)
        for tokens in texts:
            node = (above, tokens)
            own = self._pages.get(node)
            if own is None:
                break
            nodes.append(node)
            pages += own
            above = own[0]
        return nodes, pages

    def _touch(self, nodes: Sequence[_Node]) -> None:
        for node in reversed(nodes):
            self._pages.move_to_end(node)
