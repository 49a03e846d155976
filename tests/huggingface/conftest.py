from __future__ import annotations

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from support.huggingface.pairs import pair
from support.parity import mixed_prompts


@pytest.fixture
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    return pair(eos_token_id=None)


@pytest.fixture
def inputs(seed: int) -> dict[str, Tensor]:
    return mixed_prompts([4, 9, 6], 128, seed)
