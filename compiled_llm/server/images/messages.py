"""The messages between an engine process and the worker process that decodes images."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from compiled_llm.engine.apart.exchange import Failed

MAX_BYTES = 2**28 + 2**10
"""Of an image: its file, or four bytes for each pixel."""


class Decode(Struct, tag="decode", frozen=True):
    """An image to decode."""

    file: bytes
    pixels: int  # that it may have
    seconds: int  # of processor time that it may take
    memory: int  # bytes that it may take, besides those of the worker


class Decoded(Struct, tag="decoded", frozen=True):
    """The pixels of an image, turned as its camera says."""

    width: int
    height: int
    mode: Literal["RGB", "RGBA"]  # with alpha if it may be transparent
    pixels: bytes  # ``[height, width, 3]``, or 4, of red, green, blue and alpha


FromWorker = Decoded | Failed
