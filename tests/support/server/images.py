"""Images in requests of OpenAI's API, and files that are none."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any


def data_url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def shown(*urls: Any, text: str = "w5 w6") -> list[dict[str, Any]]:
    """The messages of a chat with one question, images before its text."""
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def png(width: int, height: int, data: bytes = b"", more: bytes = b"") -> bytes:
    """A PNG that says it has a size, and any data."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + more + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
