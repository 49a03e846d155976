"""Cases of every op under FlashInfer's API, for opcheck."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from support.flashinfer_api.latent_pools import LatentPools
from support.flashinfer_api.sparse_blocks import Sizes, SparseBlocks, VariableBlocks
from support.flashinfer_api.strided_rows import StridedRows, packed, starts_of


def strided_attention_cases() -> list[tuple[Any, ...]]:
    rows = StridedRows([1, 5, 0, 9], [1, 2, 1, 3], seed=1)
    mask = packed(rows.masks())
    out, lse, factors = torch.zeros(7, 4, 16), torch.zeros(7, 4), torch.rand(3, 4)
    paged = (rows.query, *rows.pools, out, lse, *rows.table, 0.3)
    states = [states.unsqueeze(2) for states in rows.ragged]
    table = (rows.qo_indptr, starts_of(rows.lengths), None, None)
    one = (rows.query[:4], *states, out[:4], None, None, None, None, None, 0.3, True)
    return [
        (*paged, True, 3, 1.5),
        (*paged, False, -1, 0.0, 0.5, factors[0], factors[1], *mask, factors[2]),
        (rows.query, *states, out, None, *table, 0.3),
        (*one, 2, 0.0, 1.0, None, None, None, None, None, 1.0, 1e4),
    ]


def strided_latent_cases() -> list[tuple[Any, ...]]:
    rows = LatentPools([1, 5, 0, 9], [1, 2, 1, 3], seed=1)
    rows.pool = rows.pool.nan_to_num()
    out, lse = torch.zeros(7, 4, 16), torch.zeros(7, 4)
    return [(*rows.parts, out, lse, *rows.table, 0.3, True), (*rows.apart, out, None, *rows.table, 0.3)]


def strided_append_cases() -> list[tuple[Any, ...]]:
    rows = StridedRows([5, 3], [1, 1], seed=1)
    places = torch.tensor([0, 0, -1, 1]), torch.tensor([4, 2, 0, 0])
    table = (*places, rows.indptr, rows.indices)
    states = [states[:4] for states in rows.ragged]
    return [
        (*states, *rows.pools, *table),
        (*states, *(pool.transpose(1, 2).contiguous().transpose(1, 2) for pool in rows.pools), *table),
    ]


def block_sparse_cases() -> list[tuple[Any, ...]]:
    sizes = Sizes(12, 40)
    cases: list[tuple[Any, ...]] = [
        tuple(SparseBlocks((4, 8), sizes, masked=masked).arguments(2.0 * masked)) for masked in (False, True)
    ]
    return [*cases, tuple(SparseBlocks((1, 1), sizes._replace(dtype=torch.bfloat16), spare=3).arguments())]


def variable_block_sparse_cases() -> list[tuple[Any, ...]]:
    return [tuple(VariableBlocks((3, 5), Sizes(12, 40), seed=number).arguments(1.5 * number)) for number in range(2)]


CASES: dict[str, Callable[[], Sequence[tuple[Any, ...]]]] = {
    "block_sparse_attention": block_sparse_cases,
    "block_sparse_attention_lse": block_sparse_cases,
    "strided_append": strided_append_cases,
    "strided_attention": strided_attention_cases,
    "strided_latent_attention": strided_latent_cases,
    "variable_block_sparse_attention": variable_block_sparse_cases,
    "variable_block_sparse_attention_lse": variable_block_sparse_cases,
}
