"""The models that features meet on, each three times: to be wrapped, exact in float32, and as HuggingFace runs it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

from support.engine.sampling_settings import VOCABULARY
from support.execution import twins
from support.execution.twins import SMALL, in_float32, random_model
from support.huggingface.recurrent_families import RECURRENT, SMALL as SMALL_RECURRENT, recurrent_model
from support.huggingface.vision import make
from support.huggingface.vision_gpu import HEADS
from support.latent_models import WITHOUT_EXPERTS, latent_model
from support.packed_layers import BLOCK, bnb_nf4, packed_model, unpacked_model
from support.tiny_models import tiny_qwen3

FAMILY = "Qwen3VL"
WORDS: dict[str, Any] = {"vocab_size": VOCABULARY, "eos_token_id": None}
LATENTS = {"kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64, "head_dim": 32}
SIXTEEN_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 96}

ON_CPU: dict[str, Callable[[int], Any]] = {
    "full attention": lambda seed: tiny_qwen3(seed, **WORDS),
    "windows": lambda seed: tiny_qwen3(seed, **WORDS, use_sliding_window=True, sliding_window=12, max_window_layers=1),
    "latents": lambda seed: latent_model(seed=seed, **WORDS, **WITHOUT_EXPERTS),
    "recurrent": lambda seed: recurrent_model("Qwen3_5", seed, **WORDS),
    "images": lambda seed: make(FAMILY, seed, **WORDS),
}
ON_GPU: dict[str, Callable[[int], Any]] = {
    "full attention": lambda seed: _qwen3(seed),
    "windows": lambda seed: _qwen3(seed, use_sliding_window=True, sliding_window=40, max_window_layers=1),
    "latents": lambda seed: random_model(
        transformers.YoutuConfig(**{**SMALL, **WORDS, **SIXTEEN_HEADS, **LATENTS}), seed, (1, 2)
    ),
    "recurrent": lambda seed: random_model(
        transformers.Qwen3_5TextConfig(
            **{**SMALL_RECURRENT, **RECURRENT["Qwen3_5"], **WORDS, "max_position_embeddings": 2048}
        ),
        seed,
    ),
    "images": lambda seed: _seeing(seed),
}


SPECIAL = range(120, 130)
"""Tokens that stand for images, which no answer may have."""


def _nf4(linear: nn.Linear) -> nn.Module:
    """Pack a layer, if its rows are whole blocks."""
    return linear if linear.in_features % BLOCK else bnb_nf4(linear)


def _seeing(seed: int) -> Any:
    settings = copy.deepcopy(HEADS[FAMILY])
    return make(FAMILY, seed, **WORDS, **settings).to(twins.DEVICE, torch.bfloat16)


def _qwen3(seed: int, **overrides: Any) -> Any:
    return random_model(transformers.Qwen3Config(**{**SMALL, **WORDS, **overrides}), seed, (1, 2))


@dataclass(frozen=True)
class Sizes:
    """How long texts are, in tokens, and what they are kept in."""

    page_size: int
    prompts: tuple[int, int]
    first: int  # tokens of the first answer, beside which others come
    others: tuple[int, int]
    pages: tuple[int, int]  # tokens in few pages, of which requests need more, and in many
    chunks: tuple[int, int]  # tokens of few in a launch, of which prompts have more, and of many


TINY = Sizes(4, (9, 40), 32, (4, 20), (92, 4000), (16, 256))
LARGER = Sizes(16, (33, 140), 64, (8, 48), (240, 8000), (64, 512))


class Three(NamedTuple):
    """A model to be wrapped, the same one exactly, and as HuggingFace runs it in the same dtype."""

    own: Any
    exact: Any
    bare: Any


def three_of(subject: str, weights: str, seed: int, gpu: bool) -> Three:
    """Make a model on the device; ``weights`` are ``"adapters"``, ``"packed"`` or plain if empty."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if gpu else []):
        plain = (ON_GPU if gpu else ON_CPU)[subject](seed)
        torch.manual_seed(seed)
        with torch.device(twins.DEVICE if gpu else "cpu"):
            if weights == "packed":
                own = packed_model(plain, _nf4)
                values = unpacked_model(own)
                return Three(own, in_float32(values), values.to(torch.bfloat16) if gpu else values)
            if weights == "adapters":
                lora = LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"], init_lora_weights=False)
                adapted: Any = get_peft_model(plain, lora)
                plain = adapted.eval().get_base_model()
    return Three(plain, in_float32(plain), copy.deepcopy(plain))
