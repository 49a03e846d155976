from __future__ import annotations

import pytest

from compiled_llm_ops.flashinfer.workspace import FlashInferWorkspace
from support.ops.compiling import own_cache

__all__ = ["own_cache"]


@pytest.fixture(scope="module")
def workspace() -> FlashInferWorkspace:
    return FlashInferWorkspace("cuda", 256 * 2**20)
