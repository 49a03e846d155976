"""Tensors of an engine process: hidden states, and what traced hooks have emitted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_llm.client.errors import EngineProcessError
from compiled_llm.protocol.messages import EmittedPiece


def joined(pieces: Sequence[EmittedPiece]) -> Tensor:
    """Return the tensor that came in these pieces, on the CPU; EngineProcessError if they make none."""
    try:
        return torch.cat([_tensor(piece) for piece in pieces])
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise EngineProcessError(f"what the engine process has sent as {pieces[0].key!r} is no tensor") from error


def _tensor(piece: EmittedPiece) -> Tensor:
    dtype = getattr(torch, piece.dtype)
    if not piece.numbers:
        return torch.empty(piece.shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(piece.numbers), dtype=dtype).view(piece.shape)
