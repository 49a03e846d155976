from __future__ import annotations

import pytest
from transformers import PreTrainedModel

import compiled_llm
from support.huggingface.pairs import OPTIONS
from support.tiny_models import tiny_qwen3


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return tiny_qwen3(eos_token_id=None)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return compiled_llm.wrap(tiny_qwen3(eos_token_id=None), **OPTIONS)
