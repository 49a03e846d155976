"""Sparse matrices of blocks, and attention over them computed densely with a mask over all queries and keys.

Shapes: M queries, N keys, H query heads, K kv heads, D head dimension, R queries of a block, C keys of a block, MB rows
and NB columns of blocks, X blocks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm_flashinfer.ops.contracts import BlockSparseAttention, VariableBlockSparseAttention
from compiled_llm_flashinfer.ops.sparse.work_items import block_sparse_items, most_pieces, variable_block_sparse_tables


class Sizes(NamedTuple):
    """Of states."""

    queries: int
    keys: int
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


def states_of(sizes: Sizes, generator: torch.Generator) -> list[Tensor]:
    shapes = ((sizes.queries, sizes.heads), *[(sizes.keys, sizes.kv_heads)] * 2)
    return [torch.randn(*shape, sizes.head_dim, generator=generator).to(sizes.device, sizes.dtype) for shape in shapes]


class SparseBlocks:
    """The same blocks for all heads; the columns of a row in random order, and some rows without any."""

    def __init__(
        self,
        block: tuple[int, int],
        sizes: Sizes,
        *,
        density: float = 0.3,
        masked: bool = False,
        spare: int = 0,
        processors: int = 4,
        max_parts: int = 64,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        (self.rows, self.columns), self.sizes = block, sizes
        self.states, self.scale = states_of(sizes, generator), 1.2 * sizes.head_dim**-0.5
        shape = (sizes.queries // self.rows, sizes.keys // self.columns)
        self.matrix = torch.rand(shape, generator=generator) < density
        if shape[0] > 2:
            self.matrix[1] = False
        own = [
            found[torch.randperm(len(found), generator=generator)]
            for found in (row.nonzero()[:, 0] for row in self.matrix)
        ]
        self.indptr = torch.tensor([0, *map(len, own)]).cumsum(0).int()
        self.indices = torch.cat([*own, torch.zeros(spare, dtype=torch.long)]).int()
        self.mask = None
        if masked:
            self.mask = torch.rand(len(self.indices), self.rows, self.columns, generator=generator) < 0.5
        tiles = sizes.queries + max_parts
        self.items = torch.from_numpy(
            block_sparse_items(
                self.indptr.numpy(), self.indices.numpy(), *sizes[:2], *block, *sizes[2:5], processors, tiles, max_parts
            )
        )
        self.max_parts = max_parts

    def arguments(self, soft_cap: float = 0.0) -> BlockSparseAttention:
        table = [own.to(self.sizes.device) for own in (self.indptr, self.indices, self.items)]
        mask = None if self.mask is None else self.mask.to(self.sizes.device)
        block = (self.rows, self.columns, self.max_parts)
        return BlockSparseAttention(*self.states, *table, *block, self.scale, soft_cap, mask)

    def seen(self) -> Tensor:
        """`[M, N]` bool."""
        seen = torch.zeros(self.sizes[:2], dtype=torch.bool)
        for row in range(len(self.indptr) - 1):
            for entry in range(int(self.indptr[row]), int(self.indptr[row + 1])):
                column = int(self.indices[entry])
                within = True if self.mask is None else self.mask[entry]
                rows = slice(row * self.rows, (row + 1) * self.rows)
                seen[rows, column * self.columns : (column + 1) * self.columns] = within
        return seen

    def expected(self, soft_cap: float = 0.0) -> tuple[Tensor, Tensor]:
        return dense(self.states, self.seen().expand(self.sizes.kv_heads, -1, -1), self.scale, soft_cap)


class VariableBlocks:
    """Blocks of random sizes, some of them empty, for each kv head."""

    def __init__(
        self,
        blocks: tuple[int, int],
        sizes: Sizes,
        *,
        density: float = 0.4,
        processors: int = 4,
        max_parts: int = 64,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sizes, self.scale = sizes, 0.9 * sizes.head_dim**-0.5
        self.states = states_of(sizes, generator)

        def partition(total: int, count: int) -> Tensor:
            cuts = [
                torch.randint(total + 1, (count - 1,), generator=generator).sort().values for _ in range(sizes.kv_heads)
            ]
            return torch.stack(
                [torch.diff(cut, prepend=cut.new_zeros(1), append=cut.new_full((1,), total)) for cut in cuts]
            )

        self.rows, self.columns = partition(sizes.queries, blocks[0]).int(), partition(sizes.keys, blocks[1]).int()
        self.map = torch.rand(sizes.kv_heads, *blocks, generator=generator) < density
        self.map[0, 0] = False
        host = [own.numpy() for own in (self.map, self.rows, self.columns)]
        most, room = most_pieces(host[0], host[2]), sizes.queries * sizes.kv_heads + max_parts
        tables = variable_block_sparse_tables(*host, sizes.heads, sizes.head_dim, processors, room, max_parts, most)
        self.tables, self.max_parts = [torch.from_numpy(own) for own in tables], max_parts

    def arguments(self, soft_cap: float = 0.0) -> VariableBlockSparseAttention:
        tables = [own.to(self.sizes.device) for own in (self.map, self.rows, self.columns, *self.tables)]
        return VariableBlockSparseAttention(*self.states, *tables, self.max_parts, self.scale, soft_cap)

    def expected(self, soft_cap: float = 0.0) -> tuple[Tensor, Tensor]:
        seen = torch.stack(
            [
                own.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
                for own, rows, columns in zip(self.map, self.rows, self.columns, strict=True)
            ]
        )
        return dense(self.states, seen, self.scale, soft_cap)


def dense(states: list[Tensor], seen: Tensor, scale: float, soft_cap: float) -> tuple[Tensor, Tensor]:
    """`[M, H, D]` and the log-sum-exp `[M, H]` in base 2, in float32; `seen` is `[K, M, N]`."""
    query, key, value = (own.float() for own in states)
    group = query.shape[1] // key.shape[1]
    logits = torch.einsum("mhd,nhd->hmn", query, key.repeat_interleave(group, 1)) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits.masked_fill(~seen.to(logits.device).repeat_interleave(group, 0), -math.inf)
    weights = torch.softmax(logits, -1).nan_to_num(0.0)
    out = torch.einsum("hmn,nhd->mhd", weights, value.repeat_interleave(group, 1))
    return out, torch.logsumexp(logits, -1).T / math.log(2)


BLOCKS = [(1, 1), (4, 1), (16, 16), (1, 16), (64, 64), (5, 3), (200, 32), (33, 128)]
"""R and C."""
