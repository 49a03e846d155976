"""Hashes of pixels, by several threads: of an image of a million pixels a processor has made twelve megabytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from compiled_llm.compat.forks import in_forked_processes

_PIECE = 1 << 21
"""Bytes that a thread hashes at a time: between two it waits for other threads that run Python."""
_THREADS = max(1, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1))


class Hashes:
    """Hashes of 32 bytes; its threads are started as they are needed."""

    def __init__(self) -> None:
        self.begin()
        in_forked_processes(self.begin)

    def begin(self) -> None:
        """Have no threads yet: a forked process has none of those before it."""
        self._pool = ThreadPoolExecutor(_THREADS, "compiled_llm hashes")

    def begun(self, data: memoryview) -> Iterator[bytes]:
        """Begin to hash each piece of bytes ``[n]``, and return the hashes, once somebody asks for them."""
        return self._pool.map(_hash_of, (data[start : start + _PIECE] for start in range(0, len(data), _PIECE)))


def _hash_of(piece: memoryview) -> bytes:
    # It lets other threads run meanwhile, and processors have instructions for it: blake2b takes five times as long.
    return hashlib.sha256(piece).digest()


HASHES = Hashes()
