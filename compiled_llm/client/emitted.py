"""Tensors of an engine process: hidden states, and what traced hooks have emitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Raw
from msgspec.msgpack import Decoder

from compiled_llm.client.errors import EngineProcessError
from compiled_llm.requests.columns import ReadAnswer, ReceivedColumn

if TYPE_CHECKING:
    from torch import Tensor

    from compiled_llm.client import emitted as this
    from compiled_llm.client.columns import ColumnModule

    checked: ColumnModule = this


# The layer, as the request has named it, or the name that hooks emit; torch's name of the dtype; the number of tokens,
# and what each has; row by row, as the engine process's machine writes them.
_Piece = tuple[int | str, str, list[int], bytes]
_piece = Decoder(_Piece)


class EmittedColumn(ReceivedColumn):
    """What was emitted of an answer's tokens, by layer or name."""

    def __init__(self) -> None:
        self._pieces: dict[int | str, list[_Piece]] = {}

    def take_piece(self, data: Raw) -> None:
        piece = _piece.decode(data)
        self._pieces.setdefault(piece[0], []).append(piece)

    def completion(self, answer: ReadAnswer) -> Mapping[str, Any]:
        found = {key: _joined(pieces) for key, pieces in self._pieces.items()}
        layers = {key: tensor for key, tensor in found.items() if isinstance(key, int)}
        named = {key: tensor for key, tensor in found.items() if isinstance(key, str)}
        return {"hidden_states": layers or None, "emitted": named or None}


COLUMN: type[ReceivedColumn] = EmittedColumn


def _joined(pieces: Sequence[_Piece]) -> Tensor:
    """Return the tensor that came in these pieces, on the CPU; EngineProcessError if they make none."""
    import torch

    try:
        return torch.cat([_tensor(*piece) for piece in pieces])
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise EngineProcessError(f"what the engine process has sent as {pieces[0][0]!r} is no tensor") from error


def _tensor(_: int | str, dtype: str, shape: list[int], numbers: bytes) -> Tensor:
    import torch

    if not numbers:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
    return torch.frombuffer(bytearray(numbers), dtype=getattr(torch, dtype)).view(shape)
