"""What functions name and hold, and so may read."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import CellType, CodeType

_CACHED = 16_384  # more than the functions of a model's classes


def with_inner(code: CodeType) -> Iterator[CodeType]:
    """Yield code, and that of the functions inside it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from with_inner(value)


@functools.lru_cache(_CACHED)
def names_in(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in code, and in the functions inside it."""
    return frozenset(name for each in with_inner(code) for name in each.co_names)


def content_of(cell: CellType) -> object:
    """Return what a closure's cell holds; an ellipsis if it is empty so far."""
    try:
        return cell.cell_contents
    except ValueError:
        return ...
