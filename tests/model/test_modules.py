"""The modules inside a model, and what is remembered of them."""

from __future__ import annotations

import pytest
from torch import nn

from compiled_llm.model import modules
from compiled_llm.model.modules import InnerModules


def test_another_thread_that_looks_meanwhile_knows_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, model, seen = InnerModules(), nn.Sequential(nn.Linear(1, 1)), list[str | None]()

    def kind(module: nn.Module) -> str:
        if not seen:
            seen.append(None)
            seen.append(inner.obstacles(model).mixing)  # as another thread might
        return "a kind"

    monkeypatch.setattr(modules, "_kind_that_mixes", kind)
    assert inner.obstacles(model).mixing == seen[1] == "a kind"
