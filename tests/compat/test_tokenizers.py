"""Fast tokenizers of transformers decode as their backend does, and clean up when they say so."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from compiled_llm.compat import tokenizers as tokenizer_parts
from support.engine.text_tokenizers import byte_fallback, byte_level, word_pieces

pytestmark = pytest.mark.core


@pytest.mark.parametrize("kind", [byte_level, byte_fallback, word_pieces])
def test_fast_tokenizers_decode_as_their_backend_and_clean_up_unless_it_is_bpe(kind: Callable[[], Any]) -> None:
    tokenizer = kind()
    tokens = list(range(len(tokenizer)))
    backend = tokenizer_parts.backend_of(tokenizer)
    for skip in (True, False):
        text = backend.decode(tokens, skip_special_tokens=skip)
        if tokenizer_parts.cleans_up(tokenizer):
            text = tokenizer.clean_up_tokenization(text)
        assert tokenizer.decode(tokens, skip_special_tokens=skip) == text
        kept = [token for token in tokens if not (skip and token in tokenizer_parts.special_tokens(backend))]
        assert tokenizer.decode(kept) == text
    cleaned = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    bpe = type(backend.model).__name__ == "BPE"
    with pytest.MonkeyPatch.context() as patch:
        for spaces, forced in itertools.product((True, False), repeat=2):
            patch.setattr(tokenizer, "clean_up_tokenization_spaces", spaces)
            patch.setattr(tokenizer, cleaned, forced)
            patch.setattr(tokenizer, "clean_up_tokenization", lambda text: "cleaned up")
            assert tokenizer_parts.cleans_up(tokenizer) == (spaces and (forced or not bpe))
            assert (tokenizer.decode(tokens) == "cleaned up") == tokenizer_parts.cleans_up(tokenizer)
