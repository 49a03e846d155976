"""FlashInfer finds kernels that another process has built, and what it builds nevertheless is counted."""

from __future__ import annotations

from pathlib import Path

from compiled_llm_ops.flashinfer import prebuilt


class JitSpec:
    """What FlashInfer's class of this name does with them."""

    def __init__(self, name: str, is_aot: bool = False) -> None:
        self.name = name
        self.is_aot = is_aot

    def load(self, so_path: Path) -> str:
        return f"loaded {so_path}"

    def build_and_load(self) -> str:
        return f"built {self.name}"


class JitSpecNvcc(JitSpec):
    """In FlashInfer 0.7 what builds is a subclass."""


def test_a_folders_kernels_come_first_and_others_are_built_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(prebuilt, "_folders", [tmp_path / "gone", tmp_path])
    before = prebuilt.kernels_built()
    library = tmp_path / "prefill" / "prefill.so"
    library.parent.mkdir()
    library.write_bytes(b"")
    prebuilt.look_in_folders(JitSpec)
    for kind in (JitSpec, JitSpecNvcc):
        assert kind("prefill").build_and_load() == f"loaded {library}"
        assert kind("page", is_aot=True).build_and_load() == "built page"
    assert prebuilt.kernels_built() == before
    assert JitSpecNvcc("append").build_and_load() == "built append"
    assert prebuilt.kernels_built() == before + 1
