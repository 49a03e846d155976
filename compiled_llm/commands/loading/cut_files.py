"""Finds the file of a model that ends too early, as one does whose download was broken off, and says so."""

from __future__ import annotations

import json
import math
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

_LONGEST_HEADER = 100_000_000  # bytes, of safetensors; what says more is something else
_NUMBERS: dict[int, str] = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""The types of GGUF's numbers, as ``struct`` writes them."""
_TEXT, _ARRAY = 8, 9
_VERSIONS = (2, 3)  # of GGUF whose counts have 64 bits


def cut_file(location: str, gguf_file: str | None) -> str | None:
    """Return a sentence about a file of a model that is shorter than its header says; None if there is none here."""
    for path, size_of in _weights(Path(location), gguf_file):
        size = 0
        expected = None
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                expected = size_of(file)
        except EOFError:
            return f"{path.name} ends too early, after {size:,} bytes; download it again"
        except (OSError, ArithmeticError, KeyError, RecursionError, TypeError, ValueError, struct.error):
            continue  # it cannot be read, or is damaged in another way, which others say
        if expected is not None and size < expected:
            return f"{path.name} ends too early, after {size:,} of {expected:,} bytes; download it again"
    return None


def _weights(folder: Path, gguf_file: str | None) -> Iterator[tuple[Path, Callable[[BinaryIO], int | None]]]:
    if gguf_file is not None:
        yield folder / gguf_file, _size_of_gguf
    elif folder.is_dir():
        yield from ((path, _size_of_safetensors) for path in sorted(folder.glob("*.safetensors")))
        yield from ((path, _size_of_pickle) for path in sorted(folder.glob("*.bin")))


# Each returns how many bytes a file has by its header, None if it is of another kind, or raises EOFError in its midst.


def _size_of_safetensors(file: BinaryIO) -> int | None:
    (length,) = _read(file, "Q")
    if length > _LONGEST_HEADER:
        return None
    header: dict[str, Any] = json.loads(_bytes(file, length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return 8 + int(length) + max(ends, default=0)


def _size_of_pickle(file: BinaryIO) -> int | None:
    if file.read(4) == b"PK\x03\x04" and not zipfile.is_zipfile(file):  # what a zip file has is told at its end
        raise EOFError
    return None


def _size_of_gguf(file: BinaryIO) -> int | None:
    if not b"GGUF".startswith(file.read(4)):
        return None
    version, tensors, fields = _read(file, "IQQ")
    if version not in _VERSIONS:
        return None
    found = {_text(file): _value(file, *_read(file, "I")) for _ in range(fields)}
    ends = [_end_of_tensor(file) for _ in range(tensors)]
    alignment = int(found.get(b"general.alignment", 32))
    return -(-file.tell() // alignment) * alignment + max(ends, default=0)


def _end_of_tensor(file: BinaryIO) -> int:
    import gguf

    _text(file)
    (dimensions,) = _read(file, "I")
    *shape, kind, offset = _read(file, f"{dimensions}QIQ")
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    return int(offset + math.prod(shape) // block * nbytes)


def _value(file: BinaryIO, kind: int) -> Any:
    """Return a number; texts and arrays are passed over."""
    if kind == _TEXT:
        return _text(file)
    if kind == _ARRAY:
        element, count = _read(file, "IQ")
        for _ in range(count):
            _value(file, element)
        return None
    return _read(file, _NUMBERS[kind])[0]


def _text(file: BinaryIO) -> bytes:
    return _bytes(file, *_read(file, "Q"))


def _read(file: BinaryIO, form: str) -> tuple[Any, ...]:
    return struct.unpack(f"<{form}", _bytes(file, struct.calcsize(f"<{form}")))


def _bytes(file: BinaryIO, count: int) -> bytes:
    if count > os.fstat(file.fileno()).st_size - file.tell():  # which may be any number: no memory is taken for it
        raise EOFError
    return file.read(count)
