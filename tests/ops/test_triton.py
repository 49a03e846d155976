"""All kernels under Triton's interpreter, which decides at import whether it interprets: in a process of their own."""

from __future__ import annotations

import pytest

from support.ops.interpreting import check_interpreted, needs_triton, not_interpreted


@pytest.mark.slow
@needs_triton
@not_interpreted
def test_kernels_under_the_interpreter(request: pytest.FixtureRequest) -> None:
    check_interpreted("ops/**/test_triton_*.py", request.config)
