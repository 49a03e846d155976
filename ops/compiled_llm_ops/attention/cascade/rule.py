"""Whether rows that share pages decode faster if these are read once."""

# Both ways take time for what they read: each row by itself reads the keys of its runs, of which many come from the
# cache that all multiprocessors share; tiles of up to 64 queries read them once each. Against what is saved stand two
# more launches, and the merge of each row's results.
# The constants were fitted to times on an H100, of 2 to 256 rows in 1 to 64 groups, which share 64 to 4,096 keys and
# have 32 to 512 of their own, with 8 kv heads of 128 and 2 or 4 query heads of each: 288 cases. The rule reads shared
# pages once in 84 of them, where attention is 1.03 to 7 times as fast. Over all cases it takes 2.7% longer than the
# faster way, mostly with few rows of short beginnings. ``tools/fit_tilings.py --only cascade-rule`` measures such cases
# again.

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from compiled_llm_ops.attention.cascade.tables import SharedRun, rows_of_a_tile

ROW_READ, TILE_READ = 3.5e-4, 8e-4
"""Microseconds for a key that a row reads, and for one that a tile reads, of 8 kv heads of 128 in 16 bits."""

MERGED_HEAD = 2e-3  # microseconds for a query head of 128 of each row, whose results are merged

LAUNCHES = 2.5  # microseconds for two more launches

_FITTED_KEY, _FITTED_HEAD = 8 * 128 * 2, 128
"""Bytes of a key over all kv heads, and the size of a head, with which the constants were fitted."""


class CascadeLayer(NamedTuple):
    """What the time of attention in a layer follows from.

    Attributes:
        query_heads: H.
        kv_heads: K.
        head_dim: D.
        itemsize: bytes of a number in the pages.
        windowed: whether queries see only the newest keys.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    windowed: bool


def cascade_saves(runs: Iterable[SharedRun], rows: int, page_size: int, layer: CascadeLayer) -> float:
    """Return how many microseconds a layer takes less if a step of ``rows`` rows reads these runs once."""
    # A layer with a window reads less and less of runs as its rows grow, so nothing is counted there but the costs.
    tile = rows_of_a_tile(layer.query_heads, layer.kv_heads)
    read = 0.0
    for members, _, pages in [] if layer.windowed else runs:
        tiles = -(-len(members) // tile)
        read += pages * page_size * (len(members) * ROW_READ - tiles * TILE_READ)
    key = layer.kv_heads * layer.head_dim * layer.itemsize / _FITTED_KEY
    merged = rows * layer.query_heads * layer.head_dim / _FITTED_HEAD * MERGED_HEAD
    return read * key - merged - LAUNCHES
