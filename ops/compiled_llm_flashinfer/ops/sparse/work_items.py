"""The tables of block-sparse attention, made on the host when blocks change."""

# They divide the queries of each row of blocks into tiles, and the keys of long rows into shares where there are fewer
# tiles than programs. Their sizes are fixed, so a captured launch follows the tables of the next blocks.
# Shapes: M queries, N keys, R queries of a block, C keys of a block, MB = M / R rows and NB columns of blocks, X blocks
# or pieces, H query heads, K kv heads, D head dimension, W work items.

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from compiled_llm_flashinfer.ops.contracts import SPARSE_PIECE, SparseItem

MIN_SHARE = 256  # keys of a share, at least, of a row of blocks that several programs read

MAX_SHARES = 64  # programs that share a row at most: the last of them reads the results of all

PROGRAMS = 4  # programs of a multiprocessor that rows are shared for

Int32s = NDArray[np.int32]


class VariableTables(NamedTuple):
    """Arguments of ``variable_block_sparse_attention`` of the same names, on the host; all int32.

    Attributes:
        work_items: ``[W, 8]``, unused ones at the end.
        pieces: ``[X, 2]``, the first key of each piece and how many they are, unused ones at the end.
    """

    work_items: Int32s
    pieces: Int32s


class _Tiles(NamedTuple):
    """Queries that read the same keys, as columns: the first five fields of ``SparseItem``."""

    kv_heads: NDArray[np.int64]
    first_queries: NDArray[np.int64]
    queries: NDArray[np.int64]
    first_pieces: NDArray[np.int64]
    pieces: NDArray[np.int64]


