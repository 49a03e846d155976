"""Folders as sentence-transformers writes them, and what HuggingFace's models say of a text's last token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3ForSequenceClassification

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


PAIRS = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}answer:{% endif %}"
)
"""A chat template that takes a query and a document, as those of rerankers do."""


def written_ranks(folder: Path, yes: int, no: int | None, prompt: str = "", chat: bool = True, **settings: Any) -> Path:
    """Write the files of a model that ranks by two tokens, as sentence-transformers writes a ``CrossEncoder``'s."""
    kinds = {"": "base.modules.transformer.Transformer", "1_LogitScore": "cross_encoder.modules.logit_score.LogitScore"}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.{kind}"}
        for number, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir(exist_ok=True)
    score = {"true_token_id": yes, "false_token_id": no, "module_input_name": "causal_logits"}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(score))
    own = {"prompts": {"query": prompt}, "default_prompt_name": "query" if prompt else None, **settings}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(own))
    modality = {"message": {"method": "forward", "method_output_name": "logits", "format": "flat"}} if chat else {}
    processing = {"chat_template": {"add_generation_prompt": True}} if chat else {}
    transformer = {"modality_config": modality, "processing_kwargs": processing}
    (folder / "sentence_bert_config.json").write_text(json.dumps(transformer))
    return folder


def classifier_of(plain: Any, labels: int) -> Any:
    """A random classifier over a Qwen3's config, with names of its labels."""
    config = deepcopy(plain.config)
    config.num_labels, config.pad_token_id = labels, 0
    config.id2label = {number: f"label {number}" for number in range(labels)}
    torch.manual_seed(0)
    return Qwen3ForSequenceClassification(config).eval()


def last_states(model: Any, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Return ``[N, hidden]``, each prompt alone, by HuggingFace's forward."""
    with torch.no_grad():
        return torch.stack([model.base_model(torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in prompts])


def assert_alike(found: Tensor, expected: Tensor) -> None:
    """Each row points where it should: a cosine of 0.99999 at least."""
    assert found.shape == expected.shape
    assert torch.cosine_similarity(found.double(), expected.double()).min() >= 0.99999
