"""How the decode kernel deals out blocks, launched by itself: what each program finds, as numbers."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from compiled_llm_ops.kernels.attention.decode import _pick, _share, _unsplit


@triton.jit
def share_kernel(
    blocks: Any,
    found: Any,
    rows: Any,
    programs: Any,
    unsplit: Any,
    min_share: Any,
    padded: tl.constexpr,
    most: tl.constexpr,
    share_equal: tl.constexpr,
) -> None:
    """Write row, first program, number of programs, begin and end of each program's share."""
    program, row_ids = tl.program_id(0), tl.arange(0, padded)
    given = tl.load(blocks + row_ids, mask=row_ids < rows, other=0)
    unsplit = _unsplit(given, rows, unsplit, share_equal)
    own, first, count, begin, end = _share(given, program, programs, rows, unsplit, min_share, most)
    tl.store(found + 5 * program, _pick(own, row_ids))
    tl.store(found + 5 * program + 1, first)
    tl.store(found + 5 * program + 2, count)
    tl.store(found + 5 * program + 3, begin)
    tl.store(found + 5 * program + 4, end)
