"""Vectors of prompts of an engine process."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Raw
from msgspec.msgpack import Decoder

from compiled_llm.requests.columns import ReadAnswer, ReceivedColumn

if TYPE_CHECKING:
    from compiled_llm.client import pooling as this
    from compiled_llm.client.columns import ColumnModule

    checked: ColumnModule = this


_numbers = Decoder(bytes)


class PooledColumn(ReceivedColumn):
    """The vector of a prompt, in place of tokens."""

    def __init__(self) -> None:
        self._vector: array[float] | None = None

    def take_piece(self, data: Raw) -> None:
        self._vector = array("f", _numbers.decode(data))

    def completion(self, answer: ReadAnswer) -> Mapping[str, Any]:
        return {"pooled": self._vector}


COLUMN: type[ReceivedColumn] = PooledColumn
