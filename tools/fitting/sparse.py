"""Blocks of keys that a sparse matrix lists: `kernels/sparse/block_sparse_tiling.py`.

How many queries a program has follows from the size of blocks; candidates differ in what a program reads at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from compiled_llm_flashinfer.ops.contracts import BlockSparseAttention
from compiled_llm_flashinfer.ops.kernels.sparse.block_sparse_tiling import SparseTile, sparse_tile
from compiled_llm_flashinfer.ops.sparse.work_items import block_sparse_items
from fitting.cases import HEAD_DIM, KV_HEADS, Case, Machine, case_of
from fitting.measuring import captured

HEADS, READ, SHARED = 32, 2048, 512
"""Query heads, keys that each row of blocks reads, and partial results that rows of blocks may have."""

MATRICES = 8
"""That launches read in turn, each of other keys."""


class Blocks(NamedTuple):
    """Rows of blocks, each of so many queries, and the keys of a block."""

    rows: int
    queries: int
    keys: int

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.queries}, blocks of {self.keys} keys"


SINGLE, SMALL, LARGE = Blocks(64, 1, 1), Blocks(64, 1, 16), Blocks(64, 1, 64)
FEW, TILES = Blocks(8, 1, 16), Blocks(64, 64, 64)
"""Of decode and of prompts: single queries, and tiles of them."""


def block_sparse_cases(machine: Machine, quick: bool) -> Iterator[Case]:
    shapes = [SMALL, TILES] if quick else [SINGLE, SMALL, LARGE, FEW, Blocks(8, 1, 64), Blocks(64, 16, 16), TILES]
    for shape in shapes:
        rule = sparse_tile(shape.queries, HEADS // KV_HEADS, HEAD_DIM)
        prepare = lambda shape=shape: block_sparse_timer(shape, machine)  # noqa: E731
        yield case_of("block-sparse", str(shape), tiles_like(rule, quick), rule, prepare)


def tiles_like(rule: SparseTile, quick: bool) -> list[SparseTile]:
    """Return tiles of as many queries; a warp has room for 16 at least, and for what it sums."""
    sizes = itertools.product((32, 64, 128), (3, 4, 5), (4, 8) if rule.padded > 64 else (1, 2, 4))
    if quick:
        sizes = itertools.product((32, 64), (3, 4), (4, 8) if rule.padded > 64 else (1, 4))
    return [
        rule._replace(block=block, stages=stages, warps=warps)
        for block, stages, warps in sizes
        if rule.padded <= 32 * warps and (warps > 1 or block <= 64)
    ]


def block_sparse_timer(shape: Blocks, machine: Machine) -> Callable[[SparseTile], float]:
    from compiled_llm_flashinfer.ops.kernels.sparse.block_sparse import attend

    generator = torch.Generator("cuda").manual_seed(0)

    def states(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, HEAD_DIM, generator=generator, device="cuda", dtype=torch.bfloat16)

    rows, queries, read = shape.rows, shape.rows * shape.queries, READ // shape.keys
    keys = rows * READ * (MATRICES if shape.queries == 1 else 1)  # tiles of prompts read what others do
    query, key, value = states(queries, HEADS), states(keys, KV_HEADS), states(keys, KV_HEADS)
    indptr = torch.arange(rows + 1, dtype=torch.int32) * read
    sizes = (queries, keys, shape.queries, shape.keys, HEADS, KV_HEADS, HEAD_DIM, machine.processors)
    made = list[BlockSparseAttention]()
    for _ in range(MATRICES):
        indices = torch.randperm(keys // shape.keys, generator=generator, device="cuda")[: rows * read].int()
        items = torch.from_numpy(
            block_sparse_items(indptr.numpy(), indices.cpu().numpy(), *sizes, queries + SHARED, SHARED)
        )
        matrix = (indptr.cuda(), indices, items[items[:, 2] > 0].cuda(), shape.queries, shape.keys, SHARED)
        made.append(BlockSparseAttention(query, key, value, *matrix, HEAD_DIM**-0.5, 0.0, None))

    def launch(tile: SparseTile, number: int) -> None:
        attend("block_sparse_attention", made[number % MATRICES], False, machine.processors, tile)

    return lambda tile: captured(lambda number: launch(tile, number))
