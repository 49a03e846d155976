"""A tiny Llama as a GGUF file, with a tokenizer of one token a character."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode


def write_gguf(path: Path, model: PreTrainedModel, kind: Kind = Kind.Q8_0) -> None:
    """Write a Llama whose matrices are quantised as ``kind`` says."""
    config: Any = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    _write_sizes(writer, config)
    _write_tokens(writer, config.vocab_size)
    for name, weight in model.state_dict().items():
        _write_weight(writer, name, weight.numpy(), config, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)


def _write_tokens(writer: gguf.GGUFWriter, size: int) -> None:
    """Special tokens, then printable ASCII."""
    characters = [bytes_to_unicode()[code] for code in range(32, 127)]
    tokens = ["<pad>", "<s>", "</s>", *characters]
    tokens += [f"<{number}>" for number in range(len(tokens), size - 2)] + ["th", "he"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (size - 3))
    writer.add_token_merges(["t h", "h e"])  # none is no tokenizer, and transformers 5.17 takes one alone for a text
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def _write_weight(writer: gguf.GGUFWriter, name: str, weight: Any, config: Any, kind: Kind) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    new = names.get_name(name, try_suffixes=(".weight",))
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is not None:
        weight = _interleaved(weight, heads)
    if weight.ndim == 1:
        writer.add_tensor(new, weight)
    else:
        writer.add_tensor(new, gguf.quantize(weight, kind), raw_dtype=kind)


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Order the rows of each head as llama.cpp rotates them: in pairs of neighbours, not of halves."""
    rows = weight.reshape(heads, 2, len(weight) // heads // 2, -1)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(weight.shape)
