"""Folders as sentence-transformers writes them, and what HuggingFace's models say of a text's last token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LAST = {"embedding_dimension": 64, "pooling_mode": "lasttoken", "include_prompt": True}


def written(
    folder: Path,
    pooling: Mapping[str, Any] | None = LAST,
    *others: str,
    prompts: Mapping[str, str] | None = None,
    default: str | None = None,
    normalizes: bool = True,
) -> Path:
    """Write a folder's ``modules.json`` and what belongs to it; ``others`` are modules after the pooling."""
    own = "sentence_transformers.sentence_transformer.modules"
    kinds = ["sentence_transformers.base.modules.transformer.Transformer"]
    kinds += [] if pooling is None else [f"{own}.pooling.Pooling"]
    kinds += [*others, *["sentence_transformers.base.modules.normalize.Normalize"] * normalizes]
    modules = [
        {"idx": number, "name": str(number), "path": f"{number}_{kind.rpartition('.')[2]}" * (number > 0), "type": kind}
        for number, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for module in modules[1:]:
        (folder / module["path"]).mkdir(exist_ok=True)
    if pooling is not None:
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    settings = {"prompts": prompts or {}, "default_prompt_name": default, "similarity_fn_name": "cosine"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


def last_states(model: Any, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Return ``[N, hidden]``, each prompt alone, by HuggingFace's forward."""
    with torch.no_grad():
        return torch.stack([model.base_model(torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in prompts])


def assert_alike(found: Tensor, expected: Tensor) -> None:
    """Each row points where it should: a cosine of 0.99999 at least."""
    assert found.shape == expected.shape
    assert torch.cosine_similarity(found.double(), expected.double()).min() >= 0.99999
