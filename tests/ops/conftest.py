from __future__ import annotations

import pytest

from compiled_llm_ops.flashinfer.workspace import Workspace


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    return Workspace("cuda", 256 * 2**20)
