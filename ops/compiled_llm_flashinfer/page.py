"""FlashInfer's functions of pages: writing into them, and tables for that."""

# Shapes: T packed tokens, B rows, K kv heads, D head dimension, P pages, S page size, N entries of the page table.

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_flashinfer.arguments import result_like
from compiled_llm_flashinfer.layouts import Pages, paged
from compiled_llm_flashinfer.ops.strided.append import strided_append
from compiled_llm_flashinfer.workspace import as_index


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Pages,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write keys and values of new tokens into pages that rows already have.

    Args:
        append_key: ``[T, K, D]``, any strides and float dtype, like ``append_value``; written in that of the pages.
        batch_indices: ``[T]`` int32 or int64, the row of each token; tokens of negative ones are left out.
        positions: ``[T]``, the position of each token in its row.
        kv_last_page_len: not read: positions say where tokens go.
    """
    keys, values = paged(paged_kv_cache, kv_layout)
    table = (as_index(column) for column in (batch_indices, positions, kv_indptr, kv_indices))
    strided_append(append_key, append_value, keys, values, *table)


def append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor | None,
    kpe_cache: Tensor | None,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """Write latents and their rotated parts into pages; ``kv_last_page_len`` is not read.

    Args:
        append_ckv: ``[T, R]``, latents of new tokens; ``append_kpe``, their rotated parts, is ``[T, E]``.
        batch_indices: ``[T]`` int32, the row of each token; tokens of negative ones are left out.
        positions: ``[T]`` int32, the position of each token in its row.
        ckv_cache: ``[P, S, R]``, any strides, written; ``kpe_cache``, likewise, is ``[P, S, E]``.
    """
    given = {"append_ckv": append_ckv, "append_kpe": append_kpe, "ckv_cache": ckv_cache, "kpe_cache": kpe_cache}
    for name, states in given.items():
        axes = 2 if name.startswith("append") else 3
        if states is None or states.dim() != axes:
            found = None if states is None else tuple(states.shape)
            raise ValueError(f"{name} must be {'[T, ...]' if axes == 2 else '[P, S, ...]'}; got {found}")
    assert ckv_cache is not None, "it has been checked"
    assert kpe_cache is not None, "it has been checked"
    strided_append(
        append_ckv.unsqueeze(1), append_kpe.unsqueeze(1), ckv_cache.unsqueeze(1), kpe_cache.unsqueeze(1),
        as_index(batch_indices), as_index(positions), as_index(kv_indptr), as_index(kv_indices),
    )  # fmt: skip


def get_batch_indices_positions(
    append_indptr: Tensor,
    seq_lens: Tensor,
    nnz: int,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the row and the position of each token that is appended, the last ones of their rows: ``[T]`` int32.

    Args:
        append_indptr: ``[B + 1]`` int32 or int64, where each row's new tokens begin.
        seq_lens: ``[B]``, tokens of each row, the new ones included.
        nnz: T; those after the last row's have row -1 and position 0.
        batch_indices: ``[T]`` int32, written and returned if given, like ``positions``.
    """
    rows_out, positions_out = (
        None if given is None else result_like(name, given, (nnz,), torch.int32, append_indptr)
        for name, given in (("batch_indices", batch_indices), ("positions", positions))
    )
    token = torch.arange(nnz, device=append_indptr.device, dtype=append_indptr.dtype)
    rows = torch.searchsorted(append_indptr[1:].contiguous(), token, right=True)
    inside = (token >= append_indptr[0]) & (token < append_indptr[-1])
    known = rows.clamp(max=append_indptr.shape[0] - 2)
    found = token + seq_lens.to(append_indptr.device)[known] - append_indptr[1:][known]
    results = (torch.where(inside, rows, -1).to(torch.int32), torch.where(inside, found, 0).to(torch.int32))
    for own, result in zip((rows_out, positions_out), results, strict=True):
        if own is not None:
            own.copy_(result)
    return (
        results[0] if rows_out is None else rows_out,
        results[1] if positions_out is None else positions_out,
    )


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """Return the tokens of each row, ``[B]``; ``kv_last_page_len`` is 0 for a row without pages."""
    return torch.clamp(kv_indptr[1:] - kv_indptr[:-1] - 1, min=0) * page_size + kv_last_page_len
