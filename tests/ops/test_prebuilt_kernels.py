"""FlashInfer finds kernels that another process has built, and what it builds nevertheless is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiled_llm_ops.flashinfer import prebuilt


class JitSpec:
    """What FlashInfer's class of this name does with the two."""

    elsewhere = Path("/elsewhere")

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def aot_path(self) -> Path:
        return self.elsewhere / self.name / f"{self.name}.so"

    def build(self, verbose: bool, need_lock: bool = True) -> str:
        return f"built {self.name}"


def test_a_folders_kernels_come_first_and_others_are_built_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prebuilt, "_folders", [tmp_path / "gone", tmp_path])
    before = prebuilt.kernels_built()
    (tmp_path / "prefill").mkdir()
    (tmp_path / "prefill" / "prefill.so").write_bytes(b"")
    prebuilt.look_in_folders(JitSpec)
    assert JitSpec("prefill").aot_path == tmp_path / "prefill" / "prefill.so"
    assert JitSpec("append").aot_path == Path("/elsewhere/append/append.so")
    assert prebuilt.kernels_built() == before
    assert JitSpec("append").build(verbose=False, need_lock=False) == "built append"
    assert prebuilt.kernels_built() == before + 1
