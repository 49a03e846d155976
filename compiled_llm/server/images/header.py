"""What the header of an image's file says of it; nothing is decoded, and the rest of the file is not looked at."""

from __future__ import annotations

import re
from typing import NamedTuple

FORMATS = "PNG, JPEG, WebP and GIF"
_SVG = re.compile(rb"\s*(<\?xml|<!--|<svg|<!DOCTYPE svg)", re.IGNORECASE)
_OTHERS = {
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"%PDF": "PDF",
    b"\0\0\1\0": "an icon",
    b"<html": "HTML",
    b"<!doctype html": "HTML",
    b"\x1a\x45\xdf\xa3": "a video",
    b"OggS": "sound or a video",
    b"ID3": "sound",
}
_SIZES_OF_JPEG = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ALONE = frozenset((0x01, *range(0xD0, 0xD9)))
"""Markers of JPEG that begin no segment."""
_MOST_MARKERS = 2**14
"""Markers of JPEG, and bytes of padding, that are looked at: cameras write some hundreds at most."""
_PNG = b"\x89PNG\r\n\x1a\n"


class Header(NamedTuple):
    """The format of an image, and its size in pixels."""

    format: str
    width: int
    height: int

    @property
    def pixels(self) -> int:
        return self.width * self.height


def header_of(file: bytes) -> Header:
    """Return what a file says of itself; ValueError, a sentence without its subject, if it is no image we decode."""
    if file.startswith(_PNG):
        return _png(file)
    if file.startswith(b"\xff\xd8\xff"):
        return _jpeg(file)
    if file.startswith((b"GIF87a", b"GIF89a")):
        return _sized("GIF", int.from_bytes(_piece(file, 6, 2), "little"), int.from_bytes(_piece(file, 8, 2), "little"))
    if file.startswith(b"RIFF") and file[8:12] == b"WEBP":
        return _webp(file)
    if _SVG.match(file):
        raise ValueError(f"is SVG or other XML, which is not served; give {FORMATS}")
    named = next((name for begin, name in _OTHERS.items() if file[: len(begin)].lower() == begin.lower()), None)
    if named is None and file[4:8] == b"ftyp":
        named = "AVIF, HEIC or a video"
    raise ValueError(f"is {named or 'no image'}; give {FORMATS}")


def _png(file: bytes) -> Header:
    if _piece(file, 12, 4) != b"IHDR":
        raise ValueError("is a damaged PNG")
    if b"acTL" in file[:4096].partition(b"IDAT")[0]:
        raise ValueError("is animated, and animations are not served; give one of its frames")
    return _sized("PNG", int.from_bytes(_piece(file, 16, 4), "big"), int.from_bytes(_piece(file, 20, 4), "big"))


def _jpeg(file: bytes) -> Header:
    place = 2
    for _ in range(_MOST_MARKERS):
        mark, kind = _piece(file, place, 2)
        if mark != 0xFF:
            raise ValueError("is a damaged JPEG")
        if kind == 0xFF:  # padding
            place += 1
        elif kind in _ALONE:
            place += 2
        elif kind in _SIZES_OF_JPEG:
            height, width = (int.from_bytes(_piece(file, place + start, 2), "big") for start in (5, 7))
            return _sized("JPEG", width, height)
        elif kind in (0xD9, 0xDA):  # its end, or its pixels
            raise ValueError("is a damaged JPEG: it has no size")
        else:
            place += 2 + max(2, int.from_bytes(_piece(file, place + 2, 2), "big"))
    raise ValueError(f"is a damaged JPEG: it has no size within {_MOST_MARKERS:,} markers and bytes of padding")


def _webp(file: bytes) -> Header:
    kind = _piece(file, 12, 4)
    if kind == b"VP8X":
        if _piece(file, 20, 1)[0] & 2:
            raise ValueError("is animated, and animations are not served; give one of its frames")
        width, height = (1 + int.from_bytes(_piece(file, start, 3), "little") for start in (24, 27))
        return _sized("WebP", width, height)
    if kind == b"VP8L":
        bits = int.from_bytes(_piece(file, 21, 4), "little")
        return _sized("WebP", 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    if kind == b"VP8 " and _piece(file, 23, 3) == b"\x9d\x01\x2a":
        width, height = (int.from_bytes(_piece(file, start, 2), "little") & 0x3FFF for start in (26, 28))
        return _sized("WebP", width, height)
    raise ValueError("is a damaged WebP")


def _sized(format: str, width: int, height: int) -> Header:
    if not (width and height):
        raise ValueError(f"is a damaged {format}: it has no pixels")
    return Header(format, width, height)


def _piece(file: bytes, start: int, count: int) -> bytes:
    piece = file[start : start + count]
    if len(piece) < count:
        raise ValueError("is cut: the file ends in its header")
    return piece
