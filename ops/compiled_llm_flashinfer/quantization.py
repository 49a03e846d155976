"""Masks packed into bits, as FlashInfer takes them: eight keys in a byte."""

# Shapes: X bits, B rows.

from __future__ import annotations

import torch
from torch import Tensor

_BITORDERS = ("big", "little")


def packbits(x: Tensor, bitorder: str = "big") -> Tensor:
    """Return ``[ceil(X / 8)]`` uint8 of ``[X]`` bool, of any shape; the last byte ends with zeros.

    Args:
        bitorder: "big" if the first of eight is the highest bit, "little" if it is the lowest; ValueError for others.
    """
    if bitorder not in _BITORDERS:
        raise ValueError(f"bitorder={bitorder!r} does not exist; use 'big' or 'little'")
    bits = x.reshape(-1).to(torch.bool)
    bytes_of_bits = torch.nn.functional.pad(bits, (0, -bits.shape[0] % 8)).view(-1, 8).to(torch.int32)
    places = torch.arange(8, device=x.device, dtype=torch.int32)
    weights = 1 << (places if bitorder == "little" else 7 - places)
    return (bytes_of_bits * weights).sum(1).to(torch.uint8)


def segment_packbits(x: Tensor, indptr: Tensor, bitorder: str = "big") -> tuple[Tensor, Tensor]:
    """Pack the bits ``[X]`` of each row by themselves, so that each row begins with a byte of its own.

    Returns:
        uint8, the bytes of all rows, and ``[B + 1]`` of the type of ``indptr``, where each row's bytes begin.
    """
    starts, counts = indptr[:-1].to(x.device), (indptr[1:] - indptr[:-1]).to(x.device)
    byte_indptr = packed_indptr(indptr)
    total = int(byte_indptr[-1])
    byte = torch.arange(total, device=x.device)
    row = torch.searchsorted(byte_indptr[1:].to(x.device), byte, right=True)
    within = (byte - byte_indptr.to(x.device)[row])[:, None] * 8 + torch.arange(8, device=x.device)
    inside = within < counts[row][:, None]
    bits = x.reshape(-1).to(torch.bool)
    if not bits.numel():
        return torch.zeros(total, dtype=torch.uint8, device=x.device), byte_indptr
    places = (starts[row][:, None] + within).clamp(max=bits.numel() - 1)
    return packbits(bits[places] & inside, bitorder), byte_indptr


def packed_indptr(indptr: Tensor) -> Tensor:
    """Return where the bytes of each row begin, from where its bits do."""
    begins = torch.zeros_like(indptr)
    begins[1:] = ((indptr[1:] - indptr[:-1] + 7) // 8).cumsum(0)
    return begins
