"""The form of an answer, which a grammar follows token by token."""

# Shapes: n answers, V vocabulary.

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compiled_llm.engine.grammars.forms.grammar_source import GrammarSource
from compiled_llm.engine.grammars.mask_writer import MaskWriter

if TYPE_CHECKING:
    import xgrammar


@dataclass(eq=False, kw_only=True)
class GrammarForm:
    """The form of one answer."""

    source: GrammarSource
    stops: frozenset[int]  # the tokens that end an answer whose grammar has come to its end
    vocabulary: int  # how many logits a token has
    writer: MaskWriter = field(default_factory=MaskWriter)  # of all forms of an engine
    # must not come before ``least`` others, as far as the grammar goes on without them
    stop_token_ids: frozenset[int] = frozenset()
    least: int = 0
    matcher: xgrammar.GrammarMatcher | None = None  # once its grammar is compiled

    def begin(self, grammar: xgrammar.CompiledGrammar) -> None:
        """Stand at the beginning of a grammar."""
        from xgrammar import GrammarMatcher

        self.matcher = GrammarMatcher(grammar, override_stop_tokens=sorted(self.stops))

    def accepts(self, token: int) -> bool:
        """Advance by a token that does not end the answer; False if the grammar does not allow it."""
        return self.matcher is not None and self.matcher.accept_token(token)

    def narrow(self, allowed: NDArray[np.int32], tokens: int) -> None:
        """Remove from ``allowed`` ``[words]`` what must not come yet, after so many tokens."""
        if tokens < self.least:
            without = allowed.copy()
            words = without.view(np.uint32)
            for token in self.stop_token_ids:
                words[token >> 5] &= ~np.uint32(1 << (token & 31))
            if without.any():
                allowed[:] = without

    def no_token_left(self, tokens: int) -> str:
        """Return the error of an answer that cannot go on after so many tokens."""
        return (
            f"structured_outputs: no token is left after {tokens} new ones; see whether the model's tokens can spell "
            "the form, and whether allowed_token_ids, bad_words and logits_processors leave some that it allows"
        )
