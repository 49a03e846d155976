"""The notebook runs, and prints what stands in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import compiled_llm
from support.characters import character_tokenizer
from support.docs.notebook import NOTEBOOK, code, executed, figures_left_out, kept
from support.docs.pages import notebooks
from support.tiny_models import tiny_llama


def test_its_code_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, with a tiny model; what it prints is compared below."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.pad_token, tokenizer.padding_side = "<pad>", "left"
    wrap = compiled_llm.wrap
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(compiled_llm, "demo", lambda: (tiny_llama(eos_token_id=None), tokenizer))
    monkeypatch.setattr(compiled_llm, "wrap", lambda model: wrap(model, mode="eager"))
    namespace = {"__name__": "__main__"}
    for cell in code():
        exec(compile(cell, str(NOTEBOOK), "exec"), namespace)
    assert namespace["model"].device.type == "cpu"
    assert "fast loop" in capsys.readouterr().out


def test_the_site_shows_all_of_it() -> None:
    page = notebooks().shown(NOTEBOOK)
    assert all(cell in page for cell in code())
    assert "The capital of France is Paris." in page


@pytest.mark.whole
def test_a_kernel_prints_what_stands_in_it(demo_model_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    found = executed(tmp_path, "compiled_llm.wrap(model)", 'compiled_llm.wrap(model, mode="eager")')
    assert figures_left_out(found) == figures_left_out(kept())
