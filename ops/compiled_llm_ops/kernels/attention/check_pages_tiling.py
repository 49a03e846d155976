"""How the kernel of ``check_pages`` divides rows among programs."""

from __future__ import annotations

from typing import NamedTuple


class Division(NamedTuple):
    """The way the slots of rows are divided."""

    slots: int  # that a program looks at in one go
    programs: int  # of all rows together, at least, if they are long enough
    splits: int  # programs of one row, at most


DIVISION = Division(256, 256, 64)
"""How a row's tags are divided among programs."""
# Fitted on an H100 with 1 to 256 rows of 32,768 tokens in all: within 2% of the best of 18 divisions at each, 4 to 5
# microseconds a step with the launch that sets the chains. ``tools/fit_tilings.py --only page-checks`` measures that.
