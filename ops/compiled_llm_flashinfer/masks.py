"""Masks of a batch: what each query of each row sees, as FlashInfer's plans take them."""

# Shapes: B rows, Q queries and L tokens of one row.

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_flashinfer.quantization import packed_indptr, segment_packbits


def packed_mask(
    custom_mask: Tensor | None, packed_custom_mask: Tensor | None, qo_indptr: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return a batch's mask in bits, and where each row's bytes begin; None if there is none."""
    # ``custom_mask`` has Q * L bools of each row; ``lengths`` is ``[B]``, L of each row.
    if custom_mask is None and packed_custom_mask is None:
        return None
    pairs = (qo_indptr[1:] - qo_indptr[:-1]) * lengths.to(qo_indptr.device)
    indptr = torch.zeros_like(qo_indptr)
    indptr[1:] = pairs.cumsum(0)
    if packed_custom_mask is not None:
        begins = packed_indptr(indptr)
        if packed_custom_mask.numel() < int(begins[-1]) or packed_custom_mask.dtype != torch.uint8:
            raise ValueError(
                f"packed_custom_mask must be [{int(begins[-1])}] uint8, of segment_packbits, for these rows; got "
                f"{tuple(packed_custom_mask.shape)} {packed_custom_mask.dtype}"
            )
        return packed_custom_mask.reshape(-1), begins
    assert custom_mask is not None
    entries = int(indptr[-1])
    if custom_mask.numel() != entries:
        raise ValueError(
            f"custom_mask must have {entries} entries, queries times keys of each row; got {custom_mask.numel()}"
        )
    return segment_packbits(custom_mask, indptr, bitorder="little")
