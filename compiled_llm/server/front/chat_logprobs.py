"""Log-probabilities as ``/v1/chat/completions`` writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from compiled_llm.engine.output import Logprob
from compiled_llm.protocol.messages import Entry
from compiled_llm.server.front.chat_response import Logprobs, TokenLogprob, TopLogprob
from compiled_llm.server.front.token_bytes import TokenBytes

_LEAST = -9999.0
"""What OpenAI writes for what JSON has no number for: a token that cannot be chosen."""


def entries_of(logprobs: Iterable[dict[int, Logprob]]) -> list[list[Entry]]:
    """Return log-probabilities of an output as those of a stream."""
    return [[(token, entry.logprob, entry.rank) for token, entry in place.items()] for place in logprobs]


def chat_logprobs(places: Sequence[Sequence[Entry]], likeliest: int, token_bytes: TokenBytes) -> Logprobs:
    """Return what is written of some tokens.

    Args:
        places: for each token its own entry, then those of the likeliest ones.
        likeliest: how many of these are wanted.
        token_bytes: tells the bytes of tokens.
    """
    return Logprobs(content=[_place(entries, likeliest, token_bytes) for entries in places], refusal=None)


def _place(entries: Sequence[Entry], likeliest: int, token_bytes: TokenBytes) -> TokenLogprob:
    own, *_ = entries
    first = sorted((entry for entry in entries if entry[2] <= likeliest), key=_rank)[:likeliest]
    top = [_entry(entry, token_bytes) for entry in first]
    return TokenLogprob(top_logprobs=top, **_entry(own, token_bytes).model_dump())


def _rank(entry: Entry) -> int:
    return entry[2]


def _entry(entry: Entry, token_bytes: TokenBytes) -> TopLogprob:
    token, logprob, _ = entry
    written = token_bytes(token)
    return TopLogprob(token=written.decode("utf-8", "replace"), logprob=max(logprob, _LEAST), bytes=list(written))
