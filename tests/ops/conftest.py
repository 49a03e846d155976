from __future__ import annotations

from pathlib import Path

import pytest

from compiled_llm_ops.flashinfer.workspace import FlashInferWorkspace


@pytest.fixture(scope="module")
def workspace() -> FlashInferWorkspace:
    return FlashInferWorkspace("cuda", 256 * 2**20)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that Triton has compiled before is found."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
