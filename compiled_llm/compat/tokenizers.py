"""Decodes as HuggingFace's tokenizers do, token by token."""

# ``_decode`` of its fast tokenizers is private. It is what ``tokenizers`` decodes, cleaned up if the tokenizer says so
# and its model is not BPE. If another class, or a later version, does more, texts are decoded by ``decode`` itself, in
# windows: three times as slow, and right. Ends when transformers offers streams of text for a tokenizer.

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def backend_of(tokenizer: object) -> Tokenizer | None:
    """Return the ``tokenizers.Tokenizer`` that decodes for a tokenizer; None if it decodes in a way of its own."""
    if "transformers" not in sys.modules:  # whose tokenizer it could be
        return None
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    of_huggingface = (
        getattr(tokenizer.decode, "__func__", None) is PreTrainedTokenizerBase.decode
        and getattr(tokenizer._decode, "__func__", None) is PreTrainedTokenizerFast._decode
    )
    return tokenizer.backend_tokenizer if of_huggingface else None


def cleans_up(tokenizer: object) -> bool:
    """Whether ``decode`` of a tokenizer takes spaces away before punctuation, unless told otherwise."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False) or not hasattr(tokenizer, "clean_up_tokenization"):
        return False
    model = type(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)).__name__
    return model != "BPE" or bool(
        getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    )


def special_tokens(backend: Tokenizer | None) -> frozenset[int]:
    """Return the tokens that a ``tokenizers.Tokenizer`` leaves out with ``skip_special_tokens``; none of None."""
    added = {} if backend is None else backend.get_added_tokens_decoder()
    return frozenset(token for token, known in added.items() if known.special)
