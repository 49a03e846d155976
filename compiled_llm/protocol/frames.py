"""Messages as frames: four bytes of length, the most significant first, then the message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

MAX_BYTES = 64 * 2**20
"""How long a message may be: twice what waits for a client at most, each token with 20 others' log-probabilities."""

_HEADER = 4
_encoder = msgspec.msgpack.Encoder()

T = TypeVar("T")


class FrameError(ValueError):
    """Received bytes, or a message to send, that are no frame of the protocol."""


def frame_of(message: msgspec.Struct, max_bytes: int = MAX_BYTES) -> bytearray:
    """Return a message as a frame; FrameError if it is too long or has a number that is too large."""
    frame = bytearray(_HEADER)
    try:
        _encoder.encode_into(message, frame, _HEADER)
    except OverflowError:
        raise FrameError("a message with a number that is too large: 64 bits are sent") from None
    length = len(frame) - _HEADER
    if length > max_bytes:
        raise FrameError(f"a message of {length:,} bytes; it can have {max_bytes:,}")
    frame[:_HEADER] = length.to_bytes(_HEADER, "big")
    return frame


class Frames(Generic[T]):
    """A reader that turns bytes, however they are cut, into messages."""

    def __init__(self, message: Any, max_bytes: int = MAX_BYTES) -> None:
        """``message``: the type of received messages, a union."""
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message)
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        """Take more bytes, and yield complete messages; after a FrameError the next frame cannot be found."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _HEADER:
            length = int.from_bytes(buffer[:_HEADER], "big")
            if length > self._max_bytes:
                raise FrameError(
                    f"a frame that says it has {length:,} bytes, and can have {self._max_bytes:,}; only clients of "
                    "compiled_llm are understood here"
                )
            if len(buffer) < (end := _HEADER + length):
                return
            frame = bytes(buffer[_HEADER:end])
            del buffer[:end]
            try:
                message = self._decoder.decode(frame)
            except (msgspec.MsgspecError, RecursionError, ValueError, TypeError) as error:
                raise FrameError(f"a frame that is no message of the protocol: {error}") from error
            yield message

    def check_complete(self) -> None:
        """Raise FrameError if the bytes have ended within a frame."""
        if self._buffer:
            raise FrameError(f"a frame that was cut after {len(self._buffer):,} bytes")
