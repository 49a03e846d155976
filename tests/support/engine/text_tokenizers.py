"""Tokenizers of every kind that makes text of tokens in its own way, small enough to be made where they are used."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

SAMPLES = (
    "The quick brown fox jumps over the lazy dog. He said: \"don't\", and she's gone!",
    "Ein süßer Käsekuchen für 3,50 €; naïve façade, e\u0301tude, Z̤͔a̘l̙g̛o̱",
    "漢字かな交じり文、한국어 텍스트, 中文标点。",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈, 🙂🙂🙂\n\n\ttabs  and   spaces ",
    "def f(x):\n    return {'a': x ** 2}  # </answer> <|im_end|>",
    "مرحبا بالعالم नमस्ते दुनिया \u2028 \ufffd end",
)


class Numbers:
    """Words that are token ids; decoding fails on some tokens.

    Attributes:
        fails_on: those tokens.
        error: what it fails with, a panic of a library in Rust if it is no ``Exception``.
    """

    def __init__(self, fails_on: Iterable[int] = (), error: type[BaseException] = BaseException) -> None:
        self.fails_on, self.error = frozenset(fails_on), error

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [int(word) for word in text.split()]

    def decode(self, tokens: list[int], skip_special_tokens: bool = True, **_: object) -> str:
        if not self.fails_on.isdisjoint(tokens):
            raise self.error("planted")
        return "".join(f"{token} " for token in tokens)


@functools.cache
def byte_level() -> PreTrainedTokenizerBase:
    """As GPT-2's, Llama 3's and Qwen's: tokens are bytes, and may cut characters anywhere."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=380, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    tokenizer.train_from_iterator(SAMPLES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def decode(tokens: list[int]) -> str:
    """The text of an answer."""
    return str(byte_level().decode(tokens, skip_special_tokens=True))


def up_to_stop(tokens: list[int], stop: str, keeps: bool = False) -> tuple[list[int], str]:
    """What a stop string leaves of an answer: everything is decoded after each token."""
    for count in range(1, len(tokens) + 1):
        text = decode(tokens[:count])
        if stop in text and not text.endswith("\ufffd"):
            return tokens[:count], text[: text.index(stop) + (len(stop) if keeps else 0)]
    return tokens, decode(tokens)


@functools.cache
def byte_fallback() -> PreTrainedTokenizerBase:
    """As Llama 2's: words begin with a blank of their own, and what is not in the vocabulary is written in bytes."""
    words = ["▁", "▁the", "▁fox", "▁don", "'", "t", "fox", *"abcdefghijklmnopqrsuvwxyz.,!?", "é", "漢"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@functools.cache
def word_pieces() -> PreTrainedTokenizerBase:
    """As BERT's, and texts are cleaned up: there is no space before punctuation and within contractions."""
    words = ["[UNK]", "[SEP]", "i", "can", "n", "n't", "'", "'m", "'s", "'ve", "'re", "v", "re", "the", "##x", "##ve"]
    words += [*".?!,-", "漢", "é", "t", "s", "m", " ", "  "]
    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        sep_token=AddedToken("[SEP]", special=True),
        clean_up_tokenization_spaces=True,
    )


@functools.cache
def slow() -> PreTrainedTokenizerBase:
    """In Python; a token is a byte."""
    return ByT5Tokenizer()
