"""The models of published runs: random weights in known shapes, in this process, or in a folder for others to load."""

from __future__ import annotations

import itertools
import string
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models as tokenizer_models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from compiled_llm.commands.bench.contenders import loaded
from compiled_llm.commands.loading.load import fetched
from compiled_llm.commands.loading.source import locate

END = "<end>"


class Shape(NamedTuple):
    """A config of transformers: the type of the model, and what differs from the defaults of that type."""

    model_type: str
    options: dict[str, Any]

    def config(self) -> PreTrainedConfig:
        ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
        return AutoConfig.for_model(self.model_type, **{**ids, **self.options})


def _qwen3(width: int, inner: int, layers: int, heads: int, tied: bool, **other: int) -> Shape:
    options = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        **other,
    }
    return Shape("qwen3", options)


_DEEPSEEK_V2_LITE = {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 6,
    "max_position_embeddings": 32768,
}
SHAPES = {
    "tiny": _qwen3(64, 128, 2, 4, True, num_key_value_heads=2, head_dim=16, vocab_size=512),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, False),
    "qwen3.5-9b": Shape("qwen3_5_text", {}),
    "qwen3.5-35b-a3b": Shape("qwen3_5_moe_text", {}),
    "qwen3.5-35b-a3b-half": Shape("qwen3_5_moe_text", {"num_hidden_layers": 20}),
    "glm-4.7-flash": Shape("glm4_moe_lite", {}),
    "deepseek-v2-lite": Shape("deepseek_v2", _DEEPSEEK_V2_LITE),
}
"""By dense attention, recurrent layers and latents; `tiny` runs anywhere, and says nothing about speed.

35B-A3B leaves no memory for pages on a GPU of 80 GB; half of its layers are as fast each.
"""


def build(name: str, dtype: torch.dtype, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """Random weights, if the name is a key of `SHAPES`, or else a model as `compiled-llm generate` takes it."""
    if name not in SHAPES:
        return loaded(name, dtype, device)
    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(SHAPES[name].config(), dtype=dtype)
    return cast(PreTrainedModel, model.eval())


def vocabulary_of(name: str) -> int:
    """How many token ids the model has, without building it."""
    if name in SHAPES:
        return int(SHAPES[name].config().vocab_size)
    source = fetched(locate(name, progress=False), progress=False)
    file = {} if source.gguf_file is None else {"gguf_file": source.gguf_file}
    config = AutoConfig.from_pretrained(source.location, trust_remote_code=False, **file)
    return int(config.get_text_config(decoder=True).vocab_size)


def write_config(name: str, dtype: torch.dtype, folder: Path) -> None:
    """The `config.json` of random weights, from which other engines make up their own."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SHAPES[name].config(), dtype=dtype)
    model.config.update({"architectures": [type(model).__name__], "bos_token_id": 1, "eos_token_id": 2})
    model.config.to_json_file(folder / "config.json", use_diff=False)


def write_model(name: str, dtype: torch.dtype, device: torch.device, folder: Path) -> str:
    """Where servers find the model: random weights are written to the folder, with a tokenizer that is made up."""
    if name not in SHAPES:
        return name
    build(name, dtype, device).save_pretrained(folder)
    made_up_tokenizer(vocabulary_of(name)).save_pretrained(folder)
    return str(folder)


def made_up_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer, as Qwen's: bytes, then words that are in no language, and the end token last."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = itertools.chain.from_iterable(itertools.product(string.ascii_lowercase, repeat=n) for n in (1, 2, 3, 4))
    words = ("Ġ" + "".join(word) for word in letters)
    tokens = [*alphabet, *itertools.islice(words, vocabulary - len(alphabet) - 1), END]
    tokenizer = Tokenizer(tokenizer_models.BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
