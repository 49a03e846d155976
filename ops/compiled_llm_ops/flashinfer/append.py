"""Writing new keys and values into the pages with FlashInfer's kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.contracts import PageTable, check_even_heads
from compiled_llm_ops.flashinfer.versions import import_flashinfer


def append(
    key: Tensor, value: Tensor, pages: Tensor, token_rows: Tensor, token_positions: Tensor, table: PageTable
) -> None:
    """Copy keys and values ``[T, K, D]`` into pages ``[P, 2, K, S, D]`` in their dtype; positions are not checked."""
    # Strides that FlashInfer cannot read are copied first; ``qo_indptr`` of the table is not read.
    check_even_heads("append_paged_kv", pages)
    if key.shape[0] == 0:
        return  # FlashInfer would launch a grid of no blocks, which CUDA rejects
    import_flashinfer().append_paged_kv_cache(
        append_key=readable(key.to(pages.dtype)),
        append_value=readable(value.to(pages.dtype)),
        batch_indices=token_rows,
        positions=token_positions,
        paged_kv_cache=pages,
        kv_indices=table.indices,
        kv_indptr=table.indptr,
        kv_last_page_len=table.last_page_len,
        kv_layout="HND",
    )


def readable(states: Tensor) -> Tensor:
    """Return ``states`` ``[T, heads, D]`` as it is where the kernels can read it: in pieces of 16 bytes along D."""
    piece = 16 // states.element_size()
    if states.stride(2) == 1 and not (states.stride(0) % piece or states.stride(1) % piece or states.data_ptr() % 16):
        return states
    return states.clone(memory_format=torch.contiguous_format)
