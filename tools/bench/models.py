"""The models of published runs: random weights in known shapes, in this process, or in a folder for others to load."""

from __future__ import annotations

import itertools
import string
from pathlib import Path
from typing import cast

import torch
from shapes import SHAPES
from tokenizers import AddedToken, Tokenizer, decoders, models as tokenizer_models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from compiled_llm.commands.bench.contenders import loaded
from compiled_llm.commands.loading.load import fetched
from compiled_llm.commands.loading.source import locate

END = "<end>"


def build(name: str, dtype: torch.dtype, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """Random weights, if the name is a key of `SHAPES`, or else a model as `compiled-llm generate` takes it."""
    if name not in SHAPES:
        return loaded(name, dtype, device)
    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(SHAPES[name].config(), dtype=dtype)
    model.config.architectures = [type(model).__name__]  # as in the file of a saved model, which artifacts are made of
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
