from __future__ import annotations

import pytest

from compiled_llm_ops.flashinfer.workspace import FlashInferWorkspace


@pytest.fixture(scope="module")
def workspace() -> FlashInferWorkspace:
    return FlashInferWorkspace("cuda", 256 * 2**20)