def block_sparse_items(
    indptr: NDArray[np.integer],
    indices: NDArray[np.integer],
    queries: int,
    keys: int,
    block_rows: int,
    block_columns: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    processors: int,
    max_items: int,
    max_parts: int,
) -> Int32s:
    """Return ``work_items`` of ``block_sparse_attention``, ``[W, 8]``.

    If there is no room for the partial results of rows that are shared, fewer are.

    Args:
        indptr: ``[MB + 1]``, where each row of blocks begins in ``indices``.
        indices: ``[X]``, the columns of blocks.
        queries: M; ``keys``, ``block_rows`` and ``block_columns`` are N, R and C.
        heads: H; ``kv_heads`` and ``head_dim`` are K and D.
        processors: multiprocessors of the device.
        max_items: W.
        max_parts: the op's argument.

    Raises:
        ValueError: blocks do not divide queries or keys, ``indptr`` or ``indices`` are no such matrix, or there are
            more tiles of queries than items.
    """
    check_division(queries, keys, block_rows, block_columns)
    rows, columns = queries // block_rows, keys // block_columns
    ends = indptr.astype(np.int64)
    counts = np.diff(ends)
    if len(ends) != rows + 1 or ends[0] != 0 or (counts < 0).any() or ends[-1] > len(indices):
        raise ValueError(
            f"indptr must be [{rows + 1}], from 0 up to no more than the {len(indices)} indices; got {ends.tolist()}"
        )
    used = indices[: ends[-1]]
    if len(used) and (used.min() < 0 or used.max() >= columns):
        raise ValueError(f"indices must be columns of blocks, 0 to {columns - 1}; got {used.min()} to {used.max()}")
    tile_queries = _tile_queries(block_rows, heads, kv_heads, head_dim)
    tiles = -(-block_rows // tile_queries)
    row = np.arange(rows).repeat(tiles)
    first = np.tile(np.arange(tiles) * tile_queries, rows)
    made = _Tiles(
        np.zeros(len(row), np.int64),
        row * block_rows + first,
        np.minimum(block_rows - first, tile_queries),
        ends[:-1][row],
        counts[row],
    )
    return _items(made, block_columns, max(1, PROGRAMS * processors // kv_heads), max_items, max_parts)


def variable_block_sparse_tables(
    block_mask_map: NDArray[np.bool_],
    block_row_sz: NDArray[np.integer],
    block_col_sz: NDArray[np.integer],
    heads: int,
    head_dim: int,
    processors: int,
    max_items: int,
    max_parts: int,
    max_pieces: int,
) -> VariableTables:
    """Return the tables of ``variable_block_sparse_attention``; blocks next to each other are read as one.

    If there is no room for the partial results of rows that are shared, fewer are.

    Args:
        block_mask_map: ``[K, MB, NB]`` bool, whether a row of blocks reads a column.
        block_row_sz: ``[K, MB]``, queries of each row; of each kv head as many in all.
        block_col_sz: ``[K, NB]``, keys of each column; of each kv head as many in all.
        heads: H.
        head_dim: D.
        processors: multiprocessors of the device.
        max_items: W.
        max_parts: the op's argument.
        max_pieces: X.

    Raises:
        ValueError: sizes and map do not fit together, or there are more tiles of queries than items, or more pieces of
            keys than ``max_pieces``.
    """
    check_sizes(block_mask_map.shape, block_row_sz, block_col_sz)
    kv_heads, rows, _ = block_mask_map.shape
    pieces, counts = _pieces(block_mask_map, block_col_sz.astype(np.int64))
    if len(pieces) > max_pieces:
        raise ValueError(f"max_pieces={max_pieces} are too few for the {len(pieces)} pieces that these blocks make")
    tile_queries = _tile_queries(mean_rows(int(block_row_sz[0].sum()), rows), heads, kv_heads, head_dim)
    sizes = block_row_sz.astype(np.int64).reshape(-1)
    begins = np.cumsum(block_row_sz, 1, dtype=np.int64).reshape(-1) - sizes
    tiles = -(-sizes // tile_queries)
    row = np.arange(kv_heads * rows).repeat(tiles)
    first = (np.arange(len(row)) - (tiles.cumsum() - tiles)[row]) * tile_queries
    made = _Tiles(
        row // rows,
        begins[row] + first,
        np.minimum(sizes[row] - first, tile_queries),
        (counts.cumsum() - counts)[row],
        counts[row],
    )
    items = _items(made, SPARSE_PIECE, max(1, PROGRAMS * processors), max_items, max_parts)
    padded = np.zeros((max_pieces, 2), np.int32)
    padded[: len(pieces)] = pieces
    return VariableTables(items, padded)


def most_pieces(block_mask_map: NDArray[np.bool_], block_col_sz: NDArray[np.integer]) -> int:
    """Return a bound on the pieces that ``variable_block_sparse_tables`` makes of these blocks."""
    pieces = -(-block_col_sz.astype(np.int64) // SPARSE_PIECE)
    return int((block_mask_map * pieces[:, None]).sum())


def mean_rows(queries: int, rows: int) -> int:
    """Return how many queries a row of blocks has on average: it decides the tile, which a captured launch keeps."""
    return max(1, -(-queries // max(1, rows)))


def _tile_queries(block_rows: int, heads: int, kv_heads: int, head_dim: int) -> int:
    from compiled_llm_flashinfer.ops.kernels.sparse.block_sparse_tiling import sparse_tile

    return sparse_tile(block_rows, heads // kv_heads, head_dim).queries


def _pieces(mask: NDArray[np.bool_], sizes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the pieces ``[X, 2]`` of all rows, and how many each of the ``K * MB`` rows has."""
    kv_heads, rows, columns = mask.shape
    edges = np.zeros((kv_heads, rows, columns + 2), np.int8)
    edges[:, :, 1:-1] = mask
    steps = np.diff(edges, axis=2)
    (heads, in_head, first), (_, _, last) = (np.nonzero(steps == step) for step in (1, -1))
    offsets = np.zeros((kv_heads, columns + 1), np.int64)
    offsets[:, 1:] = sizes.cumsum(1)
    begins, lengths = offsets[heads, first], offsets[heads, last] - offsets[heads, first]
    counts = -(-lengths // SPARSE_PIECE)
    run = np.arange(len(counts)).repeat(counts)
    within = (np.arange(len(run)) - (counts.cumsum() - counts)[run]) * SPARSE_PIECE
    pieces = np.stack([begins[run] + within, np.minimum(lengths[run] - within, SPARSE_PIECE)], 1)
    of_row = (heads * rows + in_head)[run]
    return pieces, np.bincount(of_row, minlength=kv_heads * rows).astype(np.int64)


def _items(tiles: _Tiles, piece: int, programs: int, max_items: int, max_parts: int) -> Int32s:
    """Return the work items of tiles whose pieces have up to so many keys each, the longest first."""
    count = len(tiles.queries)
    if count > max_items:
        raise ValueError(f"max_items={max_items} are too few for the {count} tiles of queries that these blocks make")
    splits = _splits(tiles.pieces, piece, programs, max_items, max_parts)
    tile = np.arange(count).repeat(splits)
    part = np.arange(len(tile)) - (splits.cumsum() - splits)[tile]
    begin = part * tiles.pieces[tile] // splits[tile]
    end = (part + 1) * tiles.pieces[tile] // splits[tile]
    shared = np.where(splits > 1, splits, 0)
    columns = (  # the fields of SparseItem
        *(column[tile] for column in tiles[:3]),
        tiles.first_pieces[tile] + begin,
        end - begin,
        (shared.cumsum() - shared)[tile],
        part,
        splits[tile],
    )
    order = (begin - end).argsort(kind="stable")
    items = np.zeros((max_items, len(SparseItem._fields)), np.int32)
    items[: len(tile)] = np.stack(columns, 1)[order]
    return items


def _splits(pieces: NDArray[np.int64], piece: int, programs: int, max_items: int, max_parts: int) -> NDArray[np.int64]:
    """Return how many programs read the pieces of each tile: several only if there are fewer tiles than programs."""
    whole = np.ones(len(pieces), np.int64)
    if not len(pieces) or len(pieces) >= programs:
        return whole
    share = max(1, -(-MIN_SHARE // piece), -(-int(pieces.sum()) // programs))
    while True:
        splits = np.clip(-(-pieces // share), 1, MAX_SHARES)
        if int(splits.sum()) <= max_items and int(splits[splits > 1].sum()) <= max_parts:
            return splits
        share *= 2


def check_division(queries: int, keys: int, block_rows: int, block_columns: int) -> None:
    """Raise ValueError if blocks do not divide queries or keys."""
    if block_rows < 1 or block_columns < 1 or queries % block_rows or keys % block_columns:
        raise ValueError(
            f"blocks of R={block_rows} rows and C={block_columns} columns do not divide M={queries} queries and "
            f"N={keys} keys; pad them"
        )


def check_sizes(shape: tuple[int, ...], block_row_sz: NDArray[np.integer], block_col_sz: NDArray[np.integer]) -> None:
    """Raise ValueError if a map of this shape and the sizes of blocks do not fit together."""
    if len(shape) != 3 or block_row_sz.shape != shape[:2] or block_col_sz.shape != (shape[0], *shape[2:]):
        raise ValueError(
            f"block_mask_map must be [K, MB, NB], block_row_sz [K, MB] and block_col_sz [K, NB]; got {shape}, "
            f"{block_row_sz.shape} and {block_col_sz.shape}"
        )
    for name, sizes in (("block_row_sz", block_row_sz), ("block_col_sz", block_col_sz)):
        totals = sizes.sum(1)
        if sizes.size and (sizes.min() < 0 or (totals != totals[0]).any()):
            raise ValueError(f"{name} must be sizes with one sum for all kv heads; got sums {totals.tolist()}")
