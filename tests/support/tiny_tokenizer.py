"""A tokenizer of letters."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def tokenizer() -> PreTrainedTokenizerFast:
    """Letters, and some pairs of them that a prompt's last letter can be healed to."""
    vocabulary = ["<pad>", "<s>", "</s>", "<unk>", *map(chr, range(97, 123)), " "]
    vocabulary += [f"{first}{second}" for first in "abcde" for second in "abcdefgh"]
    words = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
