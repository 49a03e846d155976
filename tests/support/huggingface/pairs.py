"""A tiny model and its wrapped twin, in eager mode."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedModel

import compiled_llm
from support.tiny_models import tiny_qwen3

Models = tuple[PreTrainedModel, PreTrainedModel]
OPTIONS: dict[str, Any] = {"mode": "eager", "page_size": 4, "kv_memory": "4000 tokens", "max_batch_size": 16}


def pair(options: Mapping[str, Any] = MappingProxyType({}), **overrides: Any) -> Models:
    """A model and a twin, wrapped with these options."""
    return tiny_qwen3(**overrides), compiled_llm.wrap(tiny_qwen3(**overrides), **{**OPTIONS, **options})
