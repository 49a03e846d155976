"""A tokenizer with one token a character, for tiny models in folders."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from support.tiny_models import TINY


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of printable ASCII, as many tokens as tiny models have."""
    vocabulary = ["<pad>", "<s>", "</s>", "<unk>", *map(chr, range(32, 127))]
    vocabulary += [f"<{i}>" for i in range(len(vocabulary), TINY["vocab_size"])]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
