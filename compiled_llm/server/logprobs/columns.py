"""The writers of log-probabilities, by endpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.outputs import Logprob
from compiled_llm.server.openai.chat.request import ChatRequest
from compiled_llm.server.openai.chat.response import ChatLogprobs, TokenLogprob, TopLogprob
from compiled_llm.server.openai.common.answers import AnswerDelta
from compiled_llm.server.openai.common.columns import ColumnWriter, Fields
from compiled_llm.server.openai.common.prompt_logprobs import PromptLogprob, PromptPlace
from compiled_llm.server.openai.completions.request import CompletionRequest
from compiled_llm.server.openai.completions.response import CompletionLogprobs
from compiled_llm.server.openai.fields.sampling import ChoiceFields
from compiled_llm.server.openai.responses.request import ResponsesRequest
from compiled_llm.server.openai.tokenizer.token_bytes import TokenNames

if TYPE_CHECKING:
    from compiled_llm.server.logprobs import columns as this
    from compiled_llm.server.openai.common.columns import WriterModule

    checked: WriterModule = this


Entries = Mapping[int, Logprob]
"""By token id: the token that stands in a place, and the most likely ones."""

LEAST = -9999.0  # OpenAI's log-probability of a token that cannot be sampled; JSON has no infinity


class _OfPrompt(ColumnWriter):
    """Log-probabilities of a prompt, as vLLM writes them."""

    def __init__(self, body: ChoiceFields, names: TokenNames, handle: RequestHandle) -> None:
        self._prompt_wanted = body.prompt_logprobs is not None
        self._names, self._handle = names, handle

    def of_prompt(self) -> Fields:
        if not self._prompt_wanted:
            return {}
        places = self._handle.prompt_logprobs or ()
        return {"prompt_logprobs": [None if entries is None else self._by_ids(entries) for entries in places]}

    def _by_ids(self, entries: Entries) -> PromptPlace:
        return {
            str(token): PromptLogprob(
                logprob=max(entry.logprob, LEAST), rank=entry.rank, decoded_token=self._names(token)
            )
            for token, entry in entries.items()
        }


class ChatColumn(_OfPrompt):
    """Log-probabilities as ``/v1/chat/completions`` writes them."""

    def __init__(self, body: ChatRequest, names: TokenNames, handle: RequestHandle) -> None:
        super().__init__(body, names, handle)
        self.is_wanted = bool(body.logprobs) or self._prompt_wanted
        self._most = None if body.logprob_token_ids else body.top_logprobs or 0

    def of_tokens(self, delta: AnswerDelta) -> Fields:
        content = _content(delta, self._most, self._names)
        return {} if content is None else {"logprobs": ChatLogprobs(content=content, refusal=None)}


class ResponsesColumn(ColumnWriter):
    """Log-probabilities as ``/v1/responses`` writes them."""

    def __init__(self, body: ResponsesRequest, names: TokenNames, handle: RequestHandle) -> None:
        self.is_wanted = body.wants_logprobs
        self._most, self._names = body.top_logprobs or 0, names

    def of_tokens(self, delta: AnswerDelta) -> Fields:
        return {"logprobs": _content(delta, self._most, self._names) or []}


def _content(delta: AnswerDelta, most: int | None, names: TokenNames) -> list[TokenLogprob] | None:
    """Return for each token its own entry, and ``most`` of the most likely ones; of None, all in their order."""
    places = delta.answer.rows("logprobs", delta.start, delta.tokens)
    return None if places is None else [_place(entries, most, names) for entries in places]


def _place(entries: Entries, most: int | None, names: TokenNames) -> TokenLogprob:
    each = [(token, entry) for token, entry in entries.items()]
    own, *_ = each
    if most is not None:
        each = sorted((one for one in each if one[1].rank <= most), key=lambda one: one[1].rank)[:most]
    top = [_entry(*one, names) for one in each]
    return TokenLogprob(top_logprobs=top, **_entry(*own, names).model_dump())


def _entry(token: int, entry: Logprob, names: TokenNames) -> TopLogprob:
    return TopLogprob(token=names(token), logprob=max(entry.logprob, LEAST), bytes=list(names.bytes(token)))


class CompletionColumn(_OfPrompt):
    """Log-probabilities as ``/v1/completions`` writes them; text offsets go on from piece to piece."""

    def __init__(self, body: CompletionRequest, names: TokenNames, handle: RequestHandle) -> None:
        super().__init__(body, names, handle)
        self.is_wanted = body.logprobs is not None or self._prompt_wanted
        self._most = body.logprobs
        self._echoes = bool(body.echo) and body.logprobs is not None  # and has not yet
        self._offset = 0

    @property
    def has_prompt(self) -> bool:  # type: ignore[override]
        handle = self._handle
        return not self._echoes or handle.done or len(handle.prompt_logprobs or ()) == len(handle.prompt)

    def of_echo(self) -> Fields:
        echoed = self._echoed()
        return {"logprobs": self.written(echoed, self._handle.prompt[0])} if echoed else {}

    def _echoed(self) -> list[Entries | None]:
        """Return what has to be told of the prompt, once."""
        echoes, self._echoes = self._echoes, False
        places = (self._handle.prompt_logprobs or ()) if echoes else ()
        return [None if entries is None else _likeliest(entries, self._most or 0) for entries in places]

    def of_tokens(self, delta: AnswerDelta) -> Fields:
        places = delta.answer.rows("logprobs", delta.start, delta.tokens)
        if places is None:
            return {}
        echoed = self._echoed()  # of a whole answer, which begins with it
        return {"logprobs": self.written([*echoed, *places], self._handle.prompt[0] if echoed else None)}

    def written(self, places: Sequence[Entries | None], first: int | None = None) -> CompletionLogprobs:
        """Return those of further tokens: of each its own entry, then the most likely ones'; ``first`` has none."""
        tokens = [first if entries is None else next(iter(entries)) for entries in places]
        own = [None if entries is None else next(iter(entries.values())).logprob for entries in places]
        return CompletionLogprobs(
            text_offset=[self._advanced(token) for token in tokens],
            token_logprobs=[None if logprob is None else max(logprob, LEAST) for logprob in own],
            tokens=["" if token is None else self._names(token) for token in tokens],
            top_logprobs=[None if entries is None else self._top(entries) for entries in places],
        )

    def _top(self, entries: Entries) -> dict[str, float]:
        named = dict[str, float]()
        for token, entry in entries.items():  # of tokens with one text, the first: the own, or else the most likely
            named.setdefault(self._names(token), max(entry.logprob, LEAST))
        return named

    def _advanced(self, token: int | None) -> int:
        offset = self._offset
        self._offset += 0 if token is None else len(self._names.text(token))
        return offset


def _likeliest(entries: Entries, most: int) -> Entries:
    """Return a place's own token, and the most likely ones, of which there may be more than are wanted."""
    own, *_ = entries
    return {token: entry for token, entry in entries.items() if token == own or entry.rank <= most}


WRITERS: Mapping[str, Callable[[Any, TokenNames, RequestHandle], ColumnWriter]] = {
    "chat": ChatColumn,
    "completions": CompletionColumn,
    "responses": ResponsesColumn,
}
