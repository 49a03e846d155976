"""Log-probabilities as ``/v1/chat/completions`` writes them, and those of prompts as vLLM does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from compiled_llm.protocol.messages import Entry
from compiled_llm.requests.outputs import Logprob
from compiled_llm.server.openai.chat.response import ChatLogprobs, TokenLogprob, TopLogprob
from compiled_llm.server.openai.common.prompt_response import PromptLogprob, PromptPlace
from compiled_llm.server.openai.tokenizer.token_bytes import TokenNames

LEAST = -9999.0  # OpenAI's log-probability of a token that cannot be sampled; JSON has no infinity


def entries_of(logprobs: Iterable[dict[int, Logprob]]) -> list[list[Entry]]:
    return [[(token, entry.logprob, entry.rank) for token, entry in place.items()] for place in logprobs]


def chat_logprobs(places: Sequence[Sequence[Entry]], top_logprobs: int | None, names: TokenNames) -> ChatLogprobs:
    """Return the log-probabilities of tokens: for each its own entry, and ``top_logprobs`` of the most likely ones.

    Without a number, all entries that a token has, in their order.
    """
    return ChatLogprobs(content=[_place(entries, top_logprobs, names) for entries in places], refusal=None)


def _place(entries: Sequence[Entry], top_logprobs: int | None, names: TokenNames) -> TokenLogprob:
    own, *_ = entries
    if top_logprobs is not None:
        entries = sorted((entry for entry in entries if entry[2] <= top_logprobs), key=itemgetter(2))[:top_logprobs]
    top = [_entry(entry, names) for entry in entries]
    return TokenLogprob(top_logprobs=top, **_entry(own, names).model_dump())


def _entry(entry: Entry, names: TokenNames) -> TopLogprob:
    token, logprob, _ = entry
    return TopLogprob(token=names(token), logprob=max(logprob, LEAST), bytes=list(names.bytes(token)))


def prompt_logprobs(places: Iterable[Mapping[int, Logprob] | None], names: TokenNames) -> list[PromptPlace | None]:
    """Return vLLM's log-probabilities of a prompt: by token ids, each place's own first; None for the first."""
    return [None if place is None else _by_ids(place, names) for place in places]


def _by_ids(place: Mapping[int, Logprob], names: TokenNames) -> PromptPlace:
    return {
        str(token): PromptLogprob(logprob=max(entry.logprob, LEAST), rank=entry.rank, decoded_token=names(token))
        for token, entry in place.items()
    }
