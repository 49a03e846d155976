"""How the kernel of ``check_pages`` divides rows among programs."""

from __future__ import annotations

from typing import NamedTuple


class Division(NamedTuple):
    """How the slots of rows are divided.

    Attributes:
        slots: that a program looks at in one go.
        programs: of all rows together, at least, if they are long enough.
        splits: programs of one row, at most.
    """

    slots: int
    programs: int
    splits: int


DIVISION = Division(512, 128, 16)
"""Not yet fitted: about as many programs as an H100 has multiprocessors."""
